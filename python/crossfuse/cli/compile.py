"""``crossfuse compile``: a workload to a loadable library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from crossfuse.cli.kernel import (
    OUTPUT,
    Cluster,
    Constant,
    Output,
    Placement,
    Rule,
    Target,
    Workload,
    render,
)
from crossfuse.cli.output import JsonFlag, show


def compile_workload(
    workload: Workload,
    output: Output = OUTPUT,
    target: Target = None,
    rule: Rule = "auto",
    placement: Placement = "auto",
    cluster: Cluster = 0,
    constant_weights: Constant = None,
    database: Annotated[
        Path | None,
        typer.Option(help="Folder of crossfuse tune: compile the fastest kernel measured there."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Time the plan's first few kernels on this machine's GPU; compile the fastest.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Compile a workload into a shared library with its cubin, and a manifest beside it."""
    from crossfuse.compiler import compile as compile_source
    from crossfuse.compiler.report import make_report
    from crossfuse.files import make_folder

    compiled = compile_source(
        workload,
        target=target,
        rule=rule,
        placement=placement,
        cluster=cluster or None,
        constant_weights=constant_weights,
        directory=make_folder(output),
        database=database,
        measure=measure,
    )
    report = make_report(compiled)
    show(as_json, report.to_json(), *render(report, schedule=False))
