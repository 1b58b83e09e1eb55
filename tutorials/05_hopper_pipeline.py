# %% [markdown]
# # 5. The Hopper pipeline: from loops to library speed
#
# A tensor core of an H100 multiplies so fast that the whole art of a kernel is to keep it fed.
# Three parts of the chip do that together:
#
# | part | what it does |
# | --- | --- |
# | **TMA** | one thread asks for a whole box of a tensor; it arrives in shared memory, swizzled |
# | **mbarrier** | a counter in shared memory: "the bytes are here", "the stage is free again" |
# | **wgmma** | 128 threads (a warpgroup) multiply 64 rows straight from shared memory |
#
# In Crossfuse none of them is written by hand. A schedule says which tiles are staged in shared
# memory and how many stages there are; the lowering finds the pipeline in it. This page writes such
# a schedule, looks at the kernel, runs it without a GPU, and then goes from a seventh of cuBLAS's
# speed to all of it, in steps whose times were measured.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import tvm
from support import recorded_kernels, refused

import crossfuse
from crossfuse.lower.extract import lower
from crossfuse.workload import prim_func, resolve

# %% [markdown]
# ## A tile program
#
# The product `out = A B^T`, in bf16 with sums in float32, as two blocks: `gemm0` sums, `out`
# rounds.

# %%
func = prim_func(resolve("gemm:M=128,K=256,N=128,weights=nk"))


def scheduled(rows=64, columns=64, depth=64, stages=2):
    sch = tvm.s_tir.Schedule(func)
    gemm = sch.get_sblock("gemm0")
    (out,) = sch.get_consumers(gemm)
    i, j, k = sch.get_loops(gemm)
    i0, i1 = sch.split(i, [None, rows])
    j0, j1 = sch.split(j, [None, columns])
    k0, k1 = sch.split(k, [None, depth])  # 64 elements of bf16 are the 128 bytes of a swizzled row
    sch.reorder(i0, j0, k0, i1, j1, k1)
    tile = sch.fuse(i0, j0)
    sch.bind(tile, "blockIdx.x")  # a CTA for each tile of the output
    sch.set_scope(gemm, 0, "local")  # its sums live in registers: wgmma
    sch.reverse_compute_at(out, tile)  # the epilogue follows them
    for operand in (0, 1):
        box = sch.cache_read(gemm, operand, "shared.dyn")  # a box in shared memory: TMA
        sch.compute_at(box, k0)
    sch.annotate(k0, "crossfuse.stages", stages)  # a ring of so many boxes: mbarriers
    return sch


schedule = scheduled()
print(schedule.mod.script())

# %% [markdown]
# That is still an ordinary function: it can be run as it stands, loop by loop, and that is what it
# *means*. The lowering reads it as a pipeline:
#
# ```
# for tile in blockIdx.x:
#     for k0 in stages:                        producer: one thread of warpgroup 0
#         A_shared, B_shared = boxes             wait free[s]; expect bytes; TMA, TMA  -> full[s]
#         gemm0[tile] += A_shared B_shared     consumers: the other warpgroups
#                                                wait full[s]; wgmma; arrive free[s]
#     out[tile] = round(gemm0[tile])           registers -> shared memory -> TMA store
# ```

# %%
image = lower(schedule).image
(launch,) = image.launches
print(f"grid {launch.grid}, {launch.block} threads, {launch.dynamic_shared_bytes:,} bytes shared")
text = image.cuda[image.cuda.rindex('extern "C" __global__') :]
for word in ("cp_async_bulk_tensor_g2s", "mbarrier_wait", "wgmma", "stmatrix", "s2g"):
    print(f"{word:28s} {sum(word in line for line in text.splitlines()):3d} lines")

# %% [markdown]
# ## Without a GPU
#
# The emulator runs the generated CUDA with one fiber a thread: TMA, mbarriers and wgmma too, with
# every access checked against what happened before it.

# %%
rng = np.random.default_rng(0)
names = {each.name: each.shape for each in image.buffers if not each.output}
inputs = {name: rng.standard_normal(shape).astype("bfloat16") for name, shape in names.items()}
report = crossfuse.emulate_cuda(image, inputs)
report.raise_if_wrong()
exact = inputs["A"].astype(float) @ inputs["B"].astype(float).T
print("largest error:", abs(report.outputs["out"].astype(float) - exact).max())

# %% [markdown]
# ## Why a ring
#
# A box takes about a microsecond from memory to shared memory; a warpgroup multiplies it in a tenth
# of that. With one stage they take turns. With a ring the producer runs ahead, until the ring is as
# long as the latency:


# %%
def pipeline(stages, steps=16, latency=1.0, transfer=0.12, multiply=0.15):
    """When each box is asked for, arrives and is multiplied, in microseconds."""
    asked, arrived, done = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        free = done[step - stages] if step >= stages else 0.0
        asked[step] = max(free, asked[step - 1] + transfer if step else 0.0)
        arrived[step] = asked[step] + latency
        done[step] = max(arrived[step], done[step - 1] if step else 0.0) + multiply
    return asked, arrived, done


figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, sharex=True)
for axis, stages in zip(axes, (1, 4, 8), strict=True):
    asked, arrived, done = pipeline(stages)
    axis.barh(range(16), arrived - asked, left=asked, color="#cccccc", label="on its way")
    axis.barh(range(16), done - arrived, left=arrived, color="#56b4e9", label="waits")
    axis.barh(range(16), np.full(16, 0.15), left=done - 0.15, color="#0072b2", label="multiplied")
    axis.set(title=f"{stages} stage{'s' * (stages > 1)}: {done[-1]:.1f} us", xlabel="us")
axes[0].invert_yaxis()
axes[0].set_ylabel("step")
axes[2].legend(fontsize=7)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Step by step on an H100
#
# Every step is one change of the same schedule (`crossfuse bundle` builds and times such lists;
# `benchmarks/README.md` names device and commit). The product is 4096 x 4096 x 4096, 137 Gflop.

# %%
STEPS = (
    ("two stages", {"rows": 64, "columns": 64, "cluster": 1, "stages": 2}),
    ("four stages", {"rows": 64, "columns": 64, "cluster": 1, "stages": 4}),
    ("as many as fit", {"rows": 64, "columns": 64, "cluster": 1}),
    ("128 columns", {"rows": 64, "columns": 128, "cluster": 1}),
    ("256 columns", {"rows": 64, "columns": 256, "cluster": 1}),
    ("two warpgroups", {"rows": 128, "columns": 256, "cluster": 1}),
    ("clusters of 2 share B", {"rows": 128, "columns": 256, "cluster": 2}),
)
records, where = recorded_kernels("pipeline-steps-h100.jsonl")
times = {
    json.dumps(each["candidate"].get("tiles", "cuBLAS"), sort_keys=True): each["microseconds"]
    for each in records
}
found = [times[json.dumps(tiles, sort_keys=True)] for _, tiles in STEPS]
library = times['"cuBLAS"']
figure, axis = plt.subplots(figsize=(7, 3))
axis.barh([name for name, _ in STEPS], [137.4e3 / each for each in found], color="#0072b2")
axis.axvline(137.4e3 / library, color="black", linewidth=1)
axis.text(137.4e3 / library, -0.8, "cuBLAS", ha="center", fontsize=8)
axis.invert_yaxis()
axis.set(xlabel="Tflop/s", title=where)
figure.tight_layout()
plt.show()
for (name, _), each in zip(STEPS, found, strict=True):
    print(f"{name:24s} {each:8.1f} us  {library / each:5.2f} of cuBLAS")

# %% [markdown]
# What each step changes:
#
# - **Stages**: latency is hidden once the ring is as long as it. Beyond that nothing comes.
# - **Columns**: a tile of 64 x 64 reads 16 KiB for 0.5 Mflop; one of 64 x 256 reads 40 KiB for 2
#   Mflop. wgmma reads B from shared memory again for each 64 rows, so narrow tiles are bound by
#   shared memory, not by the tensor cores.
# - **Two warpgroups** multiply 128 rows by the same B, so that each box of B is used twice.
# - **Clusters**: two CTAs, one above the other, need the same B. Each loads half and multicasts it
#   to both: half the traffic from L2. Here that is no bottleneck any more, and nothing is gained: a
#   cluster has to be worth its start. It is where weights come from memory once and go to many rows
#   (tutorial 3), or where a tile is too small to be worth its bytes.
#
# What is not in this list is always there: registers move from the producer's warpgroup to the
# others, the grid is persistent, stores overlap the next tile, and neighbours in time share columns
# in L2.
#
# ## When it is refused
#
# Tiles that no wgmma has, and rings that would wait for themselves, are refused with what to do
# instead:

# %%
with refused("found a tile of 64 x 100; limit: 64 or 128 rows"):
    lower(scheduled(columns=100))

# %%
with refused("limit: 2 or more"):
    lower(scheduled(stages=1))

# %% [markdown]
# ## Exercises
#
# 1. Ask for a ring that does not fit.
# 2. Take steps of 48 elements.
# 3. `crossfuse view gemm:M=512,K=512,N=512,weights=nk -o page.html` shows the CUDA beside the line
#    that made it: which lines came of `crossfuse.stages`?

# %%
with refused("limit: 232448 bytes"):
    lower(scheduled(rows=128, columns=128, stages=40))

# %%
with refused("48 elements of the reduction in a step; limit: 64 elements"):
    lower(scheduled(depth=48))

# %% [markdown]
# ## Next
#
# [Tutorial 6](06_planner.py): how tiles are chosen without trying them. On a GPU, `crossfuse
# timeline gemm:M=4096,K=4096,N=4096,weights=nk` says when CTAs reach each event of the pipeline.
