"""``crossfuse explain``: which kernel a workload gets, and why that one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.kernel import Target, Workload
from crossfuse.cli.output import MOST, JsonFlag, show

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
    from crossfuse.planner.explain.best import explain_best, limited

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
