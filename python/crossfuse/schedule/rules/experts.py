"""Rule for products of few rows by weights that an index chooses, one expert's for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import is_k_major
from crossfuse.blocks.scheduled import bindings, is_reduction, name_of, reduces
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import WARP
from crossfuse.markers import FAST, RESIDENT_CTAS
from crossfuse.planner.families.experts import ExpertsShape, best_kernels
from crossfuse.planner.families.skinny import VECTOR, SkinnyKernel
from crossfuse.schedule.rules.expert_columns import (
    divide_columns,
    multiply_columns,
)
from crossfuse.schedule.rules.skinny import (
    SkinnyTiles,
    bind_threads,
    in_one_loop,
    multiply,
)


@checked
def schedule_experts(func: AnyFunction, *, tiles: SkinnyTiles | None = None) -> Any:
    """Schedule products of rows by the weights of experts, as fast as memory delivers these.

    Each CTA has 16 columns of one token. Its warps share the reduction, or, where the products of a
    token's experts are added up, are divided among these; weights pass from memory to registers as
    in `schedule_skinny`::

        for column tile, token in blockIdx.x:                # a tile of all tokens, then the next
            for expert of the token, part in threadIdx.y, (group, lane) in threadIdx.x:
                for step:
                    weights[columns, loads, 8] = W[places[token, expert], ...]
                    for load, column:
                        sums[lane, column] += x[token, 8] * weights[column, load, 8]
                of_warp[expert, part, column] = sums of all lanes
            out[token, tile] = epilogue(sum of experts: factor * sum of parts)

    Tokens of the same expert read its weights at about the same time, hence from L2.

    Of weights stored as [experts, k, n] a load has eight columns, and lanes share the reduction:
    each multiplies by itself, and stores its own sum of each column. A CTA has 16 to 64 columns.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        See `crossfuse.workload.experts.emit_experts`; weights are of 16 bits.
    tiles : SkinnyTiles | None
        How it is divided, with the warps of all experts of a token; None leaves it to the planner.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no such product, or the tiles do not divide it.

    Examples
    --------
    >>> from crossfuse.workload.dtypes import Operand
    >>> from crossfuse.workload.experts import ExpertProduct, ExpertsForm, emit_experts
    >>> form = ExpertsForm(
    ...     Operand("A", (2, 256), "bfloat16"), Operand("B", (16, 32, 256), "bfloat16"),
    ...     Operand("places", (2, 4), "int64"), (ExpertProduct("gemm0"),), 32,
    ...     lambda tensors, i, j: tensors["gemm0"](i, j), (), "bfloat16", 8, repeats=4)
    >>> sch = schedule_experts(emit_experts(form))
    >>> "threadIdx.y" in sch.mod.script()
    True
    """
    sch = ir.Schedule(func)
    found = read_experts(sch)
    kernel = _chosen(sch, found, tiles or SkinnyTiles())
    if found.rows is not None:
        sch.compute_inline(found.rows)
    way = _ROWS if found.shape.k_major else _COLUMNS
    grid, warp, divided = way.divide(
        sch, found.products, found.epilogue, kernel, found.shape.experts
    )
    _with_epilogue(sch, found, grid, kernel)
    way.multiply(sch, divided)
    _store(sch, found, kernel)
    for each in found.chosen:
        sch.compute_inline(each)
    # Once for all loads of a warp.
    sch.compute_at(found.expert, warp, preserve_unit_loops=True)
    sch.set_scope(found.expert, 0, "local")
    root = sch.get_sblock("root")
    # As of products by one weight: else ptxas saves registers, and asks for weights one by one.
    sch.annotate(root, RESIDENT_CTAS, int(kernel.resident))
    sch.annotate(root, FAST, 1)
    return sch


@dataclass(frozen=True)
class Experts:
    """Blocks of a function of `crossfuse.workload.experts.emit_experts`."""

    expert: Any
    products: tuple[Any, ...]
    #: What copies the weights of each pair, of each product; and the rows of each, if any does.
    chosen: tuple[Any, ...]
    rows: Any
    #: What adds up pairs, of each product; none if nothing does.
    mixed: tuple[Any, ...]
    #: What adds up their factors, if these are divided by it.
    total: tuple[Any, ...]
    epilogue: Any
    shape: ExpertsShape


def read_experts(sch: Any) -> Experts:
    """Find the blocks of products by chosen weights; any other function is refused."""
    outputs = list(sch.get_output_blocks("root"))
    epilogue = outputs[0]
    sums = [each for each in sch.get_producers(epilogue) if reduces(sch, each)]
    mixed = [each for each in sums if any(reduces(sch, e) for e in sch.get_producers(each))]
    added = [e for m in mixed for e in sch.get_producers(m) if reduces(sch, e)]
    total = [each for each in added if len(sch.get(each).writes[0].source.ty.shape) == 1]
    products = [each for each in added if each not in total] or sums
    if len(outputs) != 1 or not products or len(mixed) not in (0, len(sums)):
        raise _refuse(sch, epilogue, "an output that is not made of products by chosen weights")
    chosen, rows = [], None
    for each in products:
        weights, others = _made(sch, each)
        if len(weights) != 1 or len(others) > 1:
            raise _refuse(sch, each, "a product whose weights no index chooses")
        chosen += weights
        rows = others[0] if others else None
    (expert,) = sch.get_producers(chosen[0])
    return Experts(
        expert,
        tuple(products),
        tuple(chosen),
        rows,
        tuple(mixed),
        tuple(total),
        epilogue,
        _shape(sch, products, mixed, epilogue),
    )


def _made(sch: Any, product: Any) -> tuple[list[Any], list[Any]]:
    """What makes the weights that a product reads, and what makes its rows."""
    reads = sch.get(product).reads
    if len(reads) != 2 or len(reads[1].source.ty.shape) != _RANK:
        return [], []
    made: tuple[list[Any], list[Any]] = ([], [])
    for each in sch.get_producers(product):
        stored = sch.get(each).writes[0].source
        made[not stored.same_as(reads[1].source)].append(each)
    return made


def _shape(sch: Any, products: Sequence[Any], mixed: Sequence[Any], epilogue: Any) -> ExpertsShape:
    pairs, _, columns, depth = _extents(sch, products[0])
    experts = _extents(sch, mixed[0])[-1] if mixed else 1
    kinds = tuple(str(each.source.ty.dtype) for each in sch.get(products[0]).reads)
    stored = _extents(sch, epilogue)[2]
    return ExpertsShape(
        tokens=pairs // experts,
        columns=columns,
        depth=depth,
        products=len(products),
        experts=experts,
        kinds=kinds,
        k_major=is_k_major(sch, products[0], 0),
        joined=columns // stored,
    )


def _extents(sch: Any, block: Any) -> list[int]:
    pairs = bindings(sch, block)
    spatial = [int(var.dom.extent) for var, _ in pairs if not is_reduction(var)]
    return [*spatial, *(int(var.dom.extent) for var, _ in pairs if is_reduction(var))]


#: Of the weights that each pair has.
_RANK = 3


def _chosen(sch: Any, found: Experts, given: SkinnyTiles) -> SkinnyKernel:
    """Take the tiles that are given, or those with the least estimated time; check them."""
    shape = found.shape
    tiles = given.kernel
    kernel = shape.kernel(tiles) if tiles else next(iter(best_kernels(shape)), None)
    broken = "no tiles that divide it" if kernel is None else shape.broken(kernel)
    if kernel is None or broken:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, found.products[0]),
            found=f"{shape.text}, {broken}",
            limit="weights of 16 bits, and tiles that divide columns and the reduction of each "
            "expert",
            instead="leave all tiles out, or leave these products to a library",
        )
    return kernel


# Weights stored as [experts, n, k], which tensor cores multiply, and as [experts, k, n].


@dataclass(frozen=True)
class _Way:
    """How products are multiplied: by steps of the schedule, one behind the other."""

    #: Divides products; loops over CTAs and over warps, and what `multiply` is to know.
    divide: Callable[[Any, Sequence[Any], Any, SkinnyKernel, int], tuple[Any, Any, Any]]
    #: Loads and multiplies, once the epilogue is in the loop over CTAs.
    multiply: Callable[[Any, Any], None]


def _divide(
    sch: Any, products: Sequence[Any], epilogue: Any, tiles: SkinnyKernel, experts: int
) -> tuple[Any, Any, Any]:
    weights = [sch.get(each).reads[1].source for each in products]
    divided = [_divided(sch, each, tiles, experts) for each in products]
    if len(divided) > 1:
        in_one_loop(sch, epilogue, products, divided)
    grid, warp = bind_threads(sch, divided, tiles, own=True)
    return grid, warp, (divided, weights)


def _multiply(sch: Any, of: tuple[Sequence[tuple[Any, Any]], Sequence[Any]]) -> None:
    divided, weights = of
    multiply(sch, divided, weights, own=True)


_ROWS = _Way(_divide, _multiply)
_COLUMNS = _Way(divide_columns, multiply_columns)


def _divided(sch: Any, product: Any, tiles: SkinnyKernel, experts: int) -> tuple[Any, Any]:
    """Divide a product; the blocks that sum what a thread multiplies, and that of its warp."""
    pair, row, j, k = sch.get_loops(product)
    token, expert = sch.split(pair, [None, experts])
    grid, group, column = sch.split(j, [None, tiles.groups, tiles.columns])
    step, part, load, lane, element = sch.split(
        k, [None, int(tiles.warps) // experts, tiles.loads, tiles.lanes, VECTOR]
    )
    sch.reorder(grid, token, expert, part, lane, group, step, load, column, row, element)
    sch.fuse(grid, token)
    partial = sch.rfactor(sch.fuse(part, lane), 0)
    _, _, threads, *_ = sch.get_loops(product)
    part, _ = sch.split(threads, [None, tiles.lanes])
    of_warp = sch.rfactor(part, 0)
    _, expert, part, *_ = sch.get_loops(of_warp)
    sch.fuse(expert, part)
    _, expert, threads, group, *_ = sch.get_loops(partial)
    part, lane = sch.split(threads, [None, tiles.lanes])
    sch.reorder(group, lane)
    sch.fuse(expert, part)
    return partial, of_warp


def _with_epilogue(sch: Any, found: Experts, grid: Any, tiles: SkinnyKernel) -> None:
    """Bring what follows the sums of warps into the loop over CTAs.

    Not by a primitive that computes a block at a loop: sums of factors are not yet there.
    """
    for each in found.products:
        sch.reverse_compute_at(each, grid, preserve_unit_loops=True)
    for block in (*found.mixed, found.epilogue):
        token, i, j, *experts = sch.get_loops(block)
        tile, j = sch.split(j, [None, int(tiles.width) // found.shape.joined])
        sch.reorder(tile, token, i, j, *experts)
        grid = sch.merge(grid, sch.fuse(tile, token))
    sch.bind(grid, "blockIdx.x")


def _store(sch: Any, found: Experts, tiles: SkinnyKernel) -> None:
    """Let each thread add up all sums for what it stores, neighbours side by side."""
    *_, i, j = sch.get_loops(found.epilogue)
    width = int(sch.get(j).extent)
    if width <= WARP:
        _, y, beside = sch.split(i, [None, tiles.warps, WARP // width])
        x = sch.fuse(beside, j)
    else:
        _, y, x = sch.split(sch.fuse(i, j), [None, tiles.warps, WARP])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    for each in (*found.mixed, *found.total):
        sch.compute_at(each, x, preserve_unit_loops=True)
        sch.set_scope(each, 0, "local")
    for product in found.products:
        at = sch.get_loops(found.mixed[found.products.index(product)])[-1] if found.mixed else x
        sch.compute_at(product, at, preserve_unit_loops=True)
        sch.set_scope(product, 0, "local")


def _refuse(sch: Any, block: Any, found: str) -> Exception:
    return refuse(
        ScheduleRefused,
        "rule",
        name_of(sch, block),
        found=found,
        limit="one product, or gate and up, by weights [pairs, n, k] that a block copies",
        instead="write the function by crossfuse.workload.experts.emit_experts",
    )
