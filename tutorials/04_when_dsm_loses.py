# %% [markdown]
# # 4. When DSM loses
#
# Tutorial 3 kept an intermediate in a cluster. That is one of four places, and seldom the fastest.
# This page shows when it loses and which numbers decide, with the planner: it ranks every kernel
# that the rules can build, by estimated time, without a compiler and without a GPU.
#
# | place | the intermediate is in | what it costs |
# | --- | --- | --- |
# | `registers` | registers of its CTA | each CTA makes all that it needs, again or in parts |
# | `dsm` | slabs of a cluster | slices pass (`gather`); clusters' sums meet in L2 (`sums`) |
# | `l2` | L2, in one persistent kernel | a flag for each tile, which readers wait for (`flag`) |
# | `global` | L2 or memory, two kernels | one kernel's end, the next one's start (`relaunch`) |

# %%
import json

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator
from support import RESULTS, hopper, recorded, recorded_kernels, refused, show_bars

import crossfuse
from crossfuse.planner.plan import ranked
from crossfuse.workload import resolve

# %% [markdown]
# ## What was measured
#
# Chains of two products (G1 to G6) and a gated FFN (S8) with 128 rows, in all four places with
# tensor cores, beside PyTorch's separate kernels (cuBLAS):

# %%
found, where = recorded("small-chains-h100.json")
PLACES = ("registers", "dsm", "l2", "global", "eager")
WORKLOADS = ("G1", "G2", "G3", "G4", "G6", "S8")
times = {
    (row["workload"], row["job"]["variant"].removeprefix("ours-")): row["timing"]["microseconds"]
    for row in found["rows"]
    if row["timing"].get("microseconds")
}
print(f"{'us':9}" + "".join(f"{place:>11}" for place in PLACES))
for workload in WORKLOADS:
    row = [times.get((workload, place)) for place in PLACES]
    best = min(each for each in row if each)
    shown = ["-" if each is None else f"{each:.1f}" + "*" * (each == best) for each in row]
    print(f"{workload:9}" + "".join(f"{each:>11}" for each in shown))
print(where)

# %% [markdown]
# The cluster is second on the small chains G1 to G3 and loses on the larger ones. These kernels
# had the rules' tiles. Here is the fastest kernel in tiles of any kind that was measured in each
# place, over the number of rows:

# %%
kernels, source = recorded_kernels("candidates-h100.jsonl")
ROWS = (16, 128, 512)
figure, axes = plt.subplots(1, 4, figsize=(10, 3))
for ax, workload in zip(axes, ("G3", "G10", "G6", "S8"), strict=True):
    for place in PLACES:
        style = "k--" if place == "eager" else "o-"
        fastest = {}
        for rows in ROWS:
            spec = str(resolve(f"{workload}:M={rows}"))
            found = [each for each in kernels if each["candidate"]["spec"] == spec]
            found = [each for each in found if each["candidate"]["family"] == place]
            if found:
                fastest[rows] = min(each["microseconds"] for each in found)
        ax.plot(list(fastest), list(fastest.values()), style, label=place, markersize=4)
    ax.set(title=workload, xlabel="rows", xscale="log", yscale="log")
    ax.set_xticks(ROWS, map(str, ROWS))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    low, high = ax.get_ylim()
    ticks = [each for each in (4, 6, 8, 10, 15, 20, 30, 50, 80) if low < each < high]
    ax.set_yticks(ticks, map(str, ticks))
axes[0].set_ylabel("us")
figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=5, fontsize=8)
figure.suptitle(source, fontsize=8)
figure.tight_layout(rect=(0, 0.07, 1, 1))
plt.show()

# %% [markdown]
# On the small chains, G3 (an intermediate of 512 columns) and G10 (1536), registers win, by less
# the more rows there are. On G6 and S8 L2 and two kernels win, and with 512 rows G6 is best left to
# cuBLAS. The cluster is first nowhere. On G6 (1024 to 4096 and back) it loses by a third: why?
#
# ## G6: reading the terms
#
# `ranked` gives the best kernel of each family with the terms of its estimate. Terms that all
# share, such as reading the weights, do not decide; look at what stands in one bar alone.

# %%
plans = {each.family: each for each in ranked("G6")}
for family, plan in plans.items():
    print(f"{family:10} {plan.microseconds:6.1f} us  {plan.tiles}")

PASSING = ("gather", "sums", "flag", "relaunch", "exchange", "barrier", "kernels")
order = [each for each in PLACES if each in plans]
terms = [plans[each].terms for each in order]
rest = [sum(v for k, v in each.items() if k not in (*PASSING, "learned")) for each in terms]
figure, ax = plt.subplots(figsize=(8, 2.8))
parts = {name: [each.get(name, 0.0) for each in terms] for name in PASSING}
show_bars(ax, order, {"weights, products, start": rest, **parts}, "us, estimated (G6)")
figure.tight_layout()
plt.show()

# %% [markdown]
# A cluster owns a *tile of rows*. 128 rows are one tile, so a single cluster would do all the
# work, and most of the 132 multiprocessors none. To occupy them, the kernel cuts the
# intermediate's columns into `parts`, a cluster for each. Every part then has a partial sum of the
# *whole* output, and these meet in L2: that is the term `sums`. In L2, any multiprocessor may take
# any tile of either product, so there is nothing to part; a flag or a second kernel costs less.
#
# On small chains (G1) there is so little work that few clusters do, and the places that need a
# second phase over the whole grid pay more for it than the work itself.
#
# ## Bytes
#
# The same in bytes, for each level that they pass (of separate kernels only memory is counted):

# %%
LEVELS = ("hbm", "l2", "dsm")
figure, axes = plt.subplots(1, 3, figsize=(8, 2.4), sharey=True)
for ax, level in zip(axes, LEVELS, strict=True):
    ax.barh(order, [plans[each].bytes.get(level, 0) / 2**20 for each in order])
    ax.set_title(f"{level}, MiB", fontsize=9)
    ax.tick_params(labelsize=8)
axes[0].invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# All places read the same bytes of memory: the weights. What the cluster saves, the way of a small
# intermediate (1 MiB) to L2 and back, was cheap to begin with. *DSM saves what L2 does well.* And
# `registers` shows what the alternative to exchange is: it reads weights again and again.
#
# ## A wide FFN: does it fit at all?
#
# S3 is the FFN of a 7-billion-parameter model: 4096 to 11008. Ask for the cluster only:

# %%
with refused("tiles of dsm; limit: tiles for nvidia-h100"):
    crossfuse.plan("S3", only=("dsm",))

# %% [markdown]
# The refusal names the rule after which no tile was left. All rules, with what each leaves:

# %%
reasons = crossfuse.plan("S3").explain()
for step in reasons.pruned["dsm"]:
    print(f"{step.candidates:4} tiles: {step.text}")

# %% [markdown]
# No rule forbids it; sizes do. A slice has at most 128 columns of gate and up each (a wgmma makes
# 256), and a cluster 16 CTAs, so that a cluster holds at most 2048 of the 11008 columns. The rest
# is parts again, each with a partial sum of 4096 columns.
#
# ## More rows
#
# Estimates for other numbers of rows, S3 and G6, over the time of not fusing:

# %%
ROWS = (16, 128, 1024)
by_rows = {name: {m: ranked(f"{name}:M={m}") for m in ROWS} for name in ("S3", "G6")}
for name, plans_of in by_rows.items():
    for m, every in plans_of.items():
        eager = next(each.microseconds for each in every if each.family == "eager")
        ratios = {each.family: round(each.microseconds / eager, 2) for each in every}
        print(f"{name} M={m:<5}", "  ".join(f"{k} {v}" for k, v in ratios.items()))

# %% [markdown]
# And what bounds them: the time that each level would take alone. Where two lines cross, another
# resource decides.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharex=True, sharey=True)
for ax, (name, plans_of) in zip(axes, by_rows.items(), strict=True):
    fused = {m: next(x for x in every if x.family != "eager") for m, every in plans_of.items()}
    levels = {m: each.explain().levels for m, each in fused.items()}
    for level in ("hbm", "l2", "tensor"):
        alone = [next(x.microseconds for x in levels[m] if x.name == level) for m in ROWS]
        ax.plot(ROWS, alone, "o-", label=level)
    ax.plot(ROWS, [fused[m].microseconds for m in ROWS], "k:", label="estimate")
    ax.set(title=f"{name}: us alone", xlabel="rows", xscale="log", yscale="log")
    ax.set_xticks(ROWS, map(str, ROWS))
    ax.set_yticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.legend(fontsize=7)
figure.tight_layout()
plt.show()

# %% [markdown]
# Read it as a roofline. With few rows, S3 reads weights and nothing else matters: the best
# possible kernel is a copy, and fusion saves the gaps between kernels in which memory idles. With
# many rows the tensor cores decide, and where the intermediate lies hardly matters. G6 is short:
# at few rows no level takes much of the time. What is left is latency (starts, flags, exchanges),
# and the place with the fewest of these wins.
#
# ## So is DSM of no use?
#
# As the home of an intermediate: of use where a chain is small. But the winners above use it too.
# Their `cluster` and `split` say that CTAs share loaded tiles (multicast) and add split sums
# through DSM, as in tutorial 2. What is lost without it was measured over 18 workloads:

# %%
ablation = json.loads((RESULTS / "ablation-dsm-h100.json").read_text())
for rows, each in ablation["rows"].items():
    dsm, clusters = each["DSM factor, best"], each["cluster factor, best"]
    print(f"{rows:6} without DSM {dsm:.2f} times the time, without any clusters {clusters:.2f}")
print("best kernels, geometric means,", ", ".join(ablation["gpus"]))

# %% [markdown]
# ## On a GPU
#
# `crossfuse bench G6 --variants ours-dsm,ours-l2,ours-global,eager` measures the first table
# again, and `crossfuse explain G6 --top 5 --svg plan.svg` draws the planner's view.

# %%
if hopper():
    print("run: crossfuse bench G6 --variants ours-dsm,ours-l2,ours-global,eager  on", hopper())
else:
    print("no Hopper GPU here; the table above was", where)

# %% [markdown]
# ## Exercises
#
# 1. Ask for S3 in registers: which rule leaves nothing?
# 2. Misspell a family.
# 3. Plan for a device without a record.

# %%
with refused("tiles of registers; limit: tiles for nvidia-h100"):
    crossfuse.plan("S3", only=("registers",))

# %%
with refused("plan: only: found 'smem'"):
    crossfuse.plan("S3", only=("smem",))

# %%
with refused("nvidia-a100"):
    crossfuse.plan("S3", "nvidia-a100")

# %% [markdown]
# ## Next
#
# [Tutorial 5](05_hopper_pipeline.py): how these kernels reach the speed of a library.
# [The planner](../docs/planner.md) says how each term is counted.
