"""Several loops over the same left tiles, read as one that loads them once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Tile, covers
from crossfuse.lower.hopper.program.tile_nest import refuse_program
from crossfuse.lower.hopper.program.tile_program import Contraction


def merge(contractions: list[Contraction]) -> Contraction:
    """Several loops that load the same left tiles, as one that loads them once.

    Raises
    ------
    LoweringRefused
        If their steps, left tiles or shapes differ.
    """
    first, *others = contractions
    known = ir.sym.Analyzer()
    products = list(first.products)
    for other in others:
        moved = _on_step(other, first.step)
        same = (
            other.steps == first.steps
            and moved.left.buffer.same_as(first.left.buffer)
            and covers(moved.left, first.left, known)
            and covers(moved.result(first.left.buffer), first.result(first.left.buffer), known)
        )
        if not same:
            raise refuse_program(
                f"loop '{other.step.name}'",
                f"{other.steps} steps of tiles of '{other.left.buffer.name}'",
                f"the {first.steps} steps and left tiles of loop '{first.step.name}', so that both "
                "are loaded once",
            )
        products += moved.products
    stages = max(each.stages for each in contractions)
    constant = all(each.constant for each in contractions)
    return replace(first, products=tuple(products), stages=stages, constant=constant)


def _on_step(contraction: Contraction, step: Any) -> Contraction:
    """The same loop with another variable."""

    def moved(tile: Tile) -> Tile:
        origin = tuple(
            ir.substitute(each, lambda var: step if var.same_as(contraction.step) else var)
            for each in tile.origin
        )
        return replace(tile, origin=origin)

    products = tuple(replace(each, right=moved(each.right)) for each in contraction.products)
    return replace(contraction, step=step, left=moved(contraction.left), products=products)
