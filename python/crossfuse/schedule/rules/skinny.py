"""Rule for one product of few rows, by plain multiply-adds on weights as they come from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, is_k_major, read_products
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import FAST, RESIDENT_CTAS, SIDE_BY_SIDE
from crossfuse.planner.families.skinny import VECTOR, SkinnyKernel, best_tiles
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.schema import Tile

#: Where a block is put among those of a loop: as far in front as its operands allow.
_FIRST = -2


@checked
@dataclass(frozen=True)
class SkinnyTiles:
    """How products of few rows are divided over threads. Zero in all of them means: choose.

    `lanes` are neighbouring threads that share a column of the output (8, 16 or 32), `columns`
    those that such a group sums at the same time, of gate and up each, `groups` the groups of a
    CTA, and `loads` the loads of 16 bytes of each column that a thread has on their way at the same
    time.
    """

    lanes: Tile = 0
    columns: Tile = 0
    groups: Tile = 0
    loads: Tile = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return all((self.lanes, self.columns, self.groups, self.loads))


@checked
def schedule_skinny(
    func: AnyFunction, *, tiles: SkinnyTiles | None = None, constant_weights: bool = False
) -> Any:
    """Schedule a product of at most eight rows, which is as fast as memory delivers its weights.

    Of gate and up, of which one output is made, a thread sums the same columns at the same time. Of
    several products of one operand, each with a result of its own, such as those that make
    queries, keys and values, each has CTAs of its own in one launch.

    Each thread loads its part of some rows of the weights into registers, and multiplies it by all
    rows of the left operand; a group of threads then adds up its sums by shuffles::

        for tile in blockIdx.x:                              # groups * columns of the output
            for group in threadIdx.y, lane in threadIdx.x:
                for step:
                    weights[columns, loads, 8] = ...         # registers, 16 bytes at a time
                    for load: sums[m, columns] += x[m, 8] * weights[columns, load, 8]
                products[m, columns] = sums of all lanes     # shared memory
            out[m, tile] = epilogue(products)

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
    sch.annotate(root, RESIDENT_CTAS, kernel.least_resident)
    sch.annotate(root, FAST, 1)
    if len(chains) > 1:
        sch.annotate(root, SIDE_BY_SIDE, 1)
    return sch


def _chosen(sch: Any, chains: Sequence[Chain], given: SkinnyTiles) -> SkinnyKernel:
    """Take the tiles that are given, or those with the least estimated time; check them."""
    shapes = [shape_of_blocks(each) for each in chains]
    kernel = (
        SkinnyKernel(given.lanes, given.columns, given.groups, given.loads)
        if given.complete
        else best_tiles(*shapes)
    )
    for chain, shape in zip(chains, shapes, strict=True):
        _check_tiles(sch, chain, shape, kernel)
    assert kernel is not None
    return kernel


def _check_tiles(sch: Any, chain: Chain, shape: Shape, kernel: SkinnyKernel | None) -> None:
    # Windows of images are no rows that vectors are loaded of.
    plain = not sch.get_producers(chain.first[0])
    broken = None if kernel is None else kernel.broken(shape)
    if not broken and not all(is_k_major(sch, each, 0) for each in chain.first):
        broken = "with weights of which one is stored as [k, n]"
    if kernel is None or broken or not plain:
        raise refuse(
            ScheduleRefused,
            "tiles",
            name_of(sch, chain.first[0]),
            found=f"{shape.text}, " + (broken or "no tiles that divide it, or a view of its rows"),
            limit="at most 8 rows, weights stored as [n, k] of 16 bits, and tiles that divide "
            "columns and reduction",
            instead="leave all tiles out, or use schedule_tiled_gemm",
        )


def _bind(sch: Any, chain: Chain, tiles: SkinnyKernel) -> None:
    partials = [_summed_by_lanes(sch, each, tiles) for each in chain.first]
    if len(partials) > 1:
        _side_by_side(sch, chain, partials)
    grid, group, lane, step, load, element, *_ = sch.get_loops(partials[0])
    sch.bind(grid, "blockIdx.x")
    sch.bind(group, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    for partial in partials:
        sch.set_scope(partial, 0, "local")
    for product in chain.first:
        _add_lanes(sch, product, group)
    _load(sch, partials, step, load)
    for partial in partials:
        sch.decompose_reduction(partial, step)
    for loop in (load, element):
        sch.unroll(loop)
    for partial in partials:
        *_, i, column = sch.get_loops(partial)
        sch.unroll(i)
        sch.unroll(column)
    _store(sch, chain, grid, tiles)


def _summed_by_lanes(sch: Any, product: Any, tiles: SkinnyKernel) -> Any:
    """Divide the loops of a product; the block that sums what each thread of a group loads."""
    i, j, k = sch.get_loops(product)
    grid, group, column = sch.split(j, [None, tiles.groups, tiles.columns])
    step, load, lane, element = sch.split(k, [None, tiles.loads, tiles.lanes, VECTOR])
    sch.reorder(grid, group, lane, step, load, element, i, column)
    return sch.rfactor(lane, 0)


def _side_by_side(sch: Any, chain: Chain, partials: Sequence[Any]) -> None:
    """Let each thread sum columns of all products, element by element of the reduction."""
    # The sums of lanes follow both: their nest may not stand between those that are merged.
    at = sch.get_loops(chain.epilogue)[0]
    for product in chain.first:
        sch.compute_at(product, at, preserve_unit_loops=True)
    sch.merge(*(sch.get_loops(each)[5] for each in partials))


def _add_lanes(sch: Any, product: Any, group: Any) -> None:
    """Add up the sums of a group's threads, column by column, behind what makes them."""
    sch.reverse_compute_at(product, group, preserve_unit_loops=True)
    *_, lane, i, column = sch.get_loops(product)
    sch.reorder(i, column, lane)
    sch.bind(lane, "threadIdx.x")
    sch.set_scope(product, 0, "shared.dyn")


def _load(sch: Any, partials: Sequence[Any], step: Any, load: Any) -> None:
    """Load weights of a step, all of them before any is used, and rows of the left operand.

    Registers are indexed by the iterators of the product, of which those of threads take no room.
    """
    every = [
        sch.reindex_cache_read(
            each, 1, "local", lambda lane, i, j, step, load, e: (j, step, load, lane, e)
        )
        for each in partials
    ]
    lefts = [
        sch.reindex_cache_read(
            each, 0, "local", lambda lane, i, j, step, load, e: (i, step, load, lane, e)
        )
        for each in partials
    ]
    # Each is put in front of those before it: the last one first, so that gate is loaded first.
    for block, at in (*((e, step) for e in every[::-1]), *((e, load) for e in lefts[::-1])):
        around = 4 if at is step else 5
        sch.compute_at(block, at, preserve_unit_loops=True, index=_FIRST)
        *rows, vector = list(sch.get_loops(block))[around:]
        sch.vectorize(vector)
        for loop in rows:
            sch.unroll(loop)


def _store(sch: Any, chain: Chain, grid: Any, tiles: SkinnyKernel) -> None:
    """Let neighbouring threads store neighbouring columns, of one row after the other."""
    sch.reverse_compute_at(chain.epilogue, grid, preserve_unit_loops=True)
    *_, columns = sch.get_loops(chain.epilogue)
    _, y, x = sch.split(columns, [None, tiles.groups, tiles.lanes])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
