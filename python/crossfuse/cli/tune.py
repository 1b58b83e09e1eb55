"""``crossfuse tune``: search for the fastest kernel of a workload, measuring some."""

from __future__ import annotations

from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import (
    MOST,
    Budget,
    JsonFlag,
    Target,
    Timeout,
    Workload,
    print_error,
    print_json,
)

if TYPE_CHECKING:
    from crossfuse.meta_schedule.build import Conditions
    from crossfuse.meta_schedule.database import Store
    from crossfuse.meta_schedule.tune import Tuning


class Where(str, Enum):
    """Where kernels are measured."""

    local = "local"
    bundle = "bundle"


class How(str, Enum):
    """How kernels are searched, see `crossfuse.planner.tune.strategy.STRATEGIES`."""

    evolution = "evolution"
    annealing = "annealing"
    random = "random"
    model = "model"


def tune(
    workload: Workload,
    work_dir: Annotated[Path, typer.Option(help="Folder of records; a search goes on there.")],
    trials: Annotated[
        int, typer.Option(min=0, max=MOST, help="Kernels to measure; 0: plan only.")
    ] = 64,
    budget: Budget = 0.0,
    strategy: Annotated[How, typer.Option(help="The search.")] = How.evolution,
    runner: Annotated[
        Where, typer.Option(help="local: this GPU; bundle: write a folder for another machine.")
    ] = Where.local,
    rpc: Annotated[
        str,
        typer.Option(metavar="HOST:PORT:KEY", help="Measure on a server of this TVM RPC tracker."),
    ] = "",
    learn: Annotated[bool, typer.Option(help="Let measurements correct the estimate.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Of the search.")] = 0,
    jobs: Annotated[
        int, typer.Option(min=0, max=MOST, help="Processes that compile; 0: cores.")
    ] = 0,
    timeout: Timeout = 30.0,
    target: Target = None,
    as_json: JsonFlag = False,
) -> None:
    """Search for the fastest kernel of a workload.

    Ctrl-C keeps everything measured; the same command goes on with it. Without a trial the planner
    chooses.
    """
    from crossfuse.bench.environment import measured_gpu
    from crossfuse.hardware import device
    from crossfuse.meta_schedule.build import Conditions, cores
    from crossfuse.meta_schedule.tune import open_tuning
    from crossfuse.workload.cascades import resolve_any

    spec, gpu = resolve_any(workload), ""
    if trials and runner is Where.local and not rpc:
        gpu = measured_gpu()
    how = Conditions(device(target).name, timeout=timeout, builders=jobs or cores(), gpu=gpu)
    if rpc:
        _check_chain(spec)
        how = _remote(how, rpc, runner)
    tuning = open_tuning(
        spec, work_dir, how, strategy=strategy.value, learn=learn and trials > 0, seed=seed
    )
    _store(tuning)
    if (tuning.bundle / "results.jsonl").is_file():
        print_error(f"{tuning.collect()} records came back in {tuning.bundle}")
    for text in tuning.broken:
        print_error(f"left out: {text}")
    if trials and runner is Where.bundle:
        _write_bundle(tuning, trials)
    elif trials:
        _measure(tuning, trials, budget)
    _show(tuning, as_json)


def _check_chain(spec: Any) -> None:
    """Refuse to send a cascade to a server: its inputs are too large to be drawn here."""
    from crossfuse.errors import WorkloadRefused, refuse
    from crossfuse.workload.cascade_spec import CascadeSpec

    if isinstance(spec, CascadeSpec):
        raise refuse(
            WorkloadRefused,
            "rpc",
            str(spec),
            found="a cascade of reductions",
            limit="chains of products, whose inputs are drawn here",
            instead="use --runner bundle, or tune where the GPU is",
        )


def _remote(how: Conditions, text: str, runner: Where) -> Conditions:
    """Conditions of candidates that are measured behind a tracker."""
    from dataclasses import replace

    from crossfuse.errors import EnvironmentRefused, refuse
    from crossfuse.meta_schedule.rpc import PROTOCOL, read_tracker

    tracker = read_tracker(text)
    if runner is Where.bundle:
        raise refuse(
            EnvironmentRefused,
            "rpc",
            "tune",
            found="--runner bundle and --rpc",
            limit="one place where kernels are measured",
            instead="leave one of them out",
        )
    job = replace(how.job, protocol=PROTOCOL)
    return replace(how, job=job, measurer=tracker.program(how.timeout), gpu=f"rpc {tracker}")


def _measure(tuning: Tuning, trials: int, budget: float) -> None:
    from crossfuse.meta_schedule.records import Progress

    with Progress(trials) as progress:
        try:
            tuning.run(trials, budget=budget or None, report=progress.add)
        except KeyboardInterrupt:
            print_error(f"stopped; {len(tuning.added)} new records are in {tuning.records}")


def _write_bundle(tuning: Tuning, trials: int) -> None:
    from crossfuse.meta_schedule.bundle import make_bundle

    candidates = tuning.candidates(trials)
    make_bundle(candidates, tuning.bundle, tuning.how, build_there=True)
    print_error(
        f"{len(candidates)} candidates in {tuning.bundle}: measure them there with "
        "`crossfuse bundle measure`, copy results.jsonl back, and call this command again"
    )


def _store(tuning: Tuning) -> None:
    """Add records to MetaSchedule's database too: those of a session that was killed, and new ones.

    It is opened when there is one: that takes a while.
    """
    from crossfuse.meta_schedule.records import read_records

    @cache
    def store() -> Store:
        from crossfuse.meta_schedule.database import Store

        return Store(tuning.folder, tuning.how.target)

    if known := read_records(tuning.records).records:
        store().catch_up(known)
    tuning.store = lambda record: store().add(record)


def _show(tuning: Tuning, as_json: bool) -> None:
    from crossfuse.planner.plan import plan

    best = tuning.best()
    chosen: Any  # a candidate, or a plan
    if best is not None:
        chosen, microseconds = best.candidate, best.microseconds
    else:
        chosen = plan(tuning.spec, tuning.how.target)
        microseconds = chosen.microseconds
    found = {
        "family": chosen.family,
        "tiles": chosen.tiles,
        "microseconds": microseconds,
        "measured": best is not None,
    }
    if as_json:
        print_json({"workload": str(tuning.spec), "records": len(tuning.added), "best": found})
        return
    how = "measured" if found["measured"] else "estimated, nothing was measured"
    typer.echo(f"{tuning.spec}: {found['microseconds']:.2f} us ({how})")
    typer.echo(f"{found['family']} {found['tiles'] or ''}".rstrip())
