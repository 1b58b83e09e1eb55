"""Commands that measure many kernels: ``crossfuse bench``, ``tune`` and ``bundle``."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import (
    LONGEST,
    MOST,
    Budget,
    JsonFlag,
    Repeats,
    Target,
    Timeout,
    Workload,
    finite,
    print_error,
    print_json,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossfuse.bench.job import Planned, Row
    from crossfuse.meta_schedule.build import Conditions
    from crossfuse.meta_schedule.candidate import Candidate
    from crossfuse.meta_schedule.records import Record, Store
    from crossfuse.meta_schedule.tune import Tuning

_Workloads = Annotated[
    list[str],
    typer.Argument(
        metavar="WORKLOAD...",
        help="Packaged ids such as S3, suites (gemm_chain, gated_ffn), or specs such as "
        "gated_ffn:M=16,K=256,N=512,L=256, or models such as "
        "model:llama-3.2-1b,layers=2,tokens=16.",
    ),
]
_Variants = Annotated[
    str | None,
    typer.Option(
        help="Of ours, unfused, eager, eager-apart, compile, autotune (compile-max); ours-eager, "
        "ours-autotune of models; scaled-mm, scaled-mm-fast for 8-bit floats; ours-registers, "
        "ours-dsm, ours-l2, ours-global for a chain's intermediate. "
        "Left out: ours, eager, compile and autotune, and eager-apart of gated networks."
    ),
]
_L2 = Annotated[str, typer.Option(help="State of the cache: cold, hot, or cold,hot.")]
_Protocol = Annotated[
    str,
    typer.Option(help="graph, stream (no CUDA graph, the paper's protocol), or graph,stream."),
]
_Calls = Annotated[
    int,
    typer.Option(
        min=1, max=MOST, help="Computations between two timestamps, each on other weights."
    ),
]
_BuildJobs = Annotated[
    int,
    typer.Option(
        min=0, max=MOST, help="Kernels that are compiled at once, before anything is timed."
    ),
]


def bench(
    workloads: _Workloads,
    m: Annotated[str, typer.Option("--m", help="Rows, such as 1,16,64,128.")] = "",
    variants: _Variants = None,
    l2: _L2 = "cold",
    protocol: _Protocol = "graph",
    repeats: Repeats = 15,
    calls: _Calls = 16,
    timeout: Annotated[
        float, typer.Option(min=1, max=LONGEST, callback=finite, help="Seconds for each job.")
    ] = 120.0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Picture of time over floor to write.")
    ] = None,
    counters: Annotated[
        bool, typer.Option("--counters", help="Also read memory traffic with Nsight Compute.")
    ] = False,
    build_jobs: _BuildJobs = 4,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print jobs and floors; needs no GPU.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Time our kernel and its baselines in one run; exit code 1 if a job is wrong or breaks."""
    from crossfuse.bench.plan import plan, setting
    from crossfuse.bench.table import planned_table, report

    jobs = plan(workloads, m, setting(variants, l2, protocol, repeats, calls))
    if dry_run:
        show(as_json, {"jobs": [each.to_json() for each in jobs]}, planned_table(jobs))
        return
    rows, found = _measure(jobs, timeout, out, picture, counters, build_jobs)
    show(as_json, found, *report(rows))
    if not found["ok"]:
        raise typer.Exit(1)


def _measure(
    jobs: Sequence[Planned],
    timeout: float,
    out: Path | None,
    picture: Path | None,
    counters: bool,
    build_jobs: int,
) -> tuple[Sequence[Row], dict[str, Any]]:
    """Run the jobs; the file is written anew after each, so that none is lost."""
    from crossfuse.bench.counters import count
    from crossfuse.bench.environment import record, require_gpu
    from crossfuse.bench.models import compile_models
    from crossfuse.bench.plan import build_ahead, run
    from crossfuse.bench.table import document, plot, progress, require_matplotlib
    from crossfuse.files import write_json
    from crossfuse.hardware import device

    require_gpu()
    if picture is not None:
        require_matplotlib()
    environment = record()
    built = build_ahead(jobs, build_jobs, device().name, timeout)
    typer.echo(f"compiled {built} kernels ahead", err=True)
    if models := compile_models(jobs, build_jobs, timeout):
        typer.echo(f"compiled {models} models ahead", err=True)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        typer.echo(progress(row, len(rows), len(jobs)), err=True)
        if out is not None:
            write_json(out, document(rows, environment))

    run(jobs, timeout, report=keep, count=count if counters else None)
    if picture is not None:
        plot(rows, picture)
    return rows, document(rows, environment)


# ``crossfuse bundle``: candidates that go to a machine with a GPU as a folder, and come back.


app = typer.Typer(
    help="Measure many candidates on a machine that only files can reach.", no_args_is_help=True
)

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The bundle.")]
_Jobs = Annotated[
    int, typer.Option(min=0, max=MOST, help="Processes that compile; 0 for one for each core.")
]
_BuildTimeout = Annotated[
    float, typer.Option(min=1, max=LONGEST, callback=finite, help="Seconds for one compilation.")
]


@app.command("make")
def make(
    candidates: Annotated[
        list[str],
        typer.Argument(
            help='Files with JSON lists of {"spec", "family", "tiles"}, see docs/tuning.md, or '
            "workloads, such as R7."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    keep: Annotated[
        int, typer.Option(min=1, max=MOST, help="Of a workload: kernels, the best by the estimate.")
    ] = 16,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Of a workload: PyTorch's eager kernels too.")
    ] = False,
    build_there: Annotated[
        bool, typer.Option("--build-there", help="Compile where it is measured.")
    ] = False,
    jobs: _Jobs = 0,
    build_timeout: _BuildTimeout = 300.0,
    target: Target = None,
    l2: Annotated[str, typer.Option(help="State of the cache: cold or hot.")] = "cold",
    repeats: Repeats = 15,
    calls: Annotated[
        int, typer.Option(min=1, max=MOST, help="Computations between two timestamps.")
    ] = 16,
    as_json: JsonFlag = False,
) -> None:
    """Write a bundle, with its candidates compiled unless that is to be done there."""
    from crossfuse.bench.job import OURS
    from crossfuse.hardware import device
    from crossfuse.measure.job import Job
    from crossfuse.meta_schedule.build import Conditions, cores
    from crossfuse.meta_schedule.tune import make_bundle

    name = device(target).name
    found = _candidates(candidates, name, keep, baseline)
    job = Job("", OURS, l2, "graph", repeats, calls)
    how = Conditions(name, job, build_timeout=build_timeout, builders=jobs or cores())
    failures = []

    def report(candidate: Any, build: Any) -> None:
        if build.status != "ok":
            failures.append({"candidate": candidate.to_json()} | asdict(build))
            typer.echo(f"{candidate.spec} {candidate.summary}: {build.message}", err=True)

    bundle = make_bundle(found, out, how, build_there=build_there, report=report)
    if as_json:
        print_json({"candidates": len(bundle.candidates), "failed": failures})
    else:
        typer.echo(f"{len(bundle.candidates)} candidates, {len(failures)} do not compile: {out}")


def _candidates(given: list[str], target: str, keep: int, baseline: bool) -> list[Candidate]:
    """Candidates from files, and the best kernels of workloads, without repetitions."""
    from crossfuse.meta_schedule.candidate import Candidate, best_candidates, read_candidates
    from crossfuse.planner.families import EAGER
    from crossfuse.workload.cascades import resolve_any

    found: list[Candidate] = []
    for text in given:
        # Texts of specs have a colon, files of candidates a suffix.
        if Path(text).is_file() or text.endswith((".json", ".jsonl")):
            found += read_candidates(Path(text))
            continue
        spec = resolve_any(text)
        found += best_candidates(spec, target, keep)
        found += [Candidate(str(spec), EAGER)] if baseline else []
    return list({each.id: each for each in found}.values())


@app.command("measure")
def measure(
    folder: _Folder,
    jobs: _Jobs = 0,
    timeout: Timeout = 30.0,
    build_timeout: _BuildTimeout = 300.0,
    budget: Budget = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Measure what has no record yet; a broken run goes on where it stopped.

    Records are lines of results.jsonl in the folder.
    """
    from crossfuse.bench.environment import measured_gpu
    from crossfuse.meta_schedule.build import Conditions, cores
    from crossfuse.meta_schedule.records import Progress
    from crossfuse.meta_schedule.tune import measure_bundle, open_bundle

    bundle = open_bundle(folder)
    builders, gpu = jobs or max(1, cores() - 1), measured_gpu()
    how = Conditions(timeout=timeout, build_timeout=build_timeout, builders=builders, gpu=gpu)
    with Progress(len(bundle.missing())) as progress:
        try:
            measure_bundle(bundle, how, progress.add, budget or None)
        except KeyboardInterrupt:
            print_error(f"stopped; {len(progress.records)} records are in {bundle.results}")
    _summary(progress.records, as_json)


@app.command("collect")
def collect(
    folder: _Folder,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of a MetaSchedule JSON database to add to."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="JSON lines of records to add to.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Read the records that came back, and store them."""
    from crossfuse.meta_schedule.records import append, read_records, unknown
    from crossfuse.meta_schedule.tune import open_bundle

    bundle = open_bundle(folder)
    found = read_records(bundle.results)
    for text in found.broken:
        print_error(f"left out: {text}")
    if out is not None:
        for each in unknown(found.records, out):
            append(out, each)
    if work_dir is not None:
        from crossfuse.meta_schedule.records import commit, open_database

        count = commit(open_database(work_dir), found.records, bundle.target)
        typer.echo(f"{count} records stored in {work_dir}", err=True)
    _summary(list(found.records), as_json)


def _summary(records: list[Record], as_json: bool) -> None:
    from collections import Counter

    from crossfuse.meta_schedule.records import fastest

    counts = Counter(each.status for each in records)
    best = fastest(records)
    if as_json:
        times = {spec: each.to_json() for spec, each in best.items()}
        print_json({"records": len(records), "status": counts, "fastest": times})
        return
    for spec, each in best.items():
        typer.echo(f"{spec}: {each.microseconds:.2f} us, {each.candidate.summary}")
    typer.echo(", ".join(f"{count} {status}" for status, count in counts.items()) or "no records")


# ``crossfuse tune``: search for the fastest kernel of a workload, measuring some.


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
        _measure_kernels(tuning, trials, budget)
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


def _measure_kernels(tuning: Tuning, trials: int, budget: float) -> None:
    from crossfuse.meta_schedule.records import Progress

    with Progress(trials) as progress:
        try:
            tuning.run(trials, budget=budget or None, report=progress.add)
        except KeyboardInterrupt:
            print_error(f"stopped; {len(tuning.added)} new records are in {tuning.records}")


def _write_bundle(tuning: Tuning, trials: int) -> None:
    from crossfuse.meta_schedule.tune import make_bundle

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
        from crossfuse.meta_schedule.records import Store

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
