# %% [markdown]
# # 7. Tuning: measure a few, keep what was found
#
# The planner of tutorial 6 takes the kernel with the least *estimated* time. It is a few per cent
# off, and the order of the first ten is partly chance. Tuning builds some of them, measures, and
# lets what it sees guide what it tries next. The GPU may be here, behind a tracker, or in a box
# that only files can reach. This page searches through kernels whose times were recorded on an
# H100, so that you can watch a search without a GPU; then it goes the whole way of a bundle.

# %%
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from support import RESULTS, hopper, recorded_kernels, refused

from crossfuse.bench.job import Timing
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.build import Build, Conditions
from crossfuse.meta_schedule.builder import import_intrinsics
from crossfuse.meta_schedule.candidate import kernels_of, schedule_candidate
from crossfuse.meta_schedule.records import Record, Store, append, open_database, workload_module
from crossfuse.meta_schedule.rpc import read_tracker
from crossfuse.meta_schedule.tune import make_bundle, open_bundle, open_tuning
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.kernels.shape import select
from crossfuse.planner.tune.kernel_space import Group, KernelSpace
from crossfuse.planner.tune.strategy import make_strategy
from crossfuse.workload import resolve

spec = resolve("G6:M=128")  # a chain of two products, 1024 -> 4096 -> 1024
space = kernels_of(spec, "nvidia-h100")
for group in space.groups:
    print(f"{group.family:10} {group.size:6} kernels, fields {', '.join(group.axes)}")
print(f"{len(space)} in all; compiling each would take {len(space) * 6 / 3600:.0f} hours of a core")

# %% [markdown]
# ## A space with steps
#
# A point of the space is a kernel. Along each field of its tiles a step leads to the next value,
# and from family to family: the intermediate moves from registers to a cluster, to L2, to global
# memory. Searches walk along these steps.

# %%
best = int(space.order[0])
print("first by the estimate:", space.tiles(best))
for move, to in list(space.moves(best).items())[:6]:
    faster = space.prior[to] - space.prior[best]
    print(f"  {move.axis:9} {move.way:9} {faster:+6.2f} us")

# %% [markdown]
# ## A search, replayed
#
# `candidates-h100.jsonl` has the times of kernels of many workloads, measured in CUDA graphs with
# cold weights. Here is the part of the space that was measured for ours. A search proposes points,
# is told their times, and proposes again; `measure` looks a time up instead of running a kernel.

# %%
kernels, where = recorded_kernels("candidates-h100.jsonl")
kernels = [each for each in kernels if each["candidate"]["spec"] == str(spec)]
recorded_times, cublas = {}, 0.0
for each in kernels:
    candidate = each["candidate"]
    if candidate["family"] == "eager":
        cublas = each["microseconds"]
    else:
        point = space.find(candidate["family"], candidate.get("tiles", {}))
        if point is not None:
            recorded_times[point] = each["microseconds"]


def known_part(space, points):
    """The same space with some of its points alone, and their old numbers in the new order."""
    groups, old = [], []
    for group, here in space.by_group(sorted(points)):
        chosen = np.array(sorted(points))[here]
        kernels = select(group.kernels, chosen - group.first)
        groups.append(Group(group.family, kernels, len(old)))
        old += chosen.tolist()
    # Trees were learned from these very kernels: without them the estimate has not seen any.
    rates = replace(rates_of(device("nvidia-h100")), trees=None)
    return KernelSpace(space.shape, space.device, rates, tuple(groups)), old


part, old = known_part(space, recorded_times)
times = np.array([recorded_times[each] for each in old])
print(f"{len(part)} kernels, {times.min():.1f} to {times.max():.1f} us, {where}")

# %%
TRIALS = 24


def best_so_far(strategy, seed):
    """The time of the fastest after each trial."""
    search, seen = make_strategy(strategy, part, seed=seed), []

    while len(seen) < TRIALS:
        points = search.propose(4)
        found = [times[each] for each in points]
        search.learn(points, found)
        seen += found
    return np.minimum.accumulate(seen)


# Lines of the same course lie on each other: the first is the widest.
STYLES = {
    "evolution": {"color": "C0", "linewidth": 5, "alpha": 0.5},
    "annealing": {"color": "C1", "linewidth": 3},
    "model": {"color": "C2", "linewidth": 1.5},
    "random": {"color": "C3", "linewidth": 1.5},
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for strategy, style in STYLES.items():
    runs = np.array([best_so_far(strategy, seed) for seed in range(10)])
    trials = range(1, TRIALS + 1)
    axes[0].step(trials, runs.mean(0), where="post", label=strategy, **style)
    print(f"{strategy:10}", " ".join(f"{each:5.1f}" for each in runs.mean(0)[[0, 3, 7, 15, 23]]))
axes[0].axhline(cublas, color="k", linewidth=0.8, linestyle="--", label="cuBLAS")
axes[0].set(xlabel="trials", ylabel="us of the best, mean of 10 seeds", xscale="log")
axes[0].set_title(f"G6, replayed;\n{where}", fontsize=8)
axes[0].legend(fontsize=8)

# What four strategies did on the GPU itself, with all kernels to choose from:
study = json.loads((RESULTS / "search-study-h100.json").read_text())
for strategy, after in study["mean"].items():
    trials = [int(each) for each in after]
    axes[1].plot(trials, after.values(), "o-", label=strategy, **STYLES[strategy])
axes[1].set(xlabel="trials", ylabel="share of the best known speed", xscale="log")
axes[1].set_title(
    "three workloads, recorded on NVIDIA H100 80GB HBM3,\n2026-11-22 (search-study-h100.json)",
    fontsize=8,
)
for ax in axes:
    ax.xaxis.set_major_formatter("{x:g}")
figure.tight_layout()
plt.show()

# %% [markdown]
# Left, the estimate has never seen a kernel, only microbenchmarks. `random` shows how much there is
# to lose, even among kernels that somebody thought worth measuring. `model` measures in the order
# of the estimate and learns nothing. `evolution` (the default) and `annealing` first try the best
# of each family in turn, then go from the fastest that were measured along the steps above.
#
# Right, the estimate has trees that learned from a thousand kernels: its first choice is 4 % from
# what all searches together found. So: **a few trials are worth it, hundreds are not**. During a
# search, the same kind of trees learns from your own measurements (`pip install 'crossfuse[tune]'`,
# or `--no-learn`).
#
# ## A box with a GPU and no network
#
# This is the case that most people have: you compile and think here, a machine elsewhere measures,
# and only files go to and fro.
#
# ```
# crossfuse tune G6:M=128 --work-dir tuned --trials 4 --runner bundle    # here: proposals
# ... copy tuned/bundle to the box ...
# python tuned/bundle/measure.py --budget 540                            # there: measure
# ... copy results.jsonl back into tuned/bundle ...
# crossfuse tune G6:M=128 --work-dir tuned --trials 4 --runner bundle    # here: learn, go on
# ```
#
# The same from Python. `open_tuning` makes or continues a folder; `candidates` are what to measure
# next.

# %%
work = Path(tempfile.mkdtemp(prefix="tuned-"))
how = Conditions("nvidia-h100")
tuning = open_tuning(spec, work, how, learn=False)
proposed = tuning.candidates(4)
make_bundle(proposed, tuning.bundle, how, build_there=True)
for each in proposed:
    print(f"{each.notes['estimate']:6.2f} us estimated: {each.summary}")
print(sorted(each.name for each in tuning.bundle.iterdir()))

# %% [markdown]
# A bundle is plain: `bundle.json` says what to measure and how, `measure.py` does it. With
# `build_there=False`, nvcc runs here and the libraries travel along, so that the box needs no
# compiler. On a GPU `measure.py` would now write a line into `results.jsonl` for each kernel, at
# once: Ctrl-C, a crash of the kernel or the end of the budget lose nothing. Here, this cell writes
# the lines of four kernels whose times were recorded:


# %%
def came_back(bundle, points):
    """Stand in for the other machine: write recorded times as it would."""
    for point in points:
        candidate = replace(
            proposed[0], **dict(zip(("family", "tiles"), space.tiles(point), strict=True))
        )
        timing = Timing("ok", "recorded", recorded_times[point], recorded_times[point])
        record = Record(
            candidate, Build("ok"), bundle.job_of(candidate), timing, 1, kernels[0]["gpu"]
        )
        append(bundle.results, record)


bundle = open_bundle(tuning.bundle)
came_back(bundle, sorted(recorded_times, key=recorded_times.get)[3:7])
# The connection broke in the middle of a line:
with bundle.results.open("a") as file:
    file.write('{"id": "5b1c", "candi')

# %% [markdown]
# ## The database
#
# `collect` takes the records into the folder: into `records.jsonl`, into what the search knows, and
# into MetaSchedule's JSON database, if it has one to store in. The broken line costs itself.

# %%
import_intrinsics()  # what TVM would import at its own time, slowly
tuning.store = Store(work, "nvidia-h100").add
print(tuning.collect(), "new records;", "left out:", *(each[-60:] for each in tuning.broken))
fastest = tuning.best()
print(f"{fastest.microseconds:.2f} us: {fastest.candidate.summary}")
print(sorted(each.name for each in work.iterdir()))

# %% [markdown]
# The database is TVM's own format. Its records are *traces*, and a trace replays without our rule:
# stock TVM finds the best schedule of the function and rebuilds it. `crossfuse.compile(spec,
# database=folder)` does that and calls nvcc; here we lower, which needs none.

# %%
database = open_database(work)
print(len(database.get_all_tuning_records()), "records")
target = tvm_target("nvidia-h100")
replayed = database.query_schedule(workload_module(str(spec)), target, "main")
for launch in lower(replayed).image.launches:
    print("grid", launch.grid, "cluster", launch.cluster, "shared", launch.dynamic_shared_bytes)

# %% [markdown]
# ## `ms.tune_tir`, and a tracker
#
# On a machine with a GPU, TVM's own driver takes our parts as they are, also for all functions of
# a Relax module (`tune_relax`):
#
# ```python
# ms.tune_tir(prim_func(spec), tvm_target("nvidia-h100"), "tuned", max_trials_global=64,
#             builder=NvccBuilder(spec), runner=GpuRunner(), **plugs())
# ```
#
# Is the GPU behind TVM's RPC tracker? Start the server there with `--no-fork` (a process that forks
# cannot start CUDA), and name the tracker here:
#
# ```
# python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port 9190                        # anywhere
# python -m tvm.exec.rpc_server --no-fork --tracker box:9190 --key h100            # at the GPU
# crossfuse tune G6:M=128 --work-dir tuned --trials 16 --rpc box:9190:h100         # here
# ```
#
# Kernels are compiled here, run there, and their results come back to be held against float64: a
# wrong kernel has no time. The tracker's name is checked before anything is compiled:

# %%
print(read_tracker("box:9190:h100"))
with refused("limit: host:port:key"):
    read_tracker("box:h100")

# %% [markdown]
# ## Wrong edits
#
# Candidates may be written by hand, so tiles can be odd. A wgmma has columns in multiples of 8:


# %%
def by_hand(family, **tiles):
    """What becomes of a candidate that somebody wrote."""
    candidate = replace(proposed[0], family=family, tiles=tiles)
    return lower(schedule_candidate(candidate, device("nvidia-h100")))


odd, other = {"rows": 128, "columns": 33, "cluster": 4}, {"columns": 48, "cluster": 1, "split": 4}
with refused("found a tile of 128 x 33; limit: 64 or 128 rows with columns in multiples of 8"):
    by_hand("l2", first=odd, second=other)

# %% [markdown]
# In a bundle this is no exception but a record with status `build-refused` and this text, and the
# search goes on: what does not build counts as four times its estimate.
#
# A folder belongs to one workload and one device. To go on in it with another is refused, and
# nothing in it changes:

# %%
with refused("name another folder"):
    open_tuning(resolve("G6:M=16"), work, how, learn=False)

# %% [markdown]
# ## On a GPU

# %%
if hopper():
    print("run: crossfuse tune G6:M=128 --work-dir tuned --trials 8  on", hopper())
else:
    print("no Hopper GPU here; the times above were", where)

# %% [markdown]
# ## Exercises
#
# 1. Write a candidate with a cluster of 32 CTAs in its first phase.
# 2. Misspell a field of the tiles.
# 3. Ask for the strategy "genetic".
# 4. What does the second proposal of the search look like once it has learned from the four
#    records? (Mutations of the fastest, one step away.)

# %%
with refused("found extent 32; limit: 1 to 16 CTAs in a cluster"):
    by_hand("global", first={"rows": 128, "columns": 64, "cluster": 32})

# %%
with refused("limit: at most rows, cluster, parts, stages"):
    by_hand("dsm", row=128)

# %%
with refused("limit: evolution, annealing, random, model"):
    make_strategy("genetic", space)

# %%
for each in tuning.candidates(3):
    print(f"{each.notes['estimate']:6.2f} us estimated: {each.summary}")

# %% [markdown]
# ## Next
#
# [Tutorial 8](08_cascades.py): reductions that depend on each other. [Tuning](../docs/tuning.md)
# has all files, plug points and what the studies on an H100 gave.
