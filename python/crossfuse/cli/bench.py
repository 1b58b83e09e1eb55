"""``crossfuse bench``: kernels and baselines timed in one run, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import LONGEST, MOST, JsonFlag, Repeats, finite, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crossfuse.bench.job import Planned, Row

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
