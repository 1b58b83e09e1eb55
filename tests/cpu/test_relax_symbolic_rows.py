"""Chains of symbolic rows in Relax: the kernel of a bin, picked at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm_ffi import structural_equal

from crossfuse import RefusedError, compile_model
from crossfuse.relax import BuildKernels, FuseChains
from crossfuse.relax.outcome import told
from crossfuse.relax.pipeline import serial_kernels
from crossfuse.runtime.model_record import ModelInput, ModelInputs

pytestmark = pytest.mark.cpu
D, H = 32, 64
WEIGHTS = {"gate": (D, H), "up": (D, H), "down": (H, D), "bias": (D,)}
Rows = Sequence[Any]


def symbols(*names: str) -> tuple[Any, ...]:
    return tuple(tirx.Var(each, "int64") for each in names)


def model(
    build: Callable[..., Any], shapes: dict[str, Rows], most: dict[str, int] | None = None
) -> Any:
    """A function over tensors of some shapes; `most` says what symbols stand for at most."""
    given = [relax.Var(n, relax.TensorType(s, "float16")) for n, s in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", given, attrs={"tir_var_upper_bound": most} if most else None):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *given))
        builder.emit_func_output(out)
    return builder.get()


def ffn(emit: Any, x: Any, gate: Any, up: Any, down: Any, bias: Any) -> Any:
    """A gated feed-forward layer with a bias and a residual."""
    gated = emit(op.multiply(emit(op.nn.silu(emit(op.matmul(x, gate)))), emit(op.matmul(x, up))))
    return emit(op.add(emit(op.add(emit(op.matmul(gated, down)), bias)), x))


def layers(emit: Any, x: Any, *weights: Any) -> Any:
    """Two equal layers, with a norm between them that no chain takes."""
    x = ffn(emit, x, *weights)
    return ffn(emit, emit(op.nn.rms_norm(x, weights[-1], -1)), *weights)


def due(x: np.ndarray, gate: Any, up: Any, down: Any, bias: Any) -> np.ndarray:
    a = x @ gate
    return a / (1 + np.exp(-a)) * (x @ up) @ down + bias + x


def due_layers(x: np.ndarray, *weights: Any) -> np.ndarray:
    x = due(x, *weights)
    norm = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[-1]
    return due(norm, *weights)


def weights() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.uniform(-0.5, 0.5, each).astype("float16") for each in WEIGHTS.values()]


class Machine:
    """A model on the CPU that knows which of our functions of TensorIR it ran."""

    def __init__(self, mod: Any) -> None:
        target = tvm.target.Target({"kind": "llvm", "opt-level": 1})
        built = tvm.compile(serial_kernels(mod), target=target)
        self.machine = relax.VirtualMachine(built, tvm.cpu())
        self.machine.set_instrument(self.saw)
        self.ran: list[str] = []

    def saw(self, _function: Any, name: str, before: bool, *_: Any) -> None:
        if before and "crossfuse_" in name and "_m" in name and "_call" not in name:
            self.ran.append(name)

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        self.ran.clear()
        result: np.ndarray = self.machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
        return result.astype("float64")


def close(got: np.ndarray, exact: np.ndarray, inside: bool) -> None:
    # TVM's own products of 16-bit floats add in 16 bits.
    np.testing.assert_allclose(got, exact, rtol=3e-3 if inside else 3e-2, atol=2e-2)


@pytest.mark.slow
def test_rows_pick_the_kernel_of_their_bin() -> None:
    (rows,) = symbols("rows")
    fuse = FuseChains(always=True, bins=(16, 64))
    run = Machine(fuse(model(ffn, {"x": (rows, D), **WEIGHTS})))
    (outcome,) = fuse.outcomes
    assert [(each.rows, each.name) for each in outcome.bins] == [
        (16, "crossfuse_gated_ffn_m16"),
        (64, "crossfuse_gated_ffn_m64"),
    ]
    assert outcome.name == "crossfuse_gated_ffn_rows" and outcome.text.startswith("of rows rows")
    assert "\n  up to 64 rows: crossfuse_gated_ffn_m64, about " in told(fuse.outcomes)
    given, draw = weights(), np.random.default_rng(1)
    for count, most in {0: None, 1: 16, 3: 16, 16: 16, 17: 64, 64: 64, 100: None}.items():
        x = draw.standard_normal((count, D)).astype("float16")
        got = run(x, *given)
        exact = due(*(each.astype("float64") for each in (x, *given)))
        assert run.ran == ([f"crossfuse_gated_ffn_m{most}"] if most else [])
        close(got, exact, most is not None)


@pytest.mark.slow
def test_batch_times_sequence_of_equal_layers_up_to_a_bound() -> None:
    batch, length = symbols("batch", "length")
    shapes = {"x": (batch, length, D), **WEIGHTS}
    fuse = FuseChains(always=True, bins=(16, 512))
    made = fuse(model(layers, shapes, {"batch": 4, "length": 10}))
    taken = [each for each in fuse.outcomes if each.name]
    assert [each.rows for each in taken[0].bins] == [16, 40]
    assert len(taken) == 2 and taken[0].bins == taken[1].bins
    kernels = [each for each in made.functions.values() if isinstance(each, tirx.PrimFunc)]
    assert len(kernels) == 2
    assert structural_equal(FuseChains(always=True)(made), made)
    run, given = Machine(made), weights()
    draw = np.random.default_rng(1)
    for lead, most in {(1, 1): 16, (4, 4): 16, (2, 9): 40, (4, 10): 40}.items():
        x = draw.standard_normal((*lead, D)).astype("float16")
        got = run(x, *given)
        assert run.ran == [f"crossfuse_gated_ffn_m{most}"] * 2
        close(got, due_layers(*(each.astype("float64") for each in (x, *given))), True)


def test_rows_that_no_tensor_names_come_as_a_shape() -> None:
    batch, length = symbols("batch", "length")

    def flat(emit: Any, x: Any, *given: Any) -> Any:
        rows = emit(op.reshape(x, (batch * length, D)))
        norm = emit(op.nn.rms_norm(rows, given[-1], -1))
        return emit(op.reshape(ffn(emit, norm, *given), (batch, length, D)))

    fuse = FuseChains(always=True, bins=(16,))
    run = Machine(fuse(model(flat, {"x": (batch, length, D), **WEIGHTS})))
    given = weights()
    x = np.random.default_rng(1).standard_normal((2, 5, D)).astype("float16")
    got = run(x, *given)
    assert run.ran == ["crossfuse_gated_ffn_m16"]
    exact, *wide = (each.astype("float64") for each in (x, *given))
    norm = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + 1e-5) * wide[-1]
    close(got, due(norm, *wide), True)


def refused(build: Callable[..., Any], shapes: dict[str, Rows]) -> str:
    """Why no chain of a model has a kernel."""
    fuse = FuseChains(always=True, bins=(16, 32))
    mod = fuse(model(build, shapes))
    assert not any(each.name for each in fuse.outcomes)
    assert not any(isinstance(each, tirx.PrimFunc) for each in mod.functions.values())
    return " ".join(each.text for each in fuse.outcomes)


@pytest.mark.slow
def test_only_rows_may_be_symbolic() -> None:
    rows, other = symbols("rows", "other")

    def chain(emit: Any, x: Any, b: Any, d: Any, *scales: Any) -> Any:
        hidden = emit(op.nn.relu(emit(op.matmul(x, b))))
        for each in scales:
            hidden = emit(op.multiply(hidden, each))
        return emit(op.matmul(hidden, d))

    def products(emit: Any, x: Any, k: Any, v: Any) -> Any:
        scores = emit(op.matmul(x, emit(op.permute_dims(k))))
        return emit(op.matmul(emit(op.nn.relu(scores)), v))

    def numbered(emit: Any, x: Any, b: Any, d: Any) -> Any:
        hidden = emit(op.clip(emit(op.matmul(x, b)), tirx.IntImm("int64", 0), rows))
        return emit(op.matmul(hidden, d))

    two = {"b": (D, H), "d": (H, D)}
    text = refused(chain, {"x": (rows, D), "b": (D, other), "d": (other, D)})
    assert "found the symbolic extent other, which is no part of the rows rows" in text
    assert "limit: symbolic rows alone. Instead: export the model with the extents it is" in text
    text = refused(chain, {"x": (16, D), "b": (D, other), "d": (other, D)})
    assert "found the symbolic extent other, which is no part of the 16 rows" in text
    text = refused(chain, {"x": (rows, rows), "b": (rows, H), "d": (H, D)})
    assert "limit: rows rows, and columns that are numbers" in text
    text = refused(chain, {"x": (rows, other, D), **two, "r": (other, H)})
    assert "r: found the dynamic shape" in text
    text = refused(products, {"x": (rows, D), "k": (rows, D), "v": (rows, D)})
    assert "B: found symbolic extents of an operand without rows; limit: symbolic extents" in text
    text = refused(chain, {"x": (rows * 64, D), **two})
    assert "found rows * 64 rows, the fewest of which are too many for a bin" in text
    assert "limit: bins of 16, 32 rows. Instead: add a bin of more rows" in text
    text = refused(numbered, {"x": (rows, D), **two})
    assert "limit: operators of which symbols are extents alone" in text
    with pytest.raises(RefusedError, match=r"bins: found \(0, 16\); limit: positive numbers of"):
        relax.get_pipeline("crossfuse", bins=(0, 16))


@pytest.mark.slow
def test_kernels_of_bins_are_linked_and_called_by_name(tmp_path: Path) -> None:
    batch, length = symbols("batch", "length")

    def chain(emit: Any, x: Any, b: Any, d: Any) -> Any:
        return emit(op.matmul(emit(op.nn.relu(emit(op.matmul(x, b)))), d))

    shapes = {"x": (batch, length, D), "b": (D, H), "d": (H, D)}
    fuse, build = FuseChains(always=True, bins=(32,)), BuildKernels(directory=tmp_path)
    mod = build(fuse(model(chain, shapes)))
    assert [each.path.name for each in build.kernels] == ["crossfuse_gemm_chain_m32.o"]
    assert not [each for each in mod.functions.values() if isinstance(each, tirx.PrimFunc)]
    tvm.compile(mod, target="llvm").export_library(str(tmp_path / "model.so"))

    loaded = tvm.runtime.load_module(str(tmp_path / "model.so"))
    machine = relax.VirtualMachine(loaded, tvm.cpu())
    x, b, d = (np.ones(each, "float16") for each in ((4, 8, D), (D, H), (H, D)))
    more = np.ones((3, 11, D), "float16")  # more rows than the kernel takes: TVM's operators
    result = machine["main"](*map(tvm.runtime.tensor, (more, b, d)))
    np.testing.assert_array_equal(result.numpy(), np.full((3, 11, D), D * H))
    with pytest.raises(ValueError, match="crossfuse_gemm_chain_m32: found cpu:0; limit: a CUDA"):
        machine["main"](*map(tvm.runtime.tensor, (x, b, d)))


@pytest.mark.slow
def test_programs_of_torch_with_dynamic_shapes() -> None:
    torch = pytest.importorskip("torch")
    dim, nn = torch.export.Dim, torch.nn
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D), nn.Softmax(-1)).half()
    x = torch.randn(2, 4, D).half()
    dynamic = ({0: dim("batch", max=4), 1: dim("length", max=24)},)
    program = torch.export.export(module.eval(), (x,), dynamic_shapes=dynamic)
    fn = compile_model(program, always=True, bins=(16, 512), runs_on="llvm")
    assert fn.report.fused[0] == "crossfuse_gemm_chain_rows"
    assert "\n  up to 96 rows: crossfuse_gemm_chain_m96, about " in fn.report.text()
    for lead in ((1, 3), (2, 8), (4, 24)):
        x = torch.randn(*lead, D).half()
        with torch.no_grad():
            exact = module.double()(x.double())
        torch.testing.assert_close(fn(x).double(), exact, rtol=3e-3, atol=3e-4)
    with pytest.raises(RefusedError, match=r"input: found float16\[5, 8, 32\]; limit: float16\[s"):
        fn(torch.zeros(5, 8, D).half())
    with pytest.raises(RefusedError, match=r", 32\] with \w+ at most 4, \w+ at most 24\. Instead"):
        fn(torch.zeros(4, 25, D).half())


@pytest.mark.nightly
def test_a_transformer_of_symbolic_batch_and_length() -> None:
    torch = pytest.importorskip("torch")
    nn, F, heads = torch.nn, torch.nn.functional, 4

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(D), nn.RMSNorm(D)
            self.given = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            self.out, self.down = nn.Linear(D, D), nn.Linear(H, D)
            self.gate, self.up = nn.Linear(D, H), nn.Linear(D, H)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            norm = self.first(x)
            split = (batch, length, heads, D // heads)
            every = (each(norm).view(split).transpose(1, 2) for each in self.given)
            mixed = F.scaled_dot_product_attention(*every, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, D))
            norm = self.second(x)
            return x + self.down(F.silu(self.gate(norm)) * self.up(norm))

    torch.manual_seed(0)
    module = nn.Sequential(Layer(), Layer()).half().eval()
    dynamic = ({0: torch.export.Dim("batch", max=4), 1: torch.export.Dim("length", max=64)},)
    given = (torch.randn(2, 8, D).half(),)
    program = torch.export.export(module, given, dynamic_shapes=dynamic)
    fn = compile_model(program, always=True, bins=(16, 64), runs_on="llvm")
    assert fn.report.fused[:2] == ("crossfuse_gated_ffn_rows",) * 2
    for lead in ((1, 1), (1, 5), (2, 8), (3, 11), (4, 64)):
        x = torch.randn(*lead, D).half()
        with torch.no_grad():
            exact = module.double()(x.double())
            module.half()
        torch.testing.assert_close(fn(x).double(), exact, rtol=1e-2, atol=1e-2)


def test_inputs_agree_in_what_is_symbolic() -> None:
    extents: tuple[tuple[int | str, ...], ...] = (("rows", D), ("rows", D), ("rows + 1",))
    named = zip("xyz", extents, strict=True)
    inputs = ModelInputs(tuple(ModelInput(name, "float16", each) for name, each in named), {})
    x = np.zeros((3, D), "float16")
    inputs.check((x, x, np.zeros(4, "float16")))
    with pytest.raises(RefusedError, match=r"y: found float16\[2, 32\]; limit: .*with rows = 3\."):
        inputs.check((x, x[:2], x))
    with pytest.raises(RefusedError, match=r"x: found float16\[32\]; limit: float16\[rows, 32\]\."):
        inputs.check((x[0], x, x))
