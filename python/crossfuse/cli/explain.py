"""``crossfuse explain``: which kernel a workload gets, and why that one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crossfuse.cli.kernel import Target, Workload
from crossfuse.cli.output import MOST, JsonFlag, print_json, print_rich

if TYPE_CHECKING:
    from crossfuse.hardware import Device
    from crossfuse.planner.cost.rates import Rates

#: A picture, a value for JSON, and tables.
_Told = tuple[str, dict[str, Any], list[Any]]
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
    from crossfuse.planner.explain.best import limited
    from crossfuse.planner.plan import is_cascade

    spec = limited(target, max_cluster=max_cluster, shared_bytes=shared_bytes)
    families = [each.strip() for each in only.split(",") if each.strip()]
    known = rates_of_file(rates, spec) if rates else None
    explained = _cascade if is_cascade(workload) else _chain
    picture, value, parts = explained(workload, spec, families, known, top)
    if svg is not None:
        from crossfuse.files import write_atomically

        write_atomically(svg, picture.encode())
    if as_json:
        print_json(value)
    else:
        print_rich(workload, *parts)


def _chain(
    workload: str, spec: Device, families: Sequence[str], rates: Rates | None, top: int
) -> _Told:
    from crossfuse.planner.explain.best import explain_best
    from crossfuse.planner.explain.tables import render

    found = explain_best(workload, spec, only=families, rates=rates, top=top)
    return found.svg(), found.to_json(), render(found)


def _cascade(
    workload: str, spec: Device, families: Sequence[str], rates: Rates | None, top: int
) -> _Told:
    from rich.text import Text

    from crossfuse.cascade.algebra.explain import explain_cascade
    from crossfuse.planner.explain.best import explain_best_cascade

    derived = explain_cascade(workload)
    found = explain_best_cascade(workload, spec, only=families, rates=rates, top=top)
    value = {**derived.to_json(), **found.to_json()}
    return found.svg(), value, [Text(derived.text() + "\n"), *found.render()]
