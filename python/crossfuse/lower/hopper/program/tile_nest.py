"""Reads one block of a tile program, with the loops of its tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Tile
from crossfuse.lower.refusal import refuse
from crossfuse.lower.stored_elements import implies
from crossfuse.lower.tree import analyzer, bounds, children


@dataclass(frozen=True)
class TileNest:
    """A block with the loops of its tile, and those around them."""

    #: Loops outside the tile, outermost first.
    around: tuple[Any, ...]
    #: Serial loops of the tile.
    loops: tuple[Any, ...]
    realize: Any

    @property
    def known(self) -> Any:
        """An analyzer that knows the ranges of all loops."""
        return analyzer((*self.around, *self.loops))

    @property
    def block(self) -> Any:
        """The block without the values of its iterators."""
        return self.realize.block

    @property
    def where(self) -> str:
        """The nest, as messages name it."""
        return f"block '{self.block.name_hint}'"

    def placed(self, index: Any) -> Any:
        """An index in the block's variables, rewritten in those of loops."""
        variables = (each.var for each in self.block.iter_vars)
        return ir.substitute(index, dict(zip(variables, self.realize.iter_values, strict=True)))

    def moved(self, index: Any) -> Any:
        """The loop of the tile that an index follows, or None."""
        placed = self.placed(index)
        followed = [each for each in self.loops if ir.mentions(placed, each.loop_var)]
        # Beside the loop with most iterations, others may have one.
        return max(followed, key=lambda each: ir.constant(each.extent) or 0, default=None)

    def tile(self, buffer: Any, indices: Any) -> Tile:
        """The box of a matrix that the nest's loops traverse."""
        origin: list[Any] = []
        shape: list[int] = []
        for index in indices:
            first, moved = self.along(buffer, index)
            origin.append(first)
            shape.append(1 if moved is None else int(ir.constant(moved.extent) or 0))
        if len(shape) != 2:
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'", f"{len(shape)} dimensions", "matrices"
            )
        self.check_predicate(buffer)
        return Tile(buffer, tuple(origin), (shape[0], shape[1]))

    def along(self, buffer: Any, index: Any) -> tuple[Any, Any]:
        """The first value of an index of a buffer in the tile, and the loop that it follows.

        Refused if it follows several loops, or not with step 1.
        """
        known = self.known
        placed = self.placed(index)
        first = ir.at_zero(placed, *(each.loop_var for each in self.loops))
        moved = self.moved(index)
        rest = known.simplify(placed - first)
        if moved is not None and not known.can_prove_equal(rest, moved.loop_var):
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'",
                f"index {placed}",
                "one loop of the tile for each dimension, with step 1",
            )
        return known.simplify(first), moved

    def check_predicate(self, buffer: Any) -> None:
        """Refuse a predicate that does more than leave out the tails of tensors.

        A sum leaves out terms beyond its operands: those that a kernel adds are zero.
        """
        for term in self.further_conditions():
            raise refuse_program(
                f"{self.where}, buffer '{buffer.name}'",
                f"the condition {term}",
                "conditions that keep indices within their tensor",
            )

    def further_conditions(self) -> list[Any]:
        """Conditions of the block that do more than keep indices within their tensors."""
        loops = bounds((*self.around, *self.loops))
        inside = [
            value < each.dom.extent
            for each, value in zip(self.block.iter_vars, self.realize.iter_values, strict=True)
        ]
        if self.block.init is not None:
            inside += [
                self.placed(index.min) < extent
                for read in self.block.reads
                for index, extent in zip(read.region, read.source.ty.shape, strict=True)
            ]
        return [
            term
            for term in ir.terms(self.realize.predicate)
            if ir.constant(term) != 1 and not any(implies(each, term, loops) for each in inside)
        ]


def tile_nest(node: Any, around: tuple[Any, ...]) -> TileNest:
    """Read a nest: serial loops around one block; refuse anything else."""
    loops: list[Any] = []
    while isinstance(node, ir.For):
        if int(node.kind) != int(ir.ForKind.SERIAL) or ir.constant(node.extent) is None:
            raise refuse_program(
                f"loop '{node.loop_var.name}'",
                f"a loop of the tile that is bound or has extent {node.extent}",
                "serial loops of constant extent: the lowering divides a tile over threads",
            )
        check_start(node)
        loops.append(node)
        node = node.body
    if not isinstance(node, ir.SBlockRealize):
        raise refuse_program(
            "function", f"{len(children(node))} statements in a nest", "one block a nest"
        )
    return TileNest(around, tuple(loops), node)


def check_start(loop: Any) -> None:
    """Refuse a loop that does not count from 0."""
    if ir.constant(loop.min) != 0:
        raise refuse_program(
            f"loop '{loop.loop_var.name}'", f"a loop that starts at {loop.min}", "loops from 0"
        )


def refuse_program(where: str, found: str, limit: str) -> Exception:
    """The refusal of a function that is no tile program, to be raised."""
    return refuse(
        "tile-program",
        where,
        found=found,
        limit=limit,
        instead="schedule as the tiled rules do (crossfuse.schedule.rules), or leave the stages "
        "out for the general lowering",
    )
