# %% [markdown]
# # 10. Debugging: a race, a deadlock, a wrong phase
#
# Faults of synchronisation are hard to find on a GPU. A race gives right numbers until the clock
# changes; a deadlock gives nothing at all; a wait for the wrong phase does either. The emulator
# decides by the barriers between two accesses, not by the order in which they happened to run. So
# it finds these faults on the CPU, in small shapes, with the statement, the CTA and the thread.
#
# Which tool, in this order:
#
# | question | tool | needs |
# | --- | --- | --- |
# | is the schedule right? | `crossfuse.run_sequential` | nothing |
# | is the CUDA right? | `crossfuse.emulate_cuda` | g++ |
# | are the numbers good enough? | `crossfuse.workload.check` | nothing |
# | does the chip agree? | `crossfuse.check`, compute-sanitizer | a GPU |

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import tvm  # noqa: F401  (TVM's script needs it)
from support import hopper, kernel_text, refused, wrapped
from tvm.script import tirx as T

import crossfuse
from crossfuse.emulate.cuda import change_argument, drop_call, wrong_rank
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import check, parse, prim_func, random_inputs

# %% [markdown]
# ## 1. A schedule that says two things
#
# Two threads write one element. LLVM runs threads forwards and then backwards, and gets two
# answers:


# %%
@T.prim_func(s_tir=True)
def halves(X: T.Buffer((64,), "float32"), Y: T.Buffer((32,), "float32")):
    for t in T.thread_binding(64, "threadIdx.x"):
        with T.sblock("Y"):
            v = T.axis.spatial(64, t)
            Y[v // 2] = X[v]


with refused("other results when parallel loops run backwards"):
    crossfuse.run_sequential(halves, {"X": np.arange(64, dtype="float32")}).raise_if_wrong()

# %% [markdown]
# ## 2. A race: the wrong barrier
#
# You tune a generated kernel by hand. This one is split-K on four CTAs; you know
# `__syncthreads()`, and it is cheaper than a cluster barrier. An edit of the text is a new image:

# %%
spec = parse("gemm:M=32,K=128,N=32,dtype=float32")
image = lower(schedule_split_k(prim_func(spec), cluster=4)).image
inputs = random_inputs(spec, seed=0)


def edited(image, old, new):
    """The first `old` within the kernel replaced, the helpers in front of it left alone."""
    start = image.cuda.rindex("__global__")
    assert old in image.cuda[start:], old
    return replace(image, cuda=image.cuda[:start] + image.cuda[start:].replace(old, new, 1))


def findings(image, inputs):
    """Emulate, and print what was found: kind, thread, lines of the text, what happened."""
    report = crossfuse.emulate_cuda(image, inputs)
    for each in report.findings:
        places = [text.split(":")[0] for text in (each.first, each.second) if text]
        print(f"{each.kind}, CTA {each.cta} thread {each.thread}, {' and '.join(places)}")
        print(wrapped(each.detail, "    "))
    print("no findings" if report.ok else f"{len(report.findings)} finding(s)")
    return report


findings(image, inputs)
print()
report = findings(edited(image, "crossfuse_cluster_sync();", "__syncthreads();"), inputs)

# %% [markdown]
# A finding has the kind, the buffer and place, one or two statements of the text, and the thread:

# %%
race = report.findings[0]
print("buffer:   ", race.buffer, race.unit, race.index)
print("statement:", race.first[:90], "...")
print("and:      ", race.second[:90], "...")

# %% [markdown]
# `__syncthreads()` orders the threads of one CTA. The slab is read by three *other* CTAs, and for
# these only a cluster barrier counts.
#
# ## 3. A deadlock: a barrier in a branch
#
# "The last CTA has nothing to add, so it need not wait":

# %%
branch = "if ((blockIdx.x & 3) != 3) crossfuse_cluster_sync();"
report = findings(edited(image, "crossfuse_cluster_sync();", branch), inputs)
assert "deadlock" in {each.kind for each in report.findings}

# %% [markdown]
# Read the *last* finding first, it is the plain one: rank 0 waits at barrier 2, and rank 3 has
# finished after arriving at 1. All CTAs of a cluster must arrive at each of its barriers. The
# races before are what follows: the barriers of rank 3 are off by one, so that its second is the
# others' first.
#
# ## 4. A wrong phase
#
# Kernels of the Hopper pipeline have a ring of stages in shared memory. One thread asks TMA for
# tiles (the producer), warpgroups multiply (the consumers). Each stage has two mbarriers, *full*
# and *empty*. An mbarrier counts in phases, and a wait names one of two, by parity. Stages are
# used again, so the parity flips with every round:

# %%
STAGES, STEPS = 2, 8
steps = np.arange(STEPS)
figure, ax = plt.subplots(figsize=(7, 1.9))
for start, label, offset in ((0, "load", 0.0), (1, "multiply", -0.4)):
    for step in steps:
        colour = f"C{(step // STAGES) % 2}"
        ax.broken_barh(
            [(step + start, 0.95)], (STAGES - step % STAGES + offset, 0.35), color=colour, alpha=0.6
        )
        where = (step + start + 0.05, STAGES - step % STAGES + offset + 0.08)
        ax.text(*where, f"{label} {step}", fontsize=6)
ax.set(yticks=[1, 2], yticklabels=["stage 1", "stage 0"], xlabel="time, in steps")
ax.set_title("colour: parity of the round", fontsize=9)
figure.tight_layout()
plt.show()

tile_spec = parse("gemm:M=128,N=64,K=256,dtype=bfloat16,weights=nk")
tiles = TensorTiles(rows=128, columns=64, cluster=1, stages=2)
# Of two multiprocessors: the emulator need not run more CTAs than the tile has.
small = replace(device("nvidia-h100"), sms=2)
ring = lower(schedule_tiled_gemm(prim_func(tile_spec), tiles=tiles), small).image
tile_inputs = random_inputs(tile_spec, seed=0)
for line in kernel_text(ring).splitlines():
    if "mbarrier_wait(" in line or "^ 1)" in line:
        print(line.strip()[:96])

# %% [markdown]
# The first wait is the producer's, for an *empty* stage. It begins with the opposite parity,
# because all stages are empty at first, without anyone having said so. The classic mistake is to
# begin with the same as the consumers:

# %%
WAIT = "tvm_builtin_cuda_mbarrier_wait"
report = findings(change_argument(ring, WAIT, 1, "{} ^ 1", 0), tile_inputs)

# %% [markdown]
# Everybody waits: the finding lists who waits for which phase of which mbarrier, and what it
# lacks. Two arrivals are the two warpgroups, which would have to hand back a stage that they never
# got. The list is the chain of causes: look for the one who waits for something that *should* have
# happened.
#
# The second mistake is a parity that never flips. The consumer goes through in the second round,
# because the first round's phase is long over; and a phase passes that nobody waited for:

# %%
report = crossfuse.emulate_cuda(change_argument(ring, WAIT, 1, "0", 2), tile_inputs)
print(len(report.findings), "findings of kinds", sorted({each.kind for each in report.findings}))
print(report.findings[0].detail)
assert {each.kind for each in report.findings} == {"async-race", "mbarrier"}

# %% [markdown]
# And a third: the number of bytes that the full barrier expects. TMA counts down what arrives:

# %%
EXPECT = r"tvm_builtin_ptx_mbarrier_arrive_expect_tx\w+"
report = findings(change_argument(ring, EXPECT, 1, "{} / 2"), tile_inputs)
assert "-4096 bytes" in report.findings[0].detail

# %% [markdown]
# Half of 8192 was announced, 8192 came, so it "lacks -4096 bytes" and never completes.
#
# ## 5. What the emulator does not see
#
# Numbers that are wrong in good order. A ring of slices with the rank off by one reads what is
# there, has been written, and is the wrong slice:

# %%
ffn = parse("gated_ffn:M=16,K=64,N=64,L=32,dtype=float32")
ffn_inputs = random_inputs(ffn, seed=0)
shifted = wrong_rank(lower(schedule_ffn(prim_func(ffn), cluster=4)).image, wrap=True)
report = findings(shifted, ffn_inputs)
with refused("element-error"):
    check(ffn, ffn_inputs, report.outputs["out"])

# %% [markdown]
# So always compare with a reference, too. `check` knows how large an error may be: at most twice
# that of separate kernels of the same type, against float64.
#
# ## On a GPU
#
# `crossfuse.check(compiled)` runs everything above and the kernel itself; `python -m crossfuse
# doctor` says whether this machine can. `scripts/validate_gpu.py --sanitizer racecheck` runs all
# families of kernels under compute-sanitizer.

# %%
if hopper():
    for verdict in crossfuse.check(crossfuse.compile(schedule_split_k(prim_func(spec), cluster=4))):
        print(f"{verdict.name}: {verdict.status}, {verdict.detail}")
else:
    print("no Hopper GPU here")

# %% [markdown]
# ## Exercises
#
# Each fault is one line; guess the kind of finding first.
#
# 1. Read from rank + 1 in the split-K kernel, without taking it modulo 4.
# 2. Let thread 0 skip the first cluster barrier.
# 3. Drop the consumer's wait for a full stage.
# 4. Remove the third cluster barrier of a kernel that has two.

# %%
with refused("rank 4 in a cluster of 4 CTAs"):
    crossfuse.emulate_cuda(wrong_rank(image), inputs).raise_if_wrong()

# %%
skipped = edited(image, "crossfuse_cluster_sync();", "if (threadIdx.x) crossfuse_cluster_sync();")
with refused("barrier-divergence"):
    crossfuse.emulate_cuda(skipped, inputs).raise_if_wrong()

# %%
report = crossfuse.emulate_cuda(drop_call(ring, WAIT, 2), tile_inputs)
assert "async-race" in {each.kind for each in report.findings}
print(report.findings[0].detail)

# %%
with refused("found 2 calls of crossfuse_cluster_sync; limit: one with index 2"):
    drop_call(image, "crossfuse_cluster_sync", 2)

# %% [markdown]
# ## Next
#
# [Tutorial 11](11_extending.py): a primitive, a rule and a cost term of your own. Or plant a fault
# in a kernel of your own: `tests/cpu/hopper/test_gemm_faults.py` has more of them, each with the
# finding that must name it. [The Hopper pipeline](../docs/hopper.md) says what its parts wait for.
