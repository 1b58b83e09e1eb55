"""``crossfuse bundle``: candidates that go to a machine with a GPU as a folder, and come back."""

from __future__ import annotations

from dataclasses import asdict
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
    finite,
    print_error,
    print_json,
)

if TYPE_CHECKING:
    from crossfuse.meta_schedule.candidate import Candidate
    from crossfuse.meta_schedule.records import Record

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
    from crossfuse.meta_schedule.bundle import make_bundle

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
    from crossfuse.meta_schedule.bundle import measure_bundle, open_bundle
    from crossfuse.meta_schedule.records import Progress

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
    from crossfuse.meta_schedule.bundle import open_bundle
    from crossfuse.meta_schedule.records import append, read_records, unknown

    bundle = open_bundle(folder)
    found = read_records(bundle.results)
    for text in found.broken:
        print_error(f"left out: {text}")
    if out is not None:
        for each in unknown(found.records, out):
            append(out, each)
    if work_dir is not None:
        from crossfuse.meta_schedule.database import commit, open_database

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
