"""Rule for one product of few rows, whose weights pass from memory to tensor cores in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, is_k_major, read_products
from crossfuse.blocks.scheduled import name_of, read_index
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import MMA_LANES, WARP
from crossfuse.markers import (
    AHEAD,
    COLUMN,
    ELEMENT,
    FAST,
    LANE,
    RESIDENT_CTAS,
    ROW,
    ROW_TILE,
    SIDE_BY_SIDE,
    TERM,
    WARP_PRODUCT,
    ZERO,
)
from crossfuse.planner.families.skinny import ROWS, VECTOR, SkinnyKernel, best_tiles
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.schema import Tile

#: Where a block is put among those of a loop: as far in front as its operands allow.
_FIRST = -2
#: Loops around one that is put into the steps of the reduction.
_AROUND = 4
#: The loop over steps of the reduction among those of what a thread multiplies: behind CTAs, warps,
#: and lanes with their groups.
_STEP = 3
#: Rows of eight whose sums a thread has of a fragment.
_PAIR = 2


@checked
@dataclass(frozen=True)
class SkinnyTiles:
    """How products of few rows are divided over warps. Zero in all of them means: choose.

    `lanes` are neighbouring threads that share columns of the output: of 8, a warp's load has whole
    lines of 128 bytes, and each thread twice as many sums as of 4. `warps` are those of a CTA,
    which share the reduction, and `loads` the loads of 16 bytes of each column that a thread has on
    their way at the same time. A CTA has 16 columns of the output.
    """

    lanes: Tile = 0
    warps: Tile = 0
    loads: Tile = 0

    @property
    def kernel(self) -> SkinnyKernel | None:
        """The planner's kernel of these tiles; None where they are left to choose."""
        sizes = (self.lanes, self.warps, self.loads)
        return SkinnyKernel(*sizes) if all(sizes) else None


@checked
def schedule_skinny(
    func: AnyFunction, *, tiles: SkinnyTiles | None = None, constant_weights: bool = False
) -> Any:
    """Schedule a product of at most 32 rows, which is as fast as memory delivers its weights.

    Of gate and up, of which one output is made, a thread multiplies the same columns at the same
    time. Of several products of one operand, each with a result of its own, such as those that make
    queries, keys and values, each has CTAs of its own in one launch.

    Warps share the reduction. Each loads its part of some rows of the weights into registers, where
    tensor cores multiply it by all rows of the left operand; sums of warps are added up in shared
    memory::

        for tile in blockIdx.x:                              # 16 columns of the output
            for warp in threadIdx.y, (group, lane) in threadIdx.x:
                for step:
                    weights[columns, loads, 8] = ...         # registers, 16 bytes at a time
                    for load, column, row:                   # a lane: 8 elements of the reduction
                        sums[lane, row, column] += x[row, 8] * weights[column, load, 8]
                of_warp[row, column] = sums of all lanes     # shared memory
            out[row, tile] = epilogue(sums of all warps)

    The lowering makes instructions of tensor cores of `sums` and `of_warp`.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A canonical product, or gate and up, see `crossfuse.workload.prim_func`, or several products
        of one operand, see `crossfuse.workload.build.emit_products`; of weights stored as [n, k].
    tiles : SkinnyTiles | None
        How it is divided; None leaves it to the planner.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights. Nothing follows from it yet.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is none of these, or the tiles do not divide a product.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = schedule_skinny(prim_func(parse("gemm:M=1,K=512,N=256,weights=nk")))
    >>> "threadIdx.y" in sch.mod.script()
    True
    """
    sch = ir.Schedule(func)
    chains = read_products(sch, "skinny")
    kernel = _chosen(sch, chains, tiles or SkinnyTiles())
    for chain in chains:
        _bind(sch, chain, kernel)
    root = sch.get_sblock("root")
    # Else ptxas saves registers, and asks for weights one by one.
    sch.annotate(root, RESIDENT_CTAS, int(kernel.resident))
    sch.annotate(root, FAST, 1)
    if len(chains) > 1:
        sch.annotate(root, SIDE_BY_SIDE, 1)
    return sch


def _chosen(sch: Any, chains: Sequence[Chain], given: SkinnyTiles) -> SkinnyKernel:
    """Take the tiles that are given, or those with the least estimated time; check them."""
    shapes = [shape_of_blocks(each) for each in chains]
    kernel = given.kernel or best_tiles(*shapes)
    for chain, shape in zip(chains, shapes, strict=True):
        _check_tiles(sch, chain, shape, kernel)
    assert kernel is not None
    return kernel


def _check_tiles(sch: Any, chain: Chain, shape: Shape, kernel: SkinnyKernel | None) -> None:
    # Windows of images are no rows that vectors are loaded of.
    plain = len(sch.get_producers(chain.first[0])) == len(chain.rows)
    broken = None if kernel is None else kernel.broken(shape)
    if not broken and not all(is_k_major(sch, each, 0) for each in chain.first):
        broken = "with weights of which one is stored as [k, n]"
    if kernel is None or broken or not plain:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, chain.first[0]),
            found=f"{shape.text}, " + (broken or "no tiles that divide it, or a view of its rows"),
            limit=f"at most {ROWS} rows, weights stored as [n, k] of 16 bits, and tiles that "
            "divide columns and reduction",
            instead="leave all tiles out, or use schedule_tiled_gemm",
        )


def _bind(sch: Any, chain: Chain, tiles: SkinnyKernel) -> None:
    """Schedule the products of one output, and what is made of them."""
    weights = [sch.get(each).reads[1].source for each in chain.first]
    for each in chain.rows:
        sch.compute_inline(each)
    divided = [_divided(sch, each, tiles) for each in chain.first]
    if len(divided) > 1:
        in_one_loop(sch, chain.epilogue, chain.first, divided)
    grid, _ = bind_threads(sch, divided, tiles)
    grid = _with_epilogue(sch, chain, grid, tiles)
    multiply(sch, divided, weights)
    _store(sch, chain, grid, tiles)


#: What sums what a thread multiplies, and what sums that of a warp's threads, of each product.
Divided = Sequence[tuple[Any, Any]]


def bind_threads(
    sch: Any, divided: Divided, tiles: SkinnyKernel, *, own: bool = False
) -> tuple[Any, Any]:
    """Give what products were divided into to warps and lanes; loops over CTAs and over warps.

    Matrices of weights may each have their `own` place, in a loop of one.
    """
    grid, warp, group, lane, _, load, *_ = sch.get_loops(divided[0][0])
    sch.bind(warp, "threadIdx.y")
    sch.bind(sch.fuse(group, lane), "threadIdx.x")
    sch.unroll(load)
    for partial, of_warp in divided:
        sch.set_scope(partial, 0, "warp")
        _add_lanes(sch, of_warp, warp, tiles, own)
    return grid, warp


def multiply(sch: Any, divided: Divided, weights: Sequence[Any], *, own: bool = False) -> None:
    """Load weights step by step, and say what tensor cores multiply."""
    partials = [each for each, _ in divided]
    step = sch.get_loops(partials[0])[_STEP]
    _load_weights(sch, partials, weights, step, own)
    for partial in partials:
        first = sch.decompose_reduction(partial, step)
        _mark(sch, first, ZERO, ZERO)
        _mark(sch, partial, COLUMN, ROW, ELEMENT)


def _divided(sch: Any, product: Any, tiles: SkinnyKernel) -> tuple[Any, Any]:
    """Divide a product; the blocks that sum what a thread multiplies, and that of its warp."""
    i, j, k = sch.get_loops(product)
    grid, group, column = sch.split(j, [None, tiles.groups, tiles.columns])
    step, warp, load, lane, element = sch.split(
        k, [None, tiles.warps, tiles.loads, tiles.lanes, VECTOR]
    )
    sch.reorder(grid, warp, lane, group, step, load, column, i, element)
    partial = sch.rfactor(sch.fuse(warp, lane), 0)
    _, threads, *_ = sch.get_loops(product)
    warp, _ = sch.split(threads, [tiles.warps, tiles.lanes])
    of_warp = sch.rfactor(warp, 0)
    _, threads, group, *_ = sch.get_loops(partial)
    warp, lane = sch.split(threads, [tiles.warps, tiles.lanes])
    sch.reorder(group, lane)
    return partial, of_warp


def in_one_loop(sch: Any, epilogue: Any, products: Sequence[Any], divided: Divided) -> None:
    """Let each warp sum columns of all products, step by step of the reduction."""
    # The sums of lanes follow both: their nests may not stand between those that are merged.
    at = sch.get_loops(epilogue)[0]
    for (_, of_warp), product in zip(divided, products, strict=True):
        sch.compute_at(product, at, preserve_unit_loops=True)
        sch.compute_at(of_warp, at, preserve_unit_loops=True)
    sch.merge(*(sch.get_loops(partial)[5] for partial, _ in divided))


def _add_lanes(sch: Any, of_warp: Any, warp: Any, tiles: SkinnyKernel, own: bool) -> None:
    """Add up the sums of a warp's threads, each result where a tensor core leaves it."""
    sch.reverse_compute_at(of_warp, warp, preserve_unit_loops=True)
    lane, *matrix, i, j = list(sch.get_loops(of_warp))[-4 if own else -3 :]
    # Of more lanes than a fragment has, which exchange their sums, each stores a row.
    pair = _PAIR if tiles.lanes == MMA_LANES else 1
    row_tile, lanes, row = sch.split(i, [None, tiles.lanes, pair])
    group, column = sch.split(j, [tiles.groups, tiles.columns])
    sch.reorder(*matrix, group, lanes, row_tile, row, column, lane)
    sch.bind(sch.fuse(group, lanes), "threadIdx.x")
    sch.set_scope(of_warp, 0, "shared.dyn")
    _mark(sch, of_warp, ROW_TILE, ROW, COLUMN, LANE)


def _load_weights(
    sch: Any, partials: Sequence[Any], weights: Sequence[Any], step: Any, own: bool
) -> None:
    """Load weights of a step, all of them before any is used; matrices may each have their `own`.

    Registers are indexed by the iterators of the product, of which those of threads take no room.
    """

    def place(thread: Any, i: Any, j: Any, step: Any, load: Any, e: Any) -> tuple[Any, ...]:
        return j, step, load, thread, e

    def own_place(
        thread: Any, matrix: Any, _row: Any, j: Any, step: Any, load: Any, e: Any
    ) -> tuple[Any, ...]:
        return matrix, j, step, load, thread, e

    # Each is put in front of those before it: the last one first, so that gate is loaded first.
    for partial, buffer in zip(reversed(partials), reversed(weights), strict=True):
        block = sch.reindex_cache_read(
            partial,
            read_index(sch, partial, buffer),
            "local",
            own_place if own else place,
        )
        sch.compute_at(block, step, preserve_unit_loops=True, index=_FIRST)
        *loops, vector = list(sch.get_loops(block))[_AROUND:]
        sch.vectorize(vector)
        for loop in loops:
            sch.unroll(loop)
        if not own:  # which matrix it is may be what a kernel waits for
            sch.annotate(loops[1], AHEAD, 1)


def _mark(sch: Any, block: Any, *roles: str) -> None:
    """Say what the innermost loops around a block are; the lowering multiplies by tensor cores."""
    loops = list(sch.get_loops(block))
    for loop, role in zip(loops[-len(roles) :], roles, strict=True):
        sch.annotate(loop, WARP_PRODUCT, role)


def _with_epilogue(sch: Any, chain: Chain, grid: Any, tiles: SkinnyKernel) -> Any:
    """Bring what follows the sums of warps into the loop over CTAs; its new variable.

    The epilogue is not computed there by a primitive: sums of rows that it reads are not yet there.
    """
    for product in chain.first:
        sch.reverse_compute_at(product, grid, preserve_unit_loops=True)
    i, j = sch.get_loops(chain.epilogue)
    tile, j = sch.split(j, [None, tiles.width])
    sch.reorder(tile, i, j)
    grid = sch.merge(grid, tile)
    sch.bind(grid, "blockIdx.x")
    return grid


def _store(sch: Any, chain: Chain, grid: Any, tiles: SkinnyKernel) -> None:
    """Let each thread add up the sums of all warps for what it stores, neighbours side by side."""
    *_, i, j = sch.get_loops(chain.epilogue)
    _, y, beside = sch.split(i, [None, tiles.warps, WARP // tiles.width])
    x = sch.fuse(beside, j)
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    for product in chain.first:
        sch.compute_at(product, x, preserve_unit_loops=True)
        sch.set_scope(product, 0, "local")
    for each in chain.row_sums:
        _sum_rows(sch, each, chain.m, grid, x, tiles)


def _sum_rows(sch: Any, row_sum: Any, rows: int, grid: Any, x: Any, tiles: SkinnyKernel) -> None:
    """Sum rows of the input in each CTA, before it multiplies: memory is busy with weights then.

    A row has a warp, or several of fewer rows than warps.
    """
    # No split leaves a rest: `rfactor` forgets its conditions (TVM 0.27).
    i, k = sch.get_loops(row_sum)
    depth = int(sch.get(k).extent)
    apart = int(tiles.warps) // min(1 << (rows - 1).bit_length(), int(tiles.warps))
    parts = gcd(apart, depth // WARP)
    vector = gcd(VECTOR, depth // (WARP * parts))
    together = int(tiles.warps) // parts
    step, part, lane, element = sch.split(k, [None, parts, WARP, vector])
    sch.reorder(part, lane, i, step, element)
    of_lane = sch.rfactor(sch.fuse(part, lane), 0)
    part, _ = sch.split(sch.get_loops(row_sum)[0], [None, WARP])
    of_part = sch.rfactor(part, 0)
    sch.compute_at(row_sum, x, preserve_unit_loops=True)
    sch.set_scope(row_sum, 0, "local")
    sch.compute_at(of_part, grid, preserve_unit_loops=True, index=_FIRST)
    sch.set_scope(of_part, 0, "shared.dyn")
    *_, part, lane, i = sch.get_loops(of_part)
    turn, row = sch.split(i, [None, together])
    sch.reorder(turn, row, part, lane)
    warp = sch.fuse(row, part)
    sch.bind(warp, "threadIdx.y")
    sch.annotate(lane, WARP_PRODUCT, LANE)
    sch.compute_at(of_lane, warp, preserve_unit_loops=True)
    sch.set_scope(of_lane, 0, "warp")
    _, _, _, lane, _, step, element = sch.get_loops(of_lane)
    sch.bind(lane, "threadIdx.x")
    for read in range(len(sch.get(of_lane).reads)):
        loaded = sch.cache_read(of_lane, read, "local", [of_lane])
        sch.compute_at(loaded, step, preserve_unit_loops=True)
        sch.vectorize(sch.get_loops(loaded)[-1])
    sch.unroll(element)
    sch.annotate(element, WARP_PRODUCT, TERM)
    sch.decompose_reduction(of_lane, step)
