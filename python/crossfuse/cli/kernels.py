"""Commands about a workload: compile, emulate, demo, explain, timeline, view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.output import (
    MOST,
    OUTPUT,
    Cluster,
    Constant,
    JsonFlag,
    Output,
    Placement,
    Rule,
    Target,
    Workload,
    render,
    show,
    table,
    verdicts,
)
from crossfuse.errors import EnvironmentRefused, WorkloadRefused, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from crossfuse.bench.timeline import KernelTimeline


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


# ``crossfuse emulate``: both CPU checkers on a workload.


#: Runs of a function's blocks that the CPU checkers do in about two minutes, of chains (nearly all
#: are multiply-adds) and of cascades (exponentials, and states that merge).
MAX_ITERATIONS, MAX_IN_CASCADES = 10**9, 10**8


def emulate(
    workload: Workload,
    target: Target = None,
    rule: Rule = "auto",
    placement: Placement = "auto",
    cluster: Cluster = 0,
    constant_weights: Constant = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Of inputs and thread orders.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Run the schedule on LLVM and the generated CUDA on the CPU; exit code 1 if one is wrong."""
    from crossfuse.blocks.scheduled import iterations
    from crossfuse.compiler import check, read_source
    from crossfuse.compiler import compile as compile_source

    source = read_source(workload)
    work, most = iterations(source.func), MAX_IN_CASCADES if source.cascade else MAX_ITERATIONS
    if work > most:
        raise refuse(
            WorkloadRefused,
            "emulate",
            source.summary,
            found=f"{work:.1e} multiply-adds, or what takes their place",
            limit=f"{most:.0e}, as much as a CPU emulates in minutes",
            instead="emulate the same workload with smaller extents: the kernel has the same "
            "structure",
        )
    compiled = compile_source(
        workload,
        target=target,
        rule=rule,
        placement=placement,
        cluster=cluster or None,
        constant_weights=constant_weights,
    )
    found = check(compiled, seed=seed, gpu=False)
    ok = all(each.status != "failed" for each in found)
    value = {
        "ok": ok,
        "workload": source.summary,
        "launches": [*map(asdict, compiled.lowered.image.launches)],
        "verdicts": [*map(asdict, found)],
    }
    show(as_json, value, source.summary, verdicts(found))
    if not ok:
        raise typer.Exit(1)


# ``crossfuse demo``: a Llama-style FFN from PyTorch to a planned and checked kernel.


ROWS, HIDDEN, INTERMEDIATE = 32, 256, 512


def demo(
    target: Target = None,
    output: Output = OUTPUT,
    as_json: JsonFlag = False,
) -> None:
    """Import a small Llama-style FFN from PyTorch, plan it, fuse it, check it, time it on a GPU."""
    import torch

    from crossfuse.compiler import check, time_kernel
    from crossfuse.compiler import compile as compile_source
    from crossfuse.compiler.problem import make_problem
    from crossfuse.compiler.report import make_report
    from crossfuse.files import make_folder
    from crossfuse.workload import gated_ffn_module

    module = gated_ffn_module(HIDDEN, INTERMEDIATE, "bfloat16")
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
    compiled = compile_source(
        module,
        example_inputs=(x,),
        target=target,
        directory=make_folder(output),
        name="ffn",
    )
    found = check(compiled)
    try:
        timing = time_kernel(compiled, make_problem(compiled.source, compiled.schedule))
    except EnvironmentRefused:
        timing = None
    report = make_report(compiled, found, timing)
    show(as_json, report.to_json(), *render(report))
    if not report.ok:
        raise typer.Exit(1)


# ``crossfuse explain``: which kernel a workload gets, and why that one.


_Only = Annotated[
    str,
    typer.Option(
        help="Families to choose from, such as l2,dsm: gemm, registers, dsm, l2, global, phases "
        "and launches, of cascades stream, tiles and rows, and eager, which is not to fuse. All of "
        "them if left out."
    ),
]


def explain(
    workload: Workload,
    target: Target = None,
    only: _Only = "",
    top: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, help="Plans to show, the chosen one and those that come next."
        ),
    ] = 1,
    max_cluster: Annotated[
        int,
        typer.Option(
            min=0, max=16, help="CTAs of a cluster at most; 8 is portable. 0: what the device has."
        ),
    ] = 0,
    shared_bytes: Annotated[
        int,
        typer.Option(
            min=0, max=MOST, help="Shared memory of a CTA at most. 0: what the device has."
        ),
    ] = 0,
    rates: Annotated[
        Path | None,
        typer.Option(help="Record of crossfuse calibrate instead of the packaged one."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which kernel is estimated to be the fastest, what it takes, and what others lose on.

    Of a cascade of reductions (R7, softmax:rows=64,cols=1024) first: how it becomes one stream,
    and why that gives what its definition gives.
    """
    from crossfuse.planner.cost.rates import rates_of_file
    from crossfuse.planner.explain.explanation import explain_best, limited

    spec = limited(target, max_cluster=max_cluster, shared_bytes=shared_bytes)
    families = [each.strip() for each in only.split(",") if each.strip()]
    known = rates_of_file(rates, spec) if rates else None
    value, parts = _derived(workload)
    found = explain_best(workload, spec, only=families, rates=known, top=top)
    if svg is not None:
        from crossfuse.files import write_atomically

        write_atomically(svg, found.svg().encode())
    show(as_json, {**value, **found.to_json()}, workload, *parts, *found.render())


def _derived(workload: str) -> tuple[dict[str, Any], list[Any]]:
    """How a cascade becomes one stream, as a value for JSON and as text; nothing of a chain."""
    from crossfuse.planner.plan import is_cascade

    if not is_cascade(workload):
        return {}, []
    from rich.text import Text

    from crossfuse.cascade.algebra.explain import explain_cascade
    from crossfuse.planner.cascade.shape import function_of
    from crossfuse.workload.cascades import resolve

    spec = resolve(workload)
    derived = explain_cascade(str(spec), function_of(spec))
    return derived.to_json(), [Text(derived.text() + "\n")]


# ``crossfuse timeline``: when the CTAs of a kernel reach each of its steps, on a GPU.


def timeline(
    workload: Workload,
    m: Annotated[
        int, typer.Option("--m", min=0, max=MOST, help="Rows; 0 takes those of the workload.")
    ] = 0,
    target: Target = None,
    placement: Placement = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Show when the CTAs of our kernels begin, multiply, exchange and store: where time goes."""
    from crossfuse.bench.timeline import measure_timeline
    from crossfuse.workload.suites import resolve

    spec = resolve(workload)
    spec = replace(spec, M=m) if m else spec
    found = measure_timeline(spec, target, placement)
    value = {"workload": str(spec), "kernels": [asdict(each) for each in found]}
    show(as_json, value, str(spec), *map(_table, found))


def _table(kernel: KernelTimeline) -> Table:
    gap = "" if kernel.gap is None else f", {kernel.gap:.1f} us after the kernel before"
    headings = ("event", "first CTA", "median", "last CTA", "CTAs")
    rows = (
        (
            each.name,
            *(f"{time:.1f}" for time in (each.first, each.median, each.last)),
            f"{each.ctas}",
        )
        for each in kernel.events
    )
    return table(f"{kernel.kernel}{gap}; microseconds", headings, rows)


# ``crossfuse view``: a page for a browser.


def view(
    source: Annotated[
        str,
        typer.Argument(
            help="A packaged id or spec, or a file: a plan (crossfuse explain --json), a candidate "
            "with tiles or a trace, a scheduled module as TVM's JSON or TVMScript (.py)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Page to write.")] = Path("view.html"),
    target: Target = None,
    workload: Annotated[
        str, typer.Option(help="Of the plan of a chain: the spec that it is of.")
    ] = "",
    measured: Annotated[
        Path | None, typer.Option(help="What crossfuse timeline --json printed on a GPU.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a page that shows a plan, its cluster, when what happens, and CUDA by schedule line."""
    from crossfuse.files import write_atomically
    from crossfuse.view.write import view_page

    kernels = _measured(measured) if measured else ()
    text = view_page(source, target, workload=workload, measured=kernels)
    write_atomically(out, text.encode())
    found = {"page": str(out), "bytes": len(text.encode())}
    show(as_json, found, f"{out}: open it in a browser; it needs no network")


def _measured(path: Path) -> Any:
    from crossfuse.files import read_text
    from crossfuse.schema import Damaged, parse, typed
    from crossfuse.view.write import measured_refused

    try:
        return typed(Mapping[str, Any], parse(read_text(path))).get("kernels")
    except Damaged as error:
        raise measured_refused(str(path), error) from None
