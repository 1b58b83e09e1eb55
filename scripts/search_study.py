"""Compares searches: how soon each strategy finds a fast kernel, on the GPU of this machine.

    python scripts/search_study.py run study --budget 1500
    python scripts/search_study.py report study --plot study.svg --json study.json

`run` lets every strategy search every workload from every seed, as `crossfuse tune` does; each
search begins with nothing learned, and the order of `model` knows no chance, so that it has one
seed. All go on side by side and share what was measured: a kernel that several searches propose is
built and measured once, and all are told the same time (``study/searches.py``). So
strategies differ by what they propose and not by noise; how long a search would take alone is not
told. After Ctrl-C, a kill or the end of the budget the same command goes on. The folder gets ::

    records.jsonl       a record of each measurement, as soon as it is there
    proposals.jsonl     what each search wanted to know, in order, by the id of the candidate
    environment.json    device, clocks, versions, commit

`report` reads the folder alone. A number is the share of the best known speed that a search has
reached after so many trials, as the mean over its seeds; it is 0 while nothing works. The plot has
the time of the best so far, as the geometric mean over the seeds, and their range.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from crossfuse import files
from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.candidate import kernels_of
from crossfuse.meta_schedule.records import Record, fastest, read_records
from crossfuse.planner.families import EAGER
from crossfuse.planner.tune.cost_model import CostModel, require_xgboost
from crossfuse.planner.tune.strategy import STRATEGIES, make_strategy
from crossfuse.workload.suites import name_of, resolve
from study import subcommands
from study.searches import Search, Study, read_proposals

WORKLOADS = ("G4:M=128", "S2:M=16", "S4:M=128")
#: Strategies that learn from measurements, and those that no seed changes.
LEARNING, UNSEEDED = ("evolution", "annealing"), ("model",)
#: Times of the best at which a panel ends.
_TALLEST = 3.0


def searches(
    workloads: Sequence[str],
    strategies: Sequence[str],
    seeds: Sequence[int],
    trials: int,
    target: str,
) -> list[Search]:
    """Every strategy on every workload from every seed, with nothing learned."""
    found = []
    for spec in dict.fromkeys(map(resolve, workloads)):
        space = kernels_of(spec, target)
        for name in strategies:
            for seed in seeds[:1] if name in UNSEEDED else seeds:
                model = CostModel(seed) if name in LEARNING else None
                find = make_strategy(name, space, model, seed)
                found.append(Search(str(spec), name, seed, find, trials))
    return found


def run(given: argparse.Namespace) -> None:
    """Search, on this machine."""
    from crossfuse.bench.environment import record, require_gpu
    from crossfuse.meta_schedule.records import Progress

    end = time.monotonic() + given.budget if given.budget else None
    require_gpu()
    if set(given.strategies) & set(LEARNING):
        require_xgboost()
    found = record()
    files.write_json(given.folder / "environment.json", found)
    jobs = given.build_jobs or max(1, len(os.sched_getaffinity(0)) - 1)
    gpu = found["gpu"].get("name", "")
    how = Conditions(given.target, timeout=given.timeout, builders=jobs, gpu=gpu)
    wanted = searches(given.workloads, given.strategies, given.seeds, given.trials, given.target)
    scratch = given.scratch or given.folder / "scratch"
    total = sum(each.left for each in wanted)
    with Progress(total) as progress:
        study = Study(given.folder, scratch, how, given.batch, progress.add)
        try:
            study.run(wanted, lambda: end is not None and time.monotonic() > end)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
        finally:
            done = sum(each.done for each in wanted)
            print(f"{len(progress.records)} new records; {done} of {total} trials", file=sys.stderr)


@dataclass(frozen=True)
class Curve:
    """What one search found.

    Attributes
    ----------
    spec, strategy : str
        Workload and strategy.
    best : numpy.ndarray
        Microseconds of the best so far after each trial; infinite while nothing works.
    """

    spec: str
    strategy: str
    best: np.ndarray


def curves(folder: Path) -> tuple[list[Curve], list[Record]]:
    """Read a study: each search up to its first trial without a record."""
    records = read_records(folder / "records.jsonl").records
    times = {each.candidate.id: each.microseconds for each in records}
    trials: dict[tuple[str, str, int], dict[int, str]] = {}
    for each in read_proposals(folder / "proposals.jsonl"):
        trials.setdefault((each.spec, each.strategy, each.seed), {})[each.trial] = each.id
    found = []
    for (spec, strategy, _), asked in trials.items():
        known: list[float] = []
        while asked.get(len(known) + 1) in times:
            known.append(times[asked[len(known) + 1]] or np.inf)
        if known:
            found.append(Curve(spec, strategy, np.minimum.accumulate(known)))
    if not found:
        raise refuse(
            ArtefactRefused,
            "study",
            str(folder),
            found="no trial with a record",
            limit="records.jsonl and proposals.jsonl of a study",
            instead="run the study first: search_study.py run FOLDER",
        )
    return found, list(records)


def report(found: Sequence[Curve], records: Sequence[Record]) -> dict[str, Any]:
    """Shares of the best speed after 1, 2, 4, ... trials, by workload and strategy."""
    ours = [each for each in records if each.candidate.family != EAGER]
    best = fastest(ours)
    eager = fastest(each for each in records if each.candidate.family == EAGER)
    workloads: dict[str, Any] = {}
    for spec in dict.fromkeys(each.spec for each in found):
        here = [each for each in found if each.spec == spec]
        least = best[spec].microseconds if spec in best else None
        workloads[spec] = {
            "kernels": sum(each.candidate.spec == spec for each in ours),
            "best": least,
            "kernel": best[spec].candidate.summary if spec in best else "",
            "eager": eager[spec].microseconds if spec in eager else None,
            "strategies": {
                name: _shares([each.best for each in here if each.strategy == name], least or 0.0)
                for name in dict.fromkeys(each.strategy for each in here)
            },
        }
    return {"workloads": workloads, "mean": _means(list(workloads.values()))}


def _shares(seeds: Sequence[np.ndarray], least: float) -> dict[str, Any]:
    """Of the seeds that all have come so far."""
    length = min(map(len, seeds))
    after = [2**power for power in range(length.bit_length()) if 2**power < length]
    mean = {each: float(np.mean([least / best[each - 1] for best in seeds])) for each in after}
    mean[length] = float(np.mean([least / best[length - 1] for best in seeds]))
    return {"seeds": len(seeds), "after": mean}


def _means(workloads: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The mean over the workloads, after as many trials as there are of all of them."""
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(name for each in workloads for name in each["strategies"]):
        after = [each["strategies"].get(name, {"after": {}})["after"] for each in workloads]
        common = [trial for trial in after[0] if all(trial in each for each in after)]
        found[name] = {trial: float(np.mean([each[trial] for each in after])) for trial in common}
    return found


def table(told: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = []
    for spec, each in told["workloads"].items():
        best = "nothing works" if each["best"] is None else f"{each['best']:.2f} us"
        eager = "" if each["eager"] is None else f", eager {each['eager']:.2f} us"
        lines += [
            name_of(resolve(spec)),
            f"best of {each['kernels']} kernels {best}, {each['kernel']}{eager}",
        ]
        lines += _rows({name: one["after"] for name, one in each["strategies"].items()})
    return "\n".join([*lines, "mean over workloads", *_rows(told["mean"])])


def _rows(after: Mapping[str, Mapping[int, float]]) -> list[str]:
    trials = sorted({trial for each in after.values() for trial in each})
    rows = [f"{'trials':12}" + "".join(f"{each:>8}" for each in trials)]
    for name, each in after.items():
        cells = (f"{each[trial]:8.3f}" if trial in each else f"{'-':>8}" for trial in trials)
        rows.append(f"{name:12}" + "".join(cells))
    return [*rows, ""]


def plot(found: Sequence[Curve], told: Mapping[str, Any], path: Path) -> None:
    """Draw the best so far over trials: a panel a workload, a line a strategy."""
    from crossfuse.bench.table import require_matplotlib

    require_matplotlib()
    figures: Any = import_module("matplotlib.figure")
    specs = list(told["workloads"])
    figure = figures.Figure(figsize=(1 + 4.2 * len(specs), 4), layout="constrained")
    for axes, spec in zip(figure.subplots(1, len(specs), squeeze=False)[0], specs, strict=True):
        names = told["workloads"][spec]["strategies"]
        for color, name in enumerate(STRATEGIES):
            if name in names:
                same = [each.best for each in found if (each.spec, each.strategy) == (spec, name)]
                _line(axes, name, same, f"C{color}")
        if told["workloads"][spec]["eager"] is not None:
            eager = told["workloads"][spec]["eager"]
            axes.axhline(eager, color="black", linewidth=0.8, linestyle="--", label="eager")
        if told["workloads"][spec]["best"] is not None:
            # What chance begins with can be many times slower than what matters.
            axes.set_ylim(top=min(axes.get_ylim()[1], _TALLEST * told["workloads"][spec]["best"]))
        axes.set_title("\n".join(wrap(name_of(resolve(spec)), 40)), fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("kernels measured")
        axes.set_ylabel("fastest so far, microseconds")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(True, alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text as text: a tenth of the size of its outlines.
    with import_module("matplotlib").rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _line(axes: Any, name: str, seeds: Sequence[np.ndarray], color: str) -> None:
    length = min(map(len, seeds))
    times = np.array([each[:length] for each in seeds])
    times[~np.isfinite(times)] = np.nan
    trials = np.arange(1, length + 1)
    mean = np.exp(np.log(times).mean(0))
    axes.plot(trials, mean, color=color, label=name, drawstyle="steps-post")
    if len(seeds) > 1:
        low, high = times.min(0), times.max(0)
        axes.fill_between(trials, low, high, color=color, alpha=0.15, step="post", linewidth=0)


def show(given: argparse.Namespace) -> None:
    """Print the table; write the plot and the numbers where they are wanted."""
    found, records = curves(given.folder)
    told = report(found, records)
    print(table(told))
    if given.json:
        files.write_json(given.json, told)
    if given.plot:
        plot(found, told, given.plot)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made, commands = subcommands.program(__doc__)
    runs = commands.add_parser("run", help="search, on this GPU")
    runs.add_argument("folder", type=Path)
    runs.add_argument("workloads", nargs="*", default=WORKLOADS, help=", ".join(WORKLOADS))
    names = list(STRATEGIES)
    runs.add_argument("--strategies", nargs="+", default=names, choices=names)
    runs.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    runs.add_argument("--trials", type=int, default=40, help="of each search")
    runs.add_argument("--batch", type=int, default=8, help="trials between two proposals")
    runs.add_argument("--budget", type=float, default=0.0, help="seconds in all; 0 for no limit")
    runs.add_argument("--build-jobs", type=int, default=0, help="0: all cores but one")
    runs.add_argument("--timeout", type=float, default=30.0, help="seconds of one measurement")
    runs.add_argument("--scratch", type=Path, help="libraries and references; FOLDER/scratch")
    runs.add_argument("--target", default="nvidia-h100")
    runs.set_defaults(do=run)
    shows = commands.add_parser("report", help="say what was found")
    shows.add_argument("folder", type=Path)
    shows.add_argument("--plot", type=Path, help="picture; its suffix says the format")
    shows.add_argument("--json", type=Path)
    shows.set_defaults(do=show)
    return made


if __name__ == "__main__":
    sys.exit(subcommands.run(parser()))
