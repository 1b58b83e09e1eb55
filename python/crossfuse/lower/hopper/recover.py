"""Reads a tile program off a scheduled function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.tile_program import Contraction, Place, Store, Tile, TileProgram
from crossfuse.lower.refusal import refuse
from crossfuse.lower.stored_elements import implies
from crossfuse.lower.tree import analyzer, bounds, children, coordinate
from crossfuse.schedule.markers import STAGES


def is_tile_program(func: Any) -> bool:
    """Whether a schedule asks for the Hopper pipeline: a loop has stages."""
    found: list[Any] = []
    ir.walk(func.body, (ir.For, lambda loop: found.append(loop) if _stages(loop) else None))
    return bool(found)


def recover(func: Any) -> TileProgram:
    """Read the tile program of a scheduled function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Loops over places, inside them a loop with stages (two loads and a product of tiles) and
        the store of the product, each block with one loop for each of its dimensions.

    Returns
    -------
    TileProgram
        Its tiles.

    Raises
    ------
    LoweringRefused
        Naming the block or loop that has another form.
    """
    outer, parts = _outer_loops(func.body.block.body)
    loops = [each for each in parts if isinstance(each, ir.For) and _stages(each)]
    others = [each for each in parts if not any(each.same_as(loop) for loop in loops)]
    if len(loops) != 1 or len(others) != 1:
        raise _refuse(
            "function",
            f"{len(loops)} loops with stages and {len(others)} other nests in a CTA",
            "one pipelined loop, then the store of its product",
        )
    contraction = _contraction(loops[0], outer)
    store = _store(_nest(others[0], outer), contraction)
    places = tuple(Place(coordinate(each), each.loop_var, int(each.extent)) for each in outer)
    return TileProgram(places, contraction, store, tuple(func.params))


def _stages(loop: Any) -> bool:
    return STAGES in loop.annotations


@dataclass(frozen=True)
class _Nest:
    """A block with the loops of its tile, and those around them."""

    around: tuple[Any, ...]
    loops: tuple[Any, ...]
    realize: Any

    @property
    def known(self) -> Any:
        """An analyzer that knows the ranges of all loops."""
        return analyzer((*self.around, *self.loops))

    @property
    def block(self) -> Any:
        return self.realize.block

    @property
    def where(self) -> str:
        return f"block '{self.block.name_hint}'"

    def placed(self, index: Any) -> Any:
        """An index in the block's variables, in those of loops."""
        values = dict(
            zip((each.var for each in self.block.iter_vars), self.realize.iter_values, strict=True)
        )
        return ir.substitute(index, lambda var: values.get(var, var))

    def tile(self, buffer: Any, indices: Any) -> Tile:
        """The box that the nest's loops go through."""
        known = self.known
        origin: list[Any] = []
        shape: list[int] = []
        for index in indices:
            placed = self.placed(index)
            first = ir.substitute(placed, self._at_start)
            moved = [loop for loop in self.loops if _occurs(loop.loop_var, placed)]
            rest = known.simplify(placed - first)
            if len(moved) > 1 or (moved and not known.can_prove_equal(rest, moved[0].loop_var)):
                raise _refuse(
                    f"{self.where}, buffer '{buffer.name}'",
                    f"index {placed}",
                    "one loop of the tile for each dimension, with step 1",
                )
            origin.append(known.simplify(first))
            shape.append(int(ir.constant(moved[0].extent) or 0) if moved else 1)
        if len(shape) != 2:
            raise _refuse(
                f"{self.where}, buffer '{buffer.name}'", f"{len(shape)} dimensions", "matrices"
            )
        self._check_predicate(buffer)
        return Tile(buffer, tuple(origin), (shape[0], shape[1]))

    def _at_start(self, var: Any) -> Any:
        zero = ir.tirx.IntImm(str(var.ty), 0)
        return zero if any(var.same_as(loop.loop_var) for loop in self.loops) else var

    def _check_predicate(self, buffer: Any) -> None:
        """The block runs for every element of its domain: only tails of tensors are left out."""
        loops = bounds((*self.around, *self.loops))
        inside = [
            value < each.dom.extent
            for each, value in zip(self.block.iter_vars, self.realize.iter_values, strict=True)
        ]
        for term in ir.terms(self.realize.predicate):
            if ir.constant(term) != 1 and not any(implies(each, term, loops) for each in inside):
                raise _refuse(
                    f"{self.where}, buffer '{buffer.name}'",
                    f"the condition {term}",
                    "conditions that keep indices within their tensor",
                )


def _outer_loops(node: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Bound loops from the outside, and what stands inside them."""
    loops: list[Any] = []
    while isinstance(node, ir.For) and not _stages(node):
        tag = coordinate(node)
        if not tag.startswith(("blockIdx.", "cluster.")) or ir.constant(node.extent) is None:
            raise _refuse(
                f"loop '{node.loop_var.name}'",
                f"a loop bound to {tag}" if tag else "a serial loop around the pipelined one",
                "loops of constant extent over the grid and the cluster",
            )
        loops.append(node)
        node = node.body
    return tuple(loops), list(node.seq) if isinstance(node, ir.SeqStmt) else [node]


def _nest(node: Any, around: tuple[Any, ...]) -> _Nest:
    loops: list[Any] = []
    while isinstance(node, ir.For):
        if int(node.kind) != int(ir.ForKind.SERIAL) or ir.constant(node.extent) is None:
            raise _refuse(
                f"loop '{node.loop_var.name}'",
                f"a loop of the tile that is bound or has extent {node.extent}",
                "serial loops of constant extent: the lowering divides a tile over threads",
            )
        loops.append(node)
        node = node.body
    if not isinstance(node, ir.SBlockRealize):
        raise _refuse("function", f"{len(children(node))} statements in a nest", "one block a nest")
    return _Nest(around, tuple(loops), node)


def _contraction(loop: Any, outer: tuple[Any, ...]) -> Contraction:
    body = loop.body
    parts = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    nests = [_nest(each, (*outer, loop)) for each in parts]
    steps, stages = ir.constant(loop.extent), ir.constant(loop.annotations[STAGES])
    if len(nests) != 3 or steps is None or stages is None or ir.constant(loop.min) != 0:
        raise _refuse(
            f"loop '{loop.loop_var.name}'",
            f"{len(nests)} nests in {loop.extent} steps",
            "two loads and a product in a constant number of steps",
        )
    *copies, product = nests
    loads = dict(_load(each) for each in copies)
    left, right, transposed = _operands(product)
    accumulator = product.block.body.buffer
    for operand in (left, right):
        tile = loads.get(operand.buffer)
        if tile is None or not _covers(tile, operand, product.known):
            raise _refuse(
                product.where, f"operand '{operand.buffer.name}'", "tiles that the same step loads"
            )
        loads[operand.buffer] = replace(tile, shape=operand.shape)
    return Contraction(
        loop.loop_var,
        steps,
        stages,
        loads[left.buffer],
        loads[right.buffer],
        transposed,
        accumulator,
    )


def _load(nest: _Nest) -> tuple[Any, Tile]:
    """The staging buffer and what it holds."""
    body = nest.block.body
    plain = (
        isinstance(body, ir.BufferStore)
        and isinstance(body.value, ir.TensorLoad)
        and str(body.buffer.scope()).startswith("shared")
        and str(body.value.source.scope()) == "global"
        and len(body.indices) == len(body.value.indices)
        and all(a.same_as(b) for a, b in zip(body.indices, body.value.indices, strict=True))
    )
    if not plain:
        raise _refuse(
            nest.where, "a statement that is no plain copy", "copies from global to shared memory"
        )
    return body.buffer, nest.tile(body.value.source, body.value.indices)


def _operands(nest: _Nest) -> tuple[Tile, Tile, bool]:
    """Left and right operand of a product block, and whether the right one is [k, n]."""
    body, block = nest.block.body, nest.block
    spatial = [each.var for each in block.iter_vars if int(each.iter_type) == ir.IterVar.DataPar]
    reduced = [each.var for each in block.iter_vars if int(each.iter_type) != ir.IterVar.DataPar]
    if len(spatial) != 2 or len(reduced) != 1 or not isinstance(body, ir.BufferStore):
        raise _refuse(nest.where, "no product of matrices", "sums over one reduction variable")
    (i, j), (k,) = spatial, reduced
    factors = _factors(body)
    layouts = {(0, False): (i, k), (1, False): (j, k), (1, True): (k, j)}
    found: dict[int, tuple[Any, bool]] = {}
    for factor in factors:
        for (side, transposed), wanted in layouts.items():
            if side not in found and _is_at(factor, wanted):
                found[side] = (factor, transposed)
                break
    zero = block.init is not None and _is_zero(block.init.value)
    if len(found) != 2 or not zero or not _is_at(_load_of(body), (i, j)):
        raise _refuse(
            nest.where, f"the statement {body.value}", "C[i, j] + A[i, k] * B[j, k], from zero"
        )
    nest.tile(body.buffer, body.indices)
    (left, _), (right, transposed) = found[0], found[1]
    return (
        nest.tile(left.source, left.indices),
        nest.tile(right.source, right.indices),
        transposed,
    )


def _factors(body: Any) -> list[Any]:
    """The two loads that ``C + cast(A) * cast(B)`` multiplies."""
    value = body.value
    term = value.b if isinstance(value, ir.tirx.Add) else None
    if not isinstance(term, ir.tirx.Mul):
        return []
    factors = [each.value if isinstance(each, ir.tirx.Cast) else each for each in (term.a, term.b)]
    return [each for each in factors if isinstance(each, ir.TensorLoad)]


def _load_of(body: Any) -> Any:
    """What the statement adds to."""
    first = body.value.a if isinstance(body.value, ir.tirx.Add) else None
    same = isinstance(first, ir.TensorLoad) and first.source.same_as(body.buffer)
    return first if same else None


def _is_at(load: Any, variables: tuple[Any, Any]) -> bool:
    return (
        load is not None
        and len(load.indices) == 2
        and all(a.same_as(b) for a, b in zip(load.indices, variables, strict=True))
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, ir.tirx.FloatImm) and float(value.value) == 0


def _store(nest: _Nest, contraction: Contraction) -> Store:
    body = nest.block.body
    accumulator = contraction.accumulator
    if (
        not isinstance(body, ir.BufferStore)
        or len(body.indices) != 2
        or nest.block.init is not None
    ):
        raise _refuse(nest.where, "no elementwise store of a matrix", "out[i, j] = f(C[i, j], ...)")
    row, column = body.indices
    loads: list[Any] = []
    ir.walk(body.value, (ir.TensorLoad, loads.append))
    for load in loads:
        if load.source.same_as(accumulator) and not _is_at(load, (row, column)):
            raise _refuse(
                nest.where, f"the accumulator at {list(load.indices)}", "the element that is stored"
            )
        if not load.source.same_as(accumulator) and str(load.source.scope()) != "global":
            raise _refuse(
                nest.where, f"a load of '{load.source.name}'", "the accumulator and parameters"
            )
    tile = nest.tile(body.buffer, body.indices)
    wanted = _product_tile(contraction, body.buffer)
    if not _covers(tile, wanted, nest.known):
        raise _refuse(
            f"store of '{tile.buffer.name}'",
            f"a tile of {tile.shape} from {list(tile.origin)}",
            f"the product's, {wanted.shape} from {list(wanted.origin)}",
        )
    return Store(replace(tile, shape=wanted.shape), row, column, body.value)


def _product_tile(contraction: Contraction, buffer: Any) -> Tile:
    """What a contraction computes, as a tile of the output."""
    columns = contraction.right.origin[1 if contraction.right_is_transposed else 0]
    origin = (contraction.left.origin[0], columns)
    return Tile(buffer, origin, (contraction.rows, contraction.columns))


def _covers(tile: Tile, wanted: Tile, known: Any) -> bool:
    """Whether a tile is the wanted one, but for what lies outside its tensor."""
    return all(
        known.can_prove_equal(a, b) and (has == size or (has == extent and size > extent))
        for a, b, has, size, extent in zip(
            tile.origin, wanted.origin, tile.shape, wanted.shape, tile.extents, strict=True
        )
    )


def _occurs(var: Any, expression: Any) -> bool:
    return any(each.same_as(var) for each in ir.variables(expression))


def _refuse(where: str, found: str, limit: str) -> Exception:
    return refuse(
        "tile-program",
        where,
        found=found,
        limit=limit,
        instead="schedule as the tiled rules do (crossfuse.schedule.rules), or leave the stages "
        "out for the general lowering",
    )
