# %% [markdown]
# # 3. `dsm_shuffle`: a gated FFN that never leaves the chip
#
# The feed-forward block of a Llama-style model is three products:
#
# ```
# hidden = silu(A B_gate^T) * (A B_up^T)        M x N
# out    = hidden D^T                           M x L
# ```
#
# As separate kernels, `hidden` goes to global memory and comes back. One CTA cannot keep it: each
# element of `out` needs a whole row of `hidden`, thousands of columns. A *cluster* can: 16 CTAs
# have 3.6 MB of shared memory. Each CTA makes one slice of the columns, keeps it as its slab, and
# takes its peers' slices when it needs them. That is `dsm_shuffle`.

# %%
import matplotlib.pyplot as plt
import tvm
from support import hopper, kernel_text, loops_text, measured_here, recorded, refused

import crossfuse
from crossfuse.emulate.cuda import remove_cluster_barrier
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.threads import schedule_ffn
from crossfuse.workload import prim_func, random_inputs, reference
from crossfuse.workload.suites import resolve

spec = resolve("gated_ffn:M=16,K=64,N=64,L=32,dtype=float32")
function = prim_func(spec)
blocks = ["gemm0_gate", "gemm0_up", "hidden", "gemm1", "out"]
print(loops_text(function.script()))

# %% [markdown]
# The function has five blocks: two products, what is made of both, the third product, and its copy
# to the output.
#
# ## By hand
#
# Begin with the *consumer*, the third product. Its columns are shared out over the CTAs, and its
# sum over `hidden`'s columns is cut into as many slices as there are CTAs. Then `dsm_shuffle`
# moves the producer in front and puts a copy from the owner's slab where you say.


# %%
def by_hand(ctas=4, *, ring=True):
    sch = tvm.s_tir.Schedule(function)
    gate, up, hidden, down, out = map(sch.get_sblock, blocks)
    rows, columns, depth = sch.get_loops(down)
    tile, row = sch.split(rows, [1, None])
    rank, column = sch.split(columns, [ctas, None])
    slices, inner = sch.split(depth, [ctas, None])
    sch.reorder(tile, rank, row, column, slices, inner)
    sch.bind(tile, "blockIdx.y")
    sch.cluster_bind(rank)
    thread = sch.fuse(row, column)  # 16 rows of 32 / ctas columns, a thread each
    sch.bind(thread, "threadIdx.x")

    at = slices if ring else thread
    stage = sch.dsm_shuffle(hidden, down, 0, at, ring=ring)

    count = 16 * 32 // ctas
    own = sch.get_loops(stage)[4 if ring else 3 :]
    _, copy = sch.split(sch.fuse(*own), [None, count])
    sch.bind(copy, "threadIdx.x")
    sch.set_scope(down, 0, "local")
    sch.reverse_compute_at(out, thread)
    sch.decompose_reduction(down, slices)
    _, make = sch.split(sch.fuse(*sch.get_loops(hidden)[2:]), [None, count])
    sch.bind(make, "threadIdx.x")
    for product in (gate, up):
        sch.set_scope(product, 0, "local")
        sch.compute_at(product, make)
    return sch


ring = by_hand()
print(ring.cluster_layout().picture())

# %% [markdown]
# ## Ring and all-gather
#
# Every CTA needs all four slices. In a *ring*, CTA r begins with its own slice and goes on with
# that of its neighbour, so that at every step each slab is read by one CTA only. In an
# *all-gather* all slices are fetched before the product begins: one wait instead of several, but
# four times the room for copies.

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 2.6))
orders = {
    "ring": [[(rank + step) % 4 for step in range(4)] for rank in range(4)],
    "all-gather": [[0, 1, 2, 3]] * 4,
}
for ax, (name, order) in zip(axes, orders.items(), strict=True):
    ax.imshow(order, cmap="tab20", vmin=-0.5, vmax=19.5)
    for rank in range(4):
        for step in range(4):
            ax.text(step, rank, f"slab {order[rank][step]}", ha="center", va="center", fontsize=8)
    ax.set(title=name, xlabel="step", ylabel="CTA", xticks=range(4), yticks=range(4))
figure.tight_layout()
plt.show()

gather = by_hand(ring=False)
print(gather.cluster_layout().picture())
for name, sch in (("ring", ring), ("all-gather", gather)):
    launch = lower(sch).image.launches[0]
    print(f"{name}: {launch.dynamic_shared_bytes} bytes of shared memory in a CTA")

# %% [markdown]
# Both checks, against float64:

# %%
inputs = random_inputs(spec, seed=0)
expected = reference(spec, inputs)
for name, sch in (("ring", ring), ("all-gather", gather)):
    sequential = crossfuse.run_sequential(sch, inputs)
    sequential.raise_if_wrong()
    emulated = crossfuse.emulate_cuda(lower(sch).image, inputs)
    emulated.raise_if_wrong()
    for report in (sequential, emulated):
        print(name, "largest difference:", abs(report.outputs["out"] - expected).max())

# %% [markdown]
# The ring's sums are taken in an order that depends on the rank, so ring and all-gather differ in
# the last bits. Each is the same in every run.
#
# ## By the rule
#
# You need not do this for each FFN. A *rule* is a function from a function to its schedule, made
# of the same calls; this one also stages the weights in shared memory and chooses tiles.

# %%
ruled = schedule_ffn(function, cluster=4)
print(ruled.cluster_layout().picture().splitlines()[0])
steps = [each.kind.name for each in ruled.trace.insts]
print(len(steps), "recorded steps:", ", ".join(sorted(set(steps))))
emulated = crossfuse.emulate_cuda(lower(ruled).image, inputs)
emulated.raise_if_wrong()
print("largest difference:", abs(emulated.outputs["out"] - expected).max())

# %% [markdown]
# `crossfuse.compile(ruled)` builds the kernel of a schedule, and `crossfuse.check` runs all checks
# on it; `crossfuse.compile(spec, rule="threads", cluster=4)` calls the rule too.
#
# ## What stays on the chip
#
# Bytes of `hidden` that move, of a 16-bit FFN with M = 128 and N = 3072 (S8), by who moves them:

# %%
M, N, ITEM = 128, 3072, 2
print(f"two kernels, through global memory: {2 * M * N * ITEM / 2**20:.2f} MiB")
for size in (2, 4, 8, 16):
    print(f"cluster of {size:2}, through DSM: {(size - 1) * M * N * ITEM / 2**20:6.2f} MiB")

# %% [markdown]
# More bytes, not fewer: each CTA fetches all slices but its own. They cross a fast, short way, and
# no kernel ends in between. Whether that pays is the question of tutorial 4.
#
# ## What was measured
#
# The FFN with M = 48, K = 256, N = L = 512 in 16-bit floats, by plain instructions:

# %%
found, where = recorded("validation-h100.json")
CASE = "gated_ffn:M=48,K=256,N=512,L=512,dtype=float16,act=silu|cluster={},ring={}"
times = {each["case"]: each["microseconds"] for each in found["cases"] if "microseconds" in each}
SIZES = (1, 2, 4, 8, 16)
figure, ax = plt.subplots(figsize=(6, 3))
for order, name in ((1, "ring"), (0, "all-gather")):
    ax.plot(SIZES, [times[CASE.format(size, order)] for size in SIZES], "o-", label=name)
ax.set(xlabel="CTAs in a cluster", ylabel="us", xscale="log", yscale="log")
ax.set_xticks(SIZES, map(str, SIZES))
ax.minorticks_off()
ax.set_yticks([30, 100, 300], ["30", "100", "300"])
ax.set_title(where, fontsize=9)
ax.legend(fontsize=8)
figure.tight_layout()
plt.show()

if hopper():
    print("here:", {n: round(measured_here(by_hand(n)), 1) for n in (2, 4, 8)}, "us")
else:
    print("no Hopper GPU here; the plot was", where)

# %% [markdown]
# Three tiles of 16 rows are three clusters: alone, three CTAs work; with 16 in a cluster, 48 do.
# Ring and all-gather are equal within a few per cent. These kernels are made of plain
# multiplications and lose to cuBLAS. The same schedule steps with tensor cores, which
# `crossfuse.compile(spec, placement="dsm")` takes, are what tutorial 4 compares.
#
# ## A barrier less
#
# The barrier between making slices and reading them, removed from the generated text:

# %%
image = lower(ring).image
print(kernel_text(image).count("crossfuse_cluster_sync();"), "cluster barriers")
with refused("no cluster barrier lies between"):
    crossfuse.emulate_cuda(remove_cluster_barrier(image, 0), inputs).raise_if_wrong()

# %% [markdown]
# ## Exercises
#
# 1. Ask the rule for 3 CTAs.
# 2. Pass the other operand's index to `dsm_shuffle` (the weights are read 1).
# 3. Cut the sum into 8 slices for 4 CTAs.
# 4. Ask the rule for an odd tile: 3 columns a thread.

# %%
with refused("found cluster size 3; limit: 1 to 16 CTAs that divide both widths"):
    schedule_ffn(function, cluster=3)


# %%
def consumer(slices):
    sch = tvm.s_tir.Schedule(function)
    down = sch.get_sblock("gemm1")
    rows, columns, depth = sch.get_loops(down)
    rank, column = sch.split(columns, [4, None])
    outer, inner = sch.split(depth, [slices, None])
    sch.reorder(rank, outer, rows, column, inner)
    sch.cluster_bind(rank)
    return sch, sch.get_sblock("hidden"), down, outer


sch, hidden, down, outer = consumer(4)
with refused("found read buffer index 1"):
    sch.dsm_shuffle(hidden, down, 1, outer)

# %%
sch, hidden, down, outer = consumer(8)
with refused("found 8 slices of 64 columns for 4 CTAs; limit: one slice a CTA"):
    sch.dsm_shuffle(hidden, down, 0, outer)

# %%
with refused("found 24, which does not divide 16"):
    schedule_ffn(function, cluster=4, tiles=crossfuse.Tiles(columns=3))

# %% [markdown]
# ## Next
#
# [Tutorial 4](04_when_dsm_loses.py): when the intermediate should *not* stay in the cluster.
