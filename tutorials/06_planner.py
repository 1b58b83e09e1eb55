# %% [markdown]
# # 6. The planner: why this kernel
#
# A chain of products can be computed in many ways: tiles of many sizes, clusters or none, the
# intermediate in registers, in the shared memory of a cluster, in L2, or in global memory between
# two kernels; or not fused at all. Compiling and timing them all takes hours. The planner counts
# what each of them moves and multiplies, turns that into microseconds with numbers measured on the
# GPU, and takes the least. This page reads its reasons, changes what it believes, and holds it
# against measured kernels of one layer. Nothing here needs a GPU.

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from support import recorded_kernels, refused

import crossfuse
from crossfuse.hardware import device
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.rates import DIRECTORY, rates_of, rates_of_file
from crossfuse.planner.explain.explanation import limited
from crossfuse.planner.families.registry import read_kernel
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.workload import resolve

plan = crossfuse.plan("S3:M=16", "nvidia-h100")  # a gated FFN, 4096 -> 11008 -> 4096, 16 rows
print(plan.family, dict(plan.tiles))
print(f"{plan.microseconds:.1f} us estimated, bound by {plan.bound}")

# %% [markdown]
# ## Reading an explanation
#
# `plan.explain()`, or `crossfuse explain S3:M=16` on the command line, says everything that went
# into this number:
#
# | table | question |
# | --- | --- |
# | levels | how many bytes pass at each level, and how long would that level alone take? |
# | terms | what is the time made of? What a stream adds to those above it counts as its own |
# | where tensors live | which level holds each tensor, and how much of a CTA's memory that takes |
# | what kernels take | CTAs, clusters, waves, registers, shared memory |
# | the best of every other family | what they lose on, in microseconds by term |

# %%
print(plan.explain().text())

# %% [markdown]
# The weights of this layer are 270 MB, which memory gives in 86 us: `hbm` is nearly all of it, so
# that no cleverness with tiles can gain more than the few microseconds of the other terms. That is
# what an explanation is for: **read the largest term before changing anything.**
#
# ## When is it worth fusing?
#
# The same layer, at other numbers of rows, and not fused (`eager`: cuBLAS, one kernel a product):

# %%
rows = [1, 16, 64, 128, 256, 512]
best = [crossfuse.plan(f"S3:M={m}") for m in rows]
apart = [crossfuse.plan(f"S3:M={m}", only=("eager",)) for m in rows]

figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(rows, [each.microseconds for each in best], "o-", label="chosen")
axes.plot(rows, [each.microseconds for each in apart], "s--", label="not fused")
for m, each in zip(rows, best, strict=True):
    axes.annotate(each.family, (m, each.microseconds), textcoords="offset points", xytext=(0, -14))
axes.set(xscale="log", xlabel="rows", ylabel="estimated us", title="S3 on an H100", ylim=(0, None))
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Asking "what if"
#
# A budget takes limits of the device away. What are clusters worth to this layer? With
# `max_cluster=1` no CTA may exchange anything with another:

# %%
for largest in (1, 2, 8, 16):
    found = crossfuse.plan("G10:M=128", limited("nvidia-h100", max_cluster=largest))
    print(f"up to {largest:2d}: {found.microseconds:6.2f} us, {found.family}, {dict(found.tiles)}")

# %% [markdown]
# ## Changing what it believes
#
# The model's numbers are in two parts: what microbenchmarks measured (`Measured`: bytes a
# microsecond by level, latencies, the tensor cores' rate by shape of tile), and what was fitted to
# the times of whole kernels (`Fitted`: how much of these rates kernels reach, what a flag costs).
# Both are plain dataclasses. A GPU whose memory is half as fast:

# %%
h100 = rates_of(device("nvidia-h100"))
print(f"HBM: {h100.measured.hbm_read / 1e6:.2f} TB/s read; a flag costs {h100.fitted.flag:.2f} us")

halved = {name: getattr(h100.measured, name) / 2 for name in ("hbm_read", "hbm_ingest_all")}
slow = replace(h100, measured=replace(h100.measured, **halved))
slower = crossfuse.plan("S3:M=16", rates=slow)
print(f"{slower.microseconds:.0f} us instead of {plan.microseconds:.0f}")

# %% [markdown]
# To **calibrate a new GPU**, run `crossfuse calibrate --out mine.json`
# on it (a minute; see `docs/calibration.md` for how each number is measured), and plan with what it
# wrote: `crossfuse explain S3 --rates mine.json`. A record of another device is refused, and says
# so:

# %%
with refused("a record of nvidia-h200"):
    rates_of_file(DIRECTORY / "nvidia-h200.json", "nvidia-h100")

# %% [markdown]
# A record with a number that cannot be (someone edited it) is refused as well:

# %%
record = json.loads((DIRECTORY / "nvidia-h100.json").read_text())
record["fitted"]["flag"] = -1
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mine.json"
    path.write_text(json.dumps(record))
    with refused("limit: at least 1e-12"):
        rates_of_file(path, "nvidia-h100")

# %% [markdown]
# ## How right is it?
#
# Kernels of four layers with 16, 128 and 512 rows, built and measured on an H100 in CUDA graphs
# with a cold L2. Left, what the model of bytes, latencies and rates says of each; right, after
# trees that learned from measured kernels have corrected it, which is what `plan` ranks by:

# %%
kernels, source = recorded_kernels("candidates-h100.jsonl")
target = device("nvidia-h100")
families, measured, alone, learned, firsts = [], [], [], [], {}
for layer in ("S3", "S8", "G6", "G10"):
    for m in (16, 128, 512):
        name = f"{layer}:M={m}"
        shape, spec = shape_of(crossfuse.plan(name).chain), str(resolve(name))
        first = len(measured)
        for each in kernels:
            candidate = each["candidate"]
            if candidate["spec"] != spec or candidate["family"] == "eager":
                continue
            kernel = read_kernel(candidate["family"], candidate["tiles"])
            families.append(candidate["family"])
            measured.append(each["microseconds"])
            model = replace(h100, trees=None)
            alone.append(float(corrected(kernel, shape, target, model).microseconds))
            learned.append(float(corrected(kernel, shape, target, h100).microseconds))
        choice = first + int(np.argmin(learned[first:]))
        firsts[name] = measured[choice] / min(measured[first:])

figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharex=True, sharey=True)
ends = np.array([min(measured) * 0.8, max(measured) * 1.2])
for ax, estimated, title in zip(axes, (alone, learned), ("model alone", "with trees"), strict=True):
    for family in ("registers", "dsm", "l2", "global"):
        here = [at for at, each in enumerate(families) if each == family]
        points = np.array(measured)[here], np.array(estimated)[here]
        ax.plot(*points, ".", alpha=0.6, label=family)
    ax.plot(ends, ends, "k-", linewidth=0.8)
    ax.fill_between(ends, 0.9 * ends, 1.1 * ends, color="grey", alpha=0.2, label="within 10 %")
    off = np.abs(np.array(estimated) / measured - 1)
    ax.set_title(f"{title}: {100 * np.median(off):.1f} % off in the median", fontsize=9)
    ax.set(xscale="log", yscale="log", xlabel="measured us")
axes[0].set_ylabel("estimated us")
axes[0].legend(fontsize=8)
figure.suptitle(f"{len(measured)} kernels, {source}", fontsize=8)
figure.tight_layout()
plt.show()

for name, ratio in firsts.items():
    print(f"{name:10} the first choice took {ratio:.2f} times the best")

# %% [markdown]
# The trees have seen these kernels, so that the right plot says how well they fit, not how well
# they guess. Errors on layers that no fit has seen are in [The planner](../docs/planner.md), losses
# included.
#
# ## Exercises
#
# 1. Ask for the intermediate of S3 in the shared memory of a cluster. No tiles are left: which
#    rule took the last ones? Try `G10:M=128` instead.
# 2. Ask for clusters of 32.
# 3. `crossfuse explain G6:M=512` says not to fuse. Which term decides? And `crossfuse explain R7`:
#    which terms does a cascade of reductions have of its own?

# %%
with refused("tiles of dsm; limit: tiles for nvidia-h100"):
    crossfuse.plan("S3:M=16", only=("dsm",))

# %%
with refused("limit: 1 to 16"):
    limited("nvidia-h100", max_cluster=32)

# %% [markdown]
# ## Next
#
# [Tutorial 7](07_tuning.py): measuring some kernels instead of trusting the estimate.
# `docs/planner.md` says how each term is counted.
