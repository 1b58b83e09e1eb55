"""Chains whose number of rows is symbolic: planned in each bin of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.relax.chains.groups import Group
from crossfuse.relax.chains.planned import PlannedBin, PlannedChain, PlannedRows
from crossfuse.relax.chains.symbols import (
    at_sizes,
    check_rows,
    cut,
    most_rows,
    rows_of,
    sizes_for,
)

#: Plans a group of static shapes, a module of its own.
Plan = Callable[[Any], PlannedChain]


@dataclass(frozen=True)
class Bins:
    """Rows that kernels are made for.

    Attributes
    ----------
    rows : Sequence[int]
        Rows at most; at least one number.
    attributes : Mapping[str, Any] | None
        Of the model's function, which may say how large symbols are.
    """

    rows: Sequence[int]
    attributes: Mapping[str, Any] | None


def plan_rows(
    group: Group, output: Var, given: tuple[Var, ...], function: Any, bins: Bins, plan: Plan
) -> PlannedRows:
    """Plan a group of symbolic rows.

    Parameters
    ----------
    group : Group
        The group.
    output : Var
        Its result in the model.
    given : tuple[Var, ...]
        What it reads there.
    function : relax.Function
        The group alone.
    bins : Bins
        What to plan for.
    plan : Callable
        What to plan it with.

    Returns
    -------
    PlannedRows
        All bins; those that have no chain with the reason.

    Raises
    ------
    WorkloadRefused
        If tensors have symbols beside a number of rows.
    RefusedError
        Of the first bin, if none has a chain.
    """
    rows = rows_of(output)
    found: dict[int, PlannedBin] = {}
    refusals: list[RefusedError] = []
    for most in cut(bins.rows, most_rows(rows, bins.attributes)):
        sizes = sizes_for(rows, most)
        if not sizes:
            continue
        try:
            chain = plan(at_sizes(function, sizes))
            _check(chain, output, rows)
            found[chain.outlined.M] = PlannedBin(chain.outlined.M, chain)
        except RefusedError as error:
            refusals.append(error)
            found.setdefault(most, PlannedBin(most, None, str(error)))
    every = tuple(found[each] for each in sorted(found))
    if refusals and all(each.chain is None for each in every):
        raise refusals[0]
    return PlannedRows(group, output, given, function, rows, every)


def _check(chain: PlannedChain, output: Var, rows: Any) -> None:
    """Refuse a chain of which symbols are more than rows."""
    for each in chain.outlined.arguments:
        if each.value is None:
            check_rows(chain.given[each.position], each.shape, rows)
    check_rows(output, (chain.outlined.M, chain.outlined.L), rows)
