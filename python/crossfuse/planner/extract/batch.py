"""Which rows of a chain are matrices of a batch: those that have weights of their own.

Rows that all weights are shared by make one matrix, however many loops they are. A product whose
weights are shared has rows of both kinds if one before or after it has a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossfuse.blocks import access
from crossfuse.planner.extract.refusal import refused
from crossfuse.planner.extract.stages import Stage

Parts = dict[Any, frozenset[str]]


def batch_of(stage: Stage) -> frozenset[Any]:
    """Rows that the weights of a product follow."""
    followed = [each.weight.variables for each in stage.splits]
    return frozenset(stage.rows).intersection(*followed)


def row_parts(stages: Sequence[Stage]) -> list[Parts]:
    """Say of the rows of each product whether they are rows, matrices of a batch, or both.

    Parameters
    ----------
    stages : Sequence[Stage]
        All products, first to last.

    Returns
    -------
    list[dict]
        For each product ``"row"`` and ``"batch"`` by coordinate; nothing for one that is always 0.

    Raises
    ------
    PlanRefused
        If two products have weights for different matrices.
    """
    batched = [index for index, each in enumerate(stages) if batch_of(each)]
    if not batched:
        return [dict.fromkeys(each.rows, frozenset({"row"})) for each in stages]
    first = batched[0]
    found: list[Parts] = [{} for _ in stages]
    found[first] = _own(stages[first])
    for index in range(first, len(stages) - 1):
        later = stages[index + 1]
        seen = _forward(stages[index], found[index], later)
        if index + 1 in batched:
            _check_same(stages[first], later, seen)
            seen = _own(later)
        found[index + 1] = seen
    for index in reversed(range(first)):
        found[index] = _backward(stages[index], found[index + 1])
    return found


def _own(stage: Stage) -> Parts:
    batch = batch_of(stage)
    return {each: frozenset({"batch" if each in batch else "row"}) for each in stage.rows}


def _forward(stage: Stage, parts: Parts, later: Stage) -> Parts:
    found: Parts = dict.fromkeys(later.rows, frozenset())
    for coordinate, index in zip(stage.blocks[0].coordinates, stage.index, strict=True):
        for var in access.variables([index]):
            if var in found:
                found[var] |= parts.get(coordinate, frozenset())
    return found


def _backward(stage: Stage, parts: Mapping[Any, frozenset[str]]) -> Parts:
    pairs = dict(zip(stage.blocks[0].coordinates, stage.index, strict=True))
    return {
        row: frozenset[str]().union(
            *(parts.get(var, frozenset()) for var in access.variables([pairs[row]]))
        )
        for row in stage.rows
    }


def _check_same(first: Stage, later: Stage, seen: Parts) -> None:
    own = _own(later)
    odd = [row for row, parts in seen.items() if parts and parts != own[row]]
    if odd:
        block, weight = later.blocks[0], later.splits[0].weight.buffer.name
        found = f"a weight '{weight}' for other matrices than that of {first.blocks[0].where}"
        instead = "split the chain between the two products"
        raise refused(block.where, found, "one batch for all weights", instead)
