# %% [markdown]
# # 2. `dsm_reduce`: one sum over several CTAs
#
# A product of 64 x 128 elements in tiles of 16 x 64 has eight tiles. An H100 has 132
# multiprocessors, so 124 of them idle. Splitting the sum over K (*split-K*) gives them work; the
# price is that partial sums have to meet. Without clusters they meet in global memory, by atomics
# or in a second kernel. Within a cluster they meet in shared memory.
#
# [Tutorial 1](01_first_cluster.py) showed the primitive. This page shows both of its forms, what
# the exchange costs, and what happens without a barrier.

# %%
import matplotlib.pyplot as plt
import numpy as np
import tvm
from support import hopper, kernel_text, measured_here, recorded, refused, show_bars
from tvm.script import tirx as T

import crossfuse
from crossfuse.emulate.cuda import remove_cluster_barrier
from crossfuse.lower.extract import lower
from crossfuse.planner.cost.rates import measured

# %% [markdown]
# ## Is it worth it? What was measured
#
# `C = A B` with M = 64, K = 1024, N = 128 in 16-bit floats, by plain instructions on clusters of
# several sizes. *Scatter* and *all-exchange* are the two forms.

# %%
found, where = recorded("validation-h100.json")
CASE = "gemm:M=64,K=1024,N=128,dtype=float16|cluster={},scatter={}"
times = {each["case"]: each["microseconds"] for each in found["cases"] if "microseconds" in each}
SIZES = (2, 4, 8, 16)
figure, ax = plt.subplots(figsize=(6, 3))
for scatter, name in ((1, "scatter"), (0, "all-exchange")):
    ax.plot(SIZES, [times[CASE.format(size, scatter)] for size in SIZES], "o-", label=name)
ax.axhline(times[CASE.format(1, 1)], color="grey", linestyle=":", label="no cluster")
ax.set(xlabel="CTAs in a cluster", ylabel="us", xscale="log", ylim=0)
ax.set_xticks(SIZES, map(str, SIZES))
ax.minorticks_off()
ax.set_title(where, fontsize=9)
ax.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# Two things to explain: scatter gets faster up to 16 CTAs (but for 8, which nobody looked into),
# and all-exchange gets *slower* again. First, both by hand.
#
# ## Scatter
#
# After `dsm_reduce`, CTA r adds slice r of all slabs. Every element of every slab is read once by
# one CTA.


# %%
@T.prim_func(s_tir=True)
def product(
    A: T.Buffer((32, 128), "float32"),
    B: T.Buffer((128, 32), "float32"),
    C: T.Buffer((32, 32), "float32"),
):
    S = T.sblock_alloc_buffer((32, 32))
    for i, j, k in T.grid(32, 32, 128):
        with T.sblock("S"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                S[vi, vj] = T.float32(0)
            S[vi, vj] = S[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(32, 32):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.max(S[vi, vj], T.float32(0))


def threads(sch, loops, count=64):
    """Bind `count` threads to loops that are taken as one."""
    _, thread = sch.split(sch.fuse(*loops), [None, count])
    sch.bind(thread, "threadIdx.x")
    return thread


def multiply(sch, partial):
    """A CTA's share of the product: its sums in registers, then in its slab."""
    store = sch.cache_write(partial, 0, "local")
    i, j = sch.get_loops(partial)[-3:-1]
    sch.reverse_compute_at(store, threads(sch, (i, j)))


def scattered(ctas):
    sch = tvm.s_tir.Schedule(product)
    S = sch.get_sblock("S")
    i, j, k = sch.get_loops(S)
    i0, i1 = sch.split(i, [1, None])
    share, depth = sch.split(k, [ctas, None])
    sch.reorder(i0, share, i1, j, depth)
    sch.bind(i0, "blockIdx.y")
    partial = sch.dsm_reduce(S, share)
    multiply(sch, partial)
    thread = threads(sch, sch.get_loops(S)[-2:-1])
    sch.set_scope(S, 0, "local")
    sch.reverse_compute_at(sch.get_sblock("C"), thread)
    return sch


print(scattered(4).cluster_layout().picture())

# %% [markdown]
# ## All-exchange
#
# With `scatter=False` every CTA adds the whole tile. That is for a consumer which needs all of it:
# the next product of a chain reads whole rows of the intermediate. The consumer has to say in
# which CTA it runs, so its rows are bound to the cluster first.


# %%
def exchanged(ctas):
    sch = tvm.s_tir.Schedule(product)
    S, C = sch.get_sblock("S"), sch.get_sblock("C")
    i, j = sch.get_loops(C)
    i0, rank, row = sch.split(i, [1, ctas, None])
    sch.bind(i0, "blockIdx.y")
    sch.cluster_bind(rank)
    threads(sch, (row, j))
    i, j, k = sch.get_loops(S)
    i0, i1 = sch.split(i, [1, None])
    share, depth = sch.split(k, [ctas, None])
    sch.reorder(i0, share, i1, j, depth)
    partial = sch.dsm_reduce(S, share, scatter=False)
    multiply(sch, partial)
    *_, ranks, i, j = sch.get_loops(S)
    thread = threads(sch, (i, j))
    sch.reorder(thread, ranks)
    sch.decompose_reduction(S, ranks)
    return sch


print(exchanged(4).cluster_layout().picture())

# %% [markdown]
# Both give the same numbers, which we check on LLVM and in the emulator.

# %%
rng = np.random.default_rng(0)
inputs = {
    "A": rng.standard_normal((32, 128), dtype="float32"),
    "B": rng.standard_normal((128, 32), dtype="float32"),
}
expected = np.maximum(inputs["A"] @ inputs["B"], 0)
for schedule in (scattered(4), exchanged(4)):
    sequential = crossfuse.run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    emulated = crossfuse.emulate_cuda(lower(schedule).image, inputs)
    emulated.raise_if_wrong()
    for report in (sequential, emulated):
        print("difference to numpy:", abs(report.outputs["C"] - expected).max())

# %% [markdown]
# ## What the exchange costs
#
# With s CTAs and a tile of e elements of float32:
#
# | | a CTA reads of its peers | on s |
# | --- | --- | --- |
# | scatter | `(s - 1) e / s` elements | hardly |
# | all-exchange | `(s - 1) e` elements | linear |
#
# Beside the bytes stand two cluster barriers. The device's record has what a barrier and a byte
# cost, measured by `crossfuse calibrate` ([how](../docs/calibration.md)). The planner's cost model
# counts with the same record, as its terms `exchange` and `barrier`.

# %%
h100 = measured("nvidia-h100")
barrier, rate = dict(h100.cluster_barrier), dict(h100.dsm_push)
print("barrier, us:          ", {size: round(barrier[size], 3) for size in SIZES})
print("bytes a us out of a SM:", {size: round(rate[size]) for size in SIZES})

TILE = 16 * 64 * 4  # bytes of a slab of the kernels in the first plot
names, waiting, moving = [], [], []
for size in SIZES:
    for form, received in (("scatter", (size - 1) / size), ("all-exchange", size - 1)):
        names.append(f"{size} CTAs, {form}")
        waiting.append(2 * barrier[size])
        moving.append(received * TILE / rate[size])
figure, ax = plt.subplots(figsize=(7, 3))
show_bars(ax, names, {"two barriers": waiting, "bytes": moving}, "us, slabs of 4 KiB")
figure.tight_layout()
plt.show()

# %% [markdown]
# So scattering a small tile costs two barriers, just below 1 us, whatever the cluster's size. It
# pays when it saves more than that: here 16 CTAs shorten a loop over K of tens of microseconds.
#
# In all-exchange every CTA reads all slabs, so that the work grows with the cluster. These bars
# are the least that it can take, at the rate of bulk copies. The kernels of the first plot read
# element by element, with fewer threads in a CTA the more CTAs there are, and pay much more: their
# line rises until it is back where no cluster was.
#
# On this machine, if it has a GPU:

# %%
if hopper():
    for name, build in (("scatter", scattered), ("all-exchange", exchanged)):
        print(name, [round(measured_here(build(size)), 2) for size in SIZES], "us")
else:
    print("no Hopper GPU here; the first plot was", where)

# %% [markdown]
# ## A missing barrier
#
# You will not write barriers, but you may write CUDA, and you should see what they are for. The
# kernel has two: slabs are full, and peers have read my slab.

# %%
image = lower(scattered(4)).image
text = kernel_text(image)
for line in text.splitlines():
    if "cluster_sync" in line or "dsm_load" in line or "for (" in line:
        print(line[:92])

# %%
with refused("and no cluster barrier lies between"):
    crossfuse.emulate_cuda(remove_cluster_barrier(image, 0), inputs).raise_if_wrong()

# %% [markdown]
# Without the first one a CTA reads what its peer has not written, of a peer that may not even have
# started. A run on a GPU may well give right numbers all day. Without the last one:

# %%
with refused("early-exit"):
    crossfuse.emulate_cuda(remove_cluster_barrier(image, -1), inputs).raise_if_wrong()

# %% [markdown]
# ## Exercises
#
# 1. Split the 32 rows of the tile instead of the sum, and pass that loop to `dsm_reduce`.
# 2. All-exchange over 3 CTAs.
# 3. Forget to bind the consumer before an all-exchange.

# %%
sch = tvm.s_tir.Schedule(product)
S = sch.get_sblock("S")
rows, columns, depth = sch.get_loops(S)
four, _ = sch.split(rows, [4, None])
with refused("dsm_reduce: block 'S', loop 'i_0'"):
    sch.dsm_reduce(S, four)

# %%
with refused("found a mask within the slice of a CTA"):
    exchanged(3)

# %%
share, rest = sch.split(depth, [4, None])
sch.reorder(share, four)
with refused("no consumer in a loop bound to cluster axis x"):
    sch.dsm_reduce(S, share, scatter=False)

# %% [markdown]
# ## Next
#
# [Tutorial 3](03_dsm_shuffle.py): a whole gated FFN in a cluster, its intermediate in slabs.
