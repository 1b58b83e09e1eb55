"""What distributed shared memory is worth: the best kernels with it and without it, measured.

    python scripts/ablate_dsm.py make --out candidates.json --random 3
    crossfuse bundle make candidates.json --out bundle --build-there
    ... python bundle/measure.py on a machine with a Hopper GPU ...
    python scripts/ablate_dsm.py report bundle/results.jsonl --json ablation.json

`make` writes, for every workload and number of rows, the `--keep` best kernels by the planner's
estimate of each space of `study.spaces`: all, no DSM, no clusters. So each of them
is searched equally hard. It adds the best `--first` of each family, PyTorch eager, `--random` fused
kernels that exchange through DSM (by chance, each family as likely), and `--also` kernels with at
most 1.5 times the best estimate (by chance too), to judge the cost model by what it was not fitted
to. `--measured` leaves out what these files have, but eager, which each run is compared with.

`report` compares, by rows and in all, geometric means over the workloads that have every space:

    best        the fastest of all that were measured; of a smaller space these may be fewer
    first N     the fastest of the first N by the estimate, of each space as many
    random      the geometric mean of those kernels, not the fastest: what a choice by chance gets
    unfused     the baseline that is the faster of eager and the best kernel of family global, which
                leaves the intermediate in memory and may use clusters

Which spaces a kernel is in is read from its tiles. Where files have a candidate several times, the
last one counts. Published for comparison (paper-reported, other baselines): over no fusion 1.52x
without DSM, 2.11x with DSM in a random configuration, 3.29x with all.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from crossfuse.files import write_json
from crossfuse.meta_schedule.candidate import Candidate, candidate_at, kernels_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.tune.kernel_space import KernelSpace
from crossfuse.workload.spec import WorkloadSpec
from crossfuse.workload.suites import name_of, resolve
from study.compare_spaces import (
    BASELINES,
    FACTORS,
    RANDOM,
    UNFUSED,
    Measured,
    compare,
    kernels,
    mean,
    read_measured,
    summary,
)
from study.spaces import ALL, NO_DSM, SPACES, exchanges, points_of
from study.subcommands import program, run

WORKLOADS = (*(f"S{each}" for each in range(1, 9)), *(f"G{each}" for each in range(1, 11)))
ROWS = (16, 128, 512)
#: Name in the notes of what `--also` adds.
ALSO = "also"
#: Estimates over the best one up to which kernels are drawn for `--also`.
_NEAR = 1.5


def make(given: argparse.Namespace) -> None:
    """Write a file of candidates."""
    there = {(each.candidate.id, each.drawn) for each in read_measured(given.measured)}
    known = {each for each, _ in there}
    found: list[Candidate] = []
    for rows in given.m:
        for name in given.workloads:
            spec = resolve(f"{name}:M={rows}")
            space = kernels_of(spec, given.target)
            found.append(Candidate(str(spec), EAGER))
            drawn = _drawn(space, given.random, _rng(given.seed, spec, RANDOM))
            taken = dict.fromkeys([*_best(space, given.keep, given.first), *drawn])
            for point in taken:
                each = candidate_at(space, str(spec), point)
                if point in drawn and (each.id, True) not in there:
                    found.append(_named(each, RANDOM))
                elif each.id not in known:
                    found.append(each)
            fresh = (candidate_at(space, str(spec), each) for each in _near(space, given, spec))
            more = (each for each in fresh if each.id not in known | {one.id for one in found})
            found += [_named(each, ALSO) for each in islice(more, given.also)]
    write_json(given.out, [each.to_json() for each in found])
    kinds = Counter(each.notes.get("name", each.family) for each in found)
    print(f"{len(found)} candidates:", ", ".join(f"{n} {kind}" for kind, n in kinds.items()))


def _best(space: KernelSpace, keep: int, first: int) -> Iterator[int]:
    """The best of each space, and the best of each family."""
    for name in SPACES:
        yield from map(int, points_of(space, name)[:keep])
    for group in space.groups:
        order = np.argsort(space.prior[group.first :][: group.size], kind="stable")
        yield from (group.first + int(each) for each in order[:first])


def _drawn(space: KernelSpace, count: int, rng: np.random.Generator) -> set[int]:
    """Fused kernels that exchange through DSM, by chance, of each family as likely."""
    rest = []
    for each in space.groups:
        flags = np.broadcast_to(exchanges(each.kernels), each.size)
        if each.family not in UNFUSED and flags.any():
            rest.append(list(rng.permutation(np.flatnonzero(flags)) + each.first))
    found: set[int] = set()
    while len(found) < count and any(rest):
        left = [each for each in rest if each]
        found.add(int(left[int(rng.integers(len(left)))].pop()))
    return found


def _near(space: KernelSpace, given: argparse.Namespace, spec: WorkloadSpec) -> Iterator[int]:
    """Kernels that are estimated to be almost as fast as the best, by chance."""
    (near,) = np.nonzero(space.prior <= _NEAR * space.prior.min())
    yield from map(int, _rng(given.seed, spec, ALSO).permutation(near))


def _rng(seed: int, spec: WorkloadSpec, what: str) -> np.random.Generator:
    """Of each workload its own, so that it does not matter which others there are."""
    return np.random.default_rng([seed, crc32(f"{what} {spec}".encode())])


def _named(candidate: Candidate, name: str) -> Candidate:
    return replace(candidate, notes={**candidate.notes, "name": name})


def report(given: argparse.Namespace) -> None:
    """Compare what was measured."""
    measured = list(read_measured(given.results))
    found, passed = kernels(measured, given.target)
    eager = {e.candidate.spec: e.microseconds for e in measured if e.candidate.family == EAGER}
    compared = {spec: compare(here, eager.get(spec), given.first) for spec, here in found.items()}
    whole = {spec: each for spec, each in compared.items() if each is not None}
    rows: dict[str, list[dict[str, Any]]] = {}
    for spec in sorted(whole, key=lambda each: resolve(each).M):
        rows.setdefault(f"M={resolve(spec).M}", []).append(whole[spec])
    told = {
        "first": given.first,
        "gpus": sorted({each.gpu for each in measured}),
        "candidates": len({each.candidate.id for each in measured}),
        "passed over": passed,
        "incomplete": [name_of(resolve(spec)) for spec, each in compared.items() if not each],
        "eager again": _again(measured),
        "rows": {name: summary(each) for name, each in rows.items()},
        "all": summary(list(whole.values())) if whole else None,
        "workloads": {name_of(resolve(spec)): each for spec, each in whole.items()},
    }
    _print(told)
    if given.json:
        write_json(given.json, told)


def _again(measured: Sequence[Measured]) -> dict[str, float] | None:
    """How far times of eager that was measured several times drifted: the last over the first."""
    times: dict[str, list[float]] = {}
    for each in measured:
        if each.candidate.family == EAGER and each.microseconds:
            times.setdefault(each.candidate.spec, []).append(each.microseconds)
    ratios = [each[-1] / each[0] for each in times.values() if len(each) > 1]
    if not ratios:
        return None
    return {
        "workloads": len(ratios),
        "mean": mean(ratios),
        "most": max(ratios),
        "least": min(ratios),
    }


def _print(told: Mapping[str, Any]) -> None:
    first = f"first {told['first']}"
    print(f"{told['candidates']} candidates on {', '.join(told['gpus'])}")
    if told["passed over"]:
        print(f"passed over, with options or without all tiles: {told['passed over']}")
    if told["incomplete"]:
        print("no kernel that works in some space, or no eager:", *told["incomplete"])
    if again := told["eager again"]:
        print(
            f"eager measured again: last over first {again['mean']:.3f} "
            f"({again['least']:.3f} to {again['most']:.3f}, {again['workloads']} workloads)"
        )
    if told["all"] is None:
        return
    for name, each in {**told["rows"], "all rows": told["all"]}.items():
        print(f"\n{name}: {each['workloads']} workloads, geometric means")
        heads = (*(f"{kind} / {other}" for kind in ("best", first) for other in BASELINES),)
        print(f"{'':12}{'kernels':>8}{'fewest':>8}" + "".join(f"{head:>18}" for head in heads))
        for space, speeds in each["spaces"].items():
            print(f"{space:12}{speeds['kernels']:8}{speeds['fewest']:8}" + _cells(speeds))
        for factor, (slow, fast) in FACTORS.items():
            best, few = (each[f"{factor} factor, {kind}"] for kind in ("best", "first"))
            print(f"{factor} factor ({slow} / {fast}): best {best:.3f}, {first} {few:.3f}")
        if RANDOM in each["spaces"]:
            count = each["spaces"][RANDOM]["workloads"]
            factor = each["random factor, best"]
            print(f"random factor ({RANDOM} / {ALL}): {factor:.3f}, of {count} workloads")
    if any(told["all"]["spaces"][each]["fewest"] < told["first"] for each in SPACES):
        print(f"\nsome workload has fewer than {told['first']} kernels of a space: searched less")
    _print_wins(told["workloads"])


def _cells(speeds: Mapping[str, Any]) -> str:
    keys = (f"{kind} over {other}" for kind in ("best", "first") for other in BASELINES)
    return "".join(f"{speeds[key]:17.3f}x" if key in speeds else f"{'-':>18}" for key in keys)


def _print_wins(workloads: Mapping[str, Any]) -> None:
    """Where the fastest kernel needs DSM."""
    gains = {name: e["best"][NO_DSM] / e["best"][ALL] for name, e in workloads.items()}
    wins = sorted((name for name, gain in gains.items() if gain > 1), key=lambda name: -gains[name])
    print(f"\nDSM wins {len(wins)} of {len(workloads)} workloads")
    for name in wins:
        times, fastest = workloads[name]["best"], workloads[name]["fastest"]
        change = f"{times[NO_DSM]:8.2f} us -> {times[ALL]:8.2f} us"
        print(f"{name:12}{gains[name]:7.3f}  {change}  {fastest}")


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made, commands = program(__doc__)
    makes = commands.add_parser("make", help="write candidates for `crossfuse bundle make`")
    makes.add_argument("workloads", nargs="*", default=WORKLOADS, help="S1 to S8 and G1 to G10")
    makes.add_argument("--out", type=Path, required=True, help="JSON file to write")
    makes.add_argument("--m", nargs="+", type=int, default=ROWS, help="numbers of rows")
    makes.add_argument("--keep", type=int, default=6, help="kernels of each space")
    makes.add_argument("--first", type=int, default=1, help="kernels of each family besides")
    makes.add_argument("--random", type=int, default=0, help="random configurations with DSM")
    makes.add_argument("--also", type=int, default=0, help="kernels by chance, for the cost model")
    makes.add_argument("--seed", type=int, default=0, help="of what chance chooses")
    makes.add_argument("--measured", nargs="+", type=Path, default=[], help="results to leave out")
    makes.set_defaults(do=make)
    reports = commands.add_parser("report", help="compare what was measured")
    reports.add_argument("results", nargs="+", type=Path, help="JSON lines")
    reports.add_argument("--first", type=int, default=6, help="kernels that are searched equally")
    reports.add_argument("--json", type=Path)
    reports.set_defaults(do=report)
    for each in (makes, reports):
        each.add_argument("--target", default="nvidia-h100")
    return made


if __name__ == "__main__":
    sys.exit(run(parser()))
