# %% [markdown]
# # 1. A first cluster
#
# You know CUDA: a grid of thread blocks, each with its own shared memory. Hopper adds a level
# between the two. A *thread-block cluster* is up to 16 blocks (CTAs) that run at the same time on
# multiprocessors near each other, can wait for each other, and read each other's shared memory.
# That memory, taken over all CTAs of a cluster, is *distributed shared memory* (DSM).
#
# This page schedules a matrix product on clusters, checks it twice without a GPU, and looks at the
# CUDA that comes out. It takes ten minutes.
#
# ## Set-up
#
# Python 3.10 to 3.13 and a C++ compiler; no GPU.
#
# ```
# make install                       # a virtual environment with everything, .venv
# .venv/bin/crossfuse doctor         # says what is there and what is missing
# .venv/bin/jupyter lab tutorials
# ```
#
# For the tutorials a virtual environment with `pip install -e '.[notebooks]'` is enough: TVM,
# matplotlib and Jupyter, no torch and no nvcc. Only tutorial 9 needs torch. Every page is a
# notebook, made from a plain Python file of the same name that runs as well.

# %%
import matplotlib.pyplot as plt
import numpy as np
import tvm
from support import hopper, kernel_text, loops_text, refused, show_owners
from tvm.script import tirx as T

import crossfuse  # adds cluster primitives to TVM's schedule
from crossfuse.lower.extract import lower
from crossfuse.planner.cost.rates import measured

# %% [markdown]
# ## The function
#
# `C = relu(A B)` in TVM's script. A block says what one element is; loops say in which order they
# are made. `"SSR"` names two spatial axes and one that is reduced.


# %%
@T.prim_func(s_tir=True)
def product(
    A: T.Buffer((64, 128), "float32"),
    B: T.Buffer((128, 64), "float32"),
    C: T.Buffer((64, 64), "float32"),
):
    S = T.sblock_alloc_buffer((64, 64))
    for i, j, k in T.grid(64, 64, 128):
        with T.sblock("S"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                S[vi, vj] = T.float32(0)
            S[vi, vj] = S[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(64, 64):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.max(S[vi, vj], T.float32(0))


# %% [markdown]
# ## A loop becomes a cluster
#
# `cluster_bind` is to clusters what `bind` is to threads: iteration r of the loop runs in the CTA
# whose rank in its cluster is r. Here four CTAs make 16 rows each.

# %%
sch = tvm.s_tir.Schedule(product)
rows, _, _ = sch.get_loops(sch.get_sblock("S"))
ctas, _ = sch.split(rows, [4, None])
sch.cluster_bind(ctas)

print(sch.cluster_layout().picture())
print(loops_text(sch.mod.script()))

# %% [markdown]
# The loop is now `T.parallel` with an annotation, nothing else. That matters: the function is
# still an ordinary sequential program. It can be run on the CPU, stored in a trace, and changed by
# every other primitive of TVM.
#
# ## Slabs: what a CTA holds for the others
#
# CTAs that do not exchange anything need no cluster. So let us split the *reduction* over four
# CTAs. Each makes a partial tile from a quarter of K; then the four tiles have to be added.
# `dsm_reduce` does both: it keeps the partial tiles in scope `shared.dsm`, one *slab* in each CTA,
# and binds the loops to the cluster.


# %%
def split_k(ctas):
    """Tiles of 32 x 32, the sum over K split over the CTAs of a cluster."""
    sch = tvm.s_tir.Schedule(product)
    S = sch.get_sblock("S")
    i, j, k = sch.get_loops(S)
    i0, i1 = sch.split(i, [None, 32])
    j0, j1 = sch.split(j, [None, 32])
    k0, k1 = sch.split(k, [ctas, None])
    sch.reorder(i0, j0, k0, i1, j1, k1)
    sch.bind(i0, "blockIdx.y")
    sch.bind(j0, "blockIdx.x")
    partial = sch.dsm_reduce(S, k0)
    return sch, S, partial


sch, S, partial = split_k(4)
print(sch.cluster_layout().picture())

# %% [markdown]
# "Reduce-scatter" says how the sum is shared out: CTA r adds slice r of all four slabs and stores
# it. Nobody adds the whole tile. The picture shows the first cluster: which quarter of K each CTA
# multiplies, and which rows of the tile it stores.

# %%
a_of = np.full((64, 128), -1)
b_of = np.full((128, 64), -1)
c_of = np.full((64, 64), -1)
for rank in range(4):
    a_of[:32, 32 * rank : 32 * rank + 32] = rank
    b_of[32 * rank : 32 * rank + 32, :32] = rank
    c_of[8 * rank : 8 * rank + 8, :32] = rank
figure, axes = plt.subplots(1, 3, figsize=(8, 2.8))
show_owners(axes[0], a_of, "A: read by CTA", 4)
show_owners(axes[1], b_of, "B: read by CTA", 4)
show_owners(axes[2], c_of, "C: added and stored by CTA", 4)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What the cluster saves
#
# Split-K is older than clusters: every CTA writes its partial tile to global memory, and a second
# kernel reads them all and adds them. Through DSM a partial tile stays where it was made; its peers
# read all but their own slice, once. The left plot counts the bytes of our product for both ways.
# The right one says how long a CTA waits for one load from each place.

# %%
SIZES = (1, 2, 4, 8, 16)
operands = 4 * (32 * 128 + 128 * 32) * 4 / 1024  # KiB that four tiles read of A and B
result = 64 * 64 * 4 / 1024
slabs = [split_k(size)[0].cluster_layout().buffers[0] for size in SIZES]
through_dsm = [4 * (each.count - 1) * each.size / 1024 for each in slabs]  # four clusters
through_memory = [2 * 4 * each.count * each.size / 1024 * (each.count > 1) for each in slabs]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), width_ratios=(5, 3))
at = np.arange(len(SIZES))
left.bar(
    at - 0.2, through_memory, 0.38, bottom=operands + result, color="C3", label="global memory"
)
left.bar(at + 0.2, through_dsm, 0.38, bottom=operands + result, color="C0", label="DSM")
for side, label in ((-0.2, "A, B and C"), (0.2, None)):
    left.bar(at + side, operands + result, 0.38, color="lightgrey", label=label)
left.set_xticks(at, map(str, SIZES))
left.set(xlabel="CTAs that share a tile's sum", ylabel="KiB")
left.set_title("partial tiles through...", fontsize=9)
left.legend(fontsize=8)

h100 = measured("nvidia-h100")
waits = {"DSM": h100.dsm, "L2": h100.l2, "HBM": h100.hbm}
bars = right.bar(list(waits), [1000 * each for each in waits.values()], color=["C0", "C1", "C3"])
right.bar_label(bars, fmt="%.0f", fontsize=8)
right.set_ylabel("ns until a load is there")
made = h100.machine
right.set_title(f"{made['gpu']['name']}, {made['date']}\n(scripts/calibrate.py)", fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# So a cluster moves partial tiles at the lower price, and never more than half of the bytes; the
# second kernel is gone as well. What is left to pay are the barriers, see
# [tutorial 2](02_dsm_reduce.py), which also has measured times.
#
# ## Check 1: the schedule, on LLVM
#
# `run_sequential` compiles the scheduled function for the CPU and runs it twice, with all parallel
# loops forwards and backwards. Two answers would mean that CTAs or threads overwrite each other.

# %%
rng = np.random.default_rng(0)
inputs = {
    "A": rng.standard_normal((64, 128), dtype="float32"),
    "B": rng.standard_normal((128, 64), dtype="float32"),
}
expected = np.maximum(inputs["A"] @ inputs["B"], 0)

report = crossfuse.run_sequential(sch, inputs)
report.raise_if_wrong()
print("largest difference to numpy:", abs(report.outputs["C"] - expected).max())

# %% [markdown]
# ## Threads
#
# Until here a CTA has one thread. The rest is TVM as you know it: sums go to registers, elements
# of a tile to 128 threads.


# %%
def bind_threads(sch, S, partial):
    """128 threads; sums in registers."""
    store = sch.cache_write(partial, 0, "local")
    *_, i, j, _ = sch.get_loops(partial)
    _, thread = sch.split(sch.fuse(i, j), [None, 128])
    sch.bind(thread, "threadIdx.x")
    sch.reverse_compute_at(store, thread)
    *_, element, _ = sch.get_loops(S)
    _, thread = sch.split(element, [None, 128])
    sch.bind(thread, "threadIdx.x")
    sch.set_scope(S, 0, "local")
    sch.reverse_compute_at(sch.get_sblock("C"), thread)


bind_threads(sch, S, partial)
image = lower(sch).image
launch = image.launches[0]
print("grid", launch.grid, "threads", launch.block, "cluster", launch.cluster)
print(kernel_text(image))

# %% [markdown]
# Read the kernel from the top:
#
# - `blockIdx.x & 3` is the rank, `blockIdx.x >> 2` the tile: ranks are neighbours along x, and the
#   grid grew from 2 x 2 tiles to 8 x 2 CTAs;
# - the first loop nest leaves a partial tile in this CTA's shared memory, the slab;
# - `crossfuse_cluster_sync()` waits for all CTAs of the cluster: the slabs are full now;
# - `crossfuse_dsm_load_b32(address, rank)` reads the same address in the shared memory of a peer;
# - the last `crossfuse_cluster_sync()` keeps each CTA alive until its peers have read its slab.
#
# You wrote none of these barriers. The lowering puts them where CTAs depend on each other.
#
# ## Check 2: the CUDA, in the emulator
#
# The emulator runs this text on the CPU, a fiber for every CUDA thread, clusters included. It
# knows which barriers lie between any two accesses, so that it finds a race even if the numbers
# happen to be right.

# %%
report = crossfuse.emulate_cuda(image, inputs)
report.raise_if_wrong()
print("findings:", report.findings)
print("largest difference to numpy:", abs(report.outputs["C"] - expected).max())

# %% [markdown]
# ## On a GPU
#
# `crossfuse.compile` takes the schedule through nvcc to a library, and `crossfuse.check` runs both
# checks above and the GPU.

# %%
if hopper():
    for verdict in crossfuse.check(crossfuse.compile(sch)):
        print(f"{verdict.name}: {verdict.status}, {verdict.detail}")
else:
    print("no Hopper GPU here: both checks above are what `crossfuse.check` runs on the CPU")

# %% [markdown]
# ## A wrong edit
#
# What if 32 CTAs share the sum? No cluster has that many. Refusals name the primitive, the block
# and the loop, the value found, the limit, and what to do instead:

# %%
with refused("found extent 32; limit: a serial loop of extent 1 to 16, one iteration a CTA"):
    split_k(32)

# %% [markdown]
# ## Exercises
#
# Guess what happens before you read on; the cells below are the answers.
#
# 1. Bind a loop of 32 rows with `cluster_bind`.
# 2. Bind the reduction loop itself with `cluster_bind`, without `dsm_reduce`.
# 3. Use clusters of 3 CTAs: 3 divides neither K = 128 nor the tile. Is that refused?

# %%
sch = tvm.s_tir.Schedule(product)
rows, columns, depth = sch.get_loops(sch.get_sblock("S"))
wide, _ = sch.split(rows, [32, None])
with refused("found extent 32; limit: 1 to 16 CTAs in a cluster"):
    sch.cluster_bind(wide)

# %%
shares, _ = sch.split(depth, [4, None])
with refused("cluster_bind: loop 'k_0'"):
    sch.cluster_bind(shares)

# %%
sch, S, partial = split_k(3)
report = crossfuse.run_sequential(sch, inputs)
report.raise_if_wrong()
print("3 CTAs, largest difference:", abs(report.outputs["C"] - expected).max())

# %% [markdown]
# It is not: the last CTA has a smaller share, and conditions keep it within K.
#
# ## Next
#
# [Tutorial 2](02_dsm_reduce.py): what the exchange costs, when every CTA needs the whole sum, and
# what the emulator says when a barrier is missing.
