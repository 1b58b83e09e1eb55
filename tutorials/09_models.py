# %% [markdown]
# # 9. Compiling a model
#
# Until here a workload was one function. A model is hundreds, and most of them are no business of
# ours: what pays is found among them, becomes a kernel, and the rest stays with TVM or PyTorch.
# There are three ways in:
#
# | you have | you call | the rest |
# | --- | --- | --- |
# | a PyTorch model to run in PyTorch | `torch.compile(model, backend="crossfuse")` | inductor's |
# | a PyTorch or ONNX model to ship | `crossfuse.compile_model(model, ...)` | TVM's |
# | a Relax module, your own pipeline | `relax.get_pipeline("crossfuse")`, or its passes | TVM's |
#
# This page needs torch (`make install` has it, or `pip install 'crossfuse[torch,onnx]'`), but no
# GPU: scheduled functions run on LLVM, one thread after the other. That says what a model computes
# and nothing of its time, so the model is small.

# %%
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from support import RESULTS, hopper, refused, show_lines
from torch import nn

import crossfuse
from crossfuse.torch import Backend, reports

warnings.filterwarnings("ignore", category=FutureWarning)  # of torch.export
ROWS, WIDTH, HIDDEN = 16, 64, 128


class Layer(nn.Module):
    """A norm, a gated FFN with a residual, and a head with a softmax."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return torch.softmax(self.head(x), -1)


torch.manual_seed(0)
model = Layer().to(torch.bfloat16).eval()
x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
with torch.inference_mode():
    eager = model(x)
    exact = Layer().double().eval()
    exact.load_state_dict(model.state_dict())
    exact = exact(x.double())


def error(y):
    """The largest error against float64."""
    return float((y.double() - exact).abs().max())


print(f"eager: error {error(eager):.1e}")

# %% [markdown]
# ## A whole model, without PyTorch
#
# `compile_model` imports the model to Relax, runs our phases and TVM's, and gives a callable.
# `runs_on="llvm"` is for machines without a GPU.

# %%
compiled = crossfuse.compile_model(model, (x,), runs_on="llvm")
y = compiled(x)
print(f"compile_model: error {error(y):.1e}")
assert error(y) <= 2 * error(eager)

# %% [markdown]
# Twice eager's error is what the project allows itself, here and in every test.
#
# ## What was fused, and why
#
# The report has a line for each group that was looked at. Lines of chains say the planner's
# estimate of ours and of separate kernels; those of cascades the bytes of memory before and after.
# What was left has the reason.

# %%
show_lines(compiled.report.text())

# %% [markdown]
# Read it from the top:
#
# - `crossfuse_gated_ffn`: gate, up and down are one kernel, and the residual `x` is added in it;
# - the next chain, down and head, *is* one, too; but a product can be in one kernel only, and the
#   first chain saves more;
# - with the norm in front of it the FFN could be one kernel as well, which saves less for layers
#   as small as these: the norm is fast alone, and the FFN's intermediate stays in registers here;
# - the norm and the softmax are cascades of reductions (tutorial 8), each one kernel of threads
#   that reads its input once;
# - the head's product stays with TVM: a single product is what libraries are good at.
#
# Names never matter. The FFN is found because of what is computed, however it is written:
# activations may be decomposed, weights transposed, casts and reshapes lie between.
#
# ## Not fusing is a result
#
# If an intermediate is read by someone else, it has to be written anyway, so nothing is saved by
# keeping it on the chip. Return it, and see:


# %%
class Leaky(Layer):
    """The same, whose hidden activations somebody wants to see."""

    def forward(self, x):
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden), hidden


leaky = crossfuse.compile_model(Leaky().to(torch.bfloat16).eval(), (x,), runs_on="llvm")
show_lines(leaky.report.text(), 1)
assert not any("crossfuse_gated_ffn" in each for each in leaky.report.fused)

# %% [markdown]
# Other rows than those that were compiled for are another model; the error names both:

# %%
with refused("found bfloat16[8, 64]; limit: bfloat16[16, 64]"):
    compiled(x[:8])

# %% [markdown]
# ## `torch.compile`
#
# Torch captures the graph; our pass replaces chains that pay; inductor compiles what is left. With
# tensors on the CPU nothing is replaced, unless the option `cpu="llvm"` asks to see it. (`rest`
# would be `"inductor"` on a GPU; `"eager"` is quicker here. `always` fuses even where it is
# estimated to be slower.)

# %%
fn = torch.compile(model, backend="crossfuse", options={"cpu": "llvm", "rest": "eager"})
with torch.inference_mode():
    y = fn(x)
show_lines(reports()[-1].text())
print(f"torch.compile: error {error(y):.1e}")
assert error(y) <= 2 * error(eager)

# %% [markdown]
# What a backend may *not* do is break a model. Whatever goes wrong on our side, torch runs the
# graph as it would have, and the report says why:

# %%
torch.compiler.reset()
fn = torch.compile(model, backend="crossfuse", options={"rest": "eager"})
with torch.inference_mode():
    fn(x)
print(reports()[-1].text())

# %% [markdown]
# ## ONNX
#
# An `.onnx` file goes the same way. Initialisers are weights, the other inputs are inputs:


# %%
def mlp(rows):
    """Two layers with a ReLU between them, as an ONNX model."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    half = TensorProto.FLOAT16
    shapes = {"b": (WIDTH, HIDDEN), "d": (HIDDEN, WIDTH)}
    weights = {k: (random.standard_normal(v) / 8).astype("float16") for k, v in shapes.items()}
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "b"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "d"], ["y"]),
        ],
        "mlp",
        [helper.make_tensor_value_info("x", half, [rows, WIDTH])],
        [helper.make_tensor_value_info("y", half, [rows, WIDTH])],
        [numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8), weights


if find_spec("onnx"):
    import onnx

    graph, weights = mlp("batch")
    path = Path(tempfile.mkdtemp()) / "mlp.onnx"
    onnx.save(graph, path)
    # The number of rows is open in the file. Here it is 16; ("rows", WIDTH) would leave it open:
    from_file = crossfuse.compile_model(path, runs_on="llvm", shapes={"x": (ROWS, WIDTH)})
    given = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype("float16")
    wide = [each.astype("float64") for each in (given, *weights.values())]
    due = np.maximum(wide[0] @ wide[1], 0) @ wide[2]
    print(f"onnx: error {abs(np.asarray(from_file(given), 'float64') - due).max():.1e}")
    show_lines(from_file.report.text(), 1)
    with refused("pass shapes="):
        crossfuse.compile_model(path, runs_on="llvm")
else:
    print("no package onnx here: pip install 'crossfuse[onnx]'")

# %% [markdown]
# ## What it is worth
#
# One layer of Llama-3.2-1B in bfloat16, recorded on an H100. All three run in CUDA graphs with a
# cold L2 cache:

# %%
lines = (RESULTS / "models-h100.txt").read_text().splitlines()
machine = lines[0].removeprefix("# ")
device, date = machine.split(",")[0], next(each for each in machine.split(", ") if "2026-" in each)
NAMES = ("crossfuse", "eager", "torch.compile", "eager, FFN alone")
rows = [line.split()[2:] for line in lines if line.split()[:2] == ["llama-3.2-1b", "layer"]]
rows = [each for each in rows if each[0].isdigit() and len(each) == 8]
tokens = [each[0] for each in rows]
columns = {name: [float(each[at]) for each in rows] for at, name in enumerate(NAMES, 1)}
figure, axes = plt.subplots(figsize=(6, 3))
for at, (name, values) in enumerate(columns.items()):
    axes.bar(np.arange(len(tokens)) + (at - 1.5) * 0.2, values, 0.2, label=name)
axes.set_xticks(range(len(tokens)), tokens)
axes.set(xlabel="tokens", ylabel="us", title=f"{device}, {date.split(';')[0]} (models-h100.txt)")
axes.legend(fontsize=7)
figure.tight_layout()
plt.show()
for each in rows:
    print(f"{each[0]:>4} tokens: {each[6]} times as fast as eager, {each[7]} times torch.compile")

# %% [markdown]
# Only the feed-forward networks are ours, 41 to 50 % of eager's time (the last bars). Much of the
# gain over eager is inductor's, so the honest comparison is with `torch.compile` alone: 1.09 to
# 1.12 at few tokens (1.03 to 1.06 in another run), 1.03 at 512, where the tensor cores decide and
# cuBLAS is good. With one token `mode="max-autotune"` is faster still: it writes products as sums,
# and has them 10 us earlier than cuBLAS. Our backend takes the same mode for what it leaves.
#
# ## On a GPU
#
# `crossfuse bench model:llama-3.2-1b,layers=2 --m 1,16,128,512 --variants ours,eager,compile`
# measures it again; `fn = torch.compile(model, backend="crossfuse")` is all that a model needs.

# %%
if hopper():
    here = Layer().to("cuda", torch.bfloat16).eval()
    torch.compiler.reset()
    with torch.inference_mode():
        torch.compile(here, backend="crossfuse")(x.cuda())
    print(reports()[-1].text())
else:
    print("no Hopper GPU here; the times above were recorded on", machine.split(";")[0])

# %% [markdown]
# ## Exercises
#
# 1. Compile without example inputs.
# 2. Misspell where it runs.
# 3. Give the backend an option that it does not know: who compiles the rest?
# 4. Replace the gated FFN by a plain one with biases and a GELU. Is it found?

# %%
with refused("found no example inputs; limit: one tensor for each input"):
    crossfuse.compile_model(model)

# %%
with refused("found 'cpu'; limit: 'cuda' or 'llvm'"):
    crossfuse.compile_model(model, (x,), runs_on="cpu")

# %%
with refused("limit: 'inductor' or 'eager'"):
    Backend(rest="tvm")

# %%
plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
plain = plain.to(torch.bfloat16).eval()
found = crossfuse.compile_model(plain, (x,), runs_on="llvm").report
show_lines(found.text(), 1)
assert "crossfuse_gemm_chain" in found.fused

# %% [markdown]
# ## Next
#
# [Tutorial 10](10_debugging.py): when a kernel is wrong. [Models](../docs/models.md) has dynamic
# shapes, caches, and MLPs replaced in place; [Relax](../docs/relax.md) says which calls become a
# cascade.
