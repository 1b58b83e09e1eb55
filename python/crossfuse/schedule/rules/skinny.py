"""Rule for one product of few rows, by plain multiply-adds on weights as they come from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_products
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import FAST, RESIDENT_CTAS, SIDE_BY_SIDE
from crossfuse.planner.families.skinny import VECTOR, SkinnyKernel, best_tiles
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.schedule.install import install
from crossfuse.schema import Tile


@checked
@dataclass(frozen=True)
class SkinnyTiles:
    """How a product of few rows is divided over threads. Zero in all of them means: choose.

    `lanes` are neighbouring threads that share a column of the output (8, 16 or 32), `columns`
    those that such a group sums at the same time, `groups` the groups of a CTA, and `loads` the
    loads of 16 bytes of each column that a thread has on their way at the same time.
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

    Of several products of one operand, each with a result of its own, such as those that make
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
        A canonical product, see `crossfuse.workload.prim_func`, or several of one operand, see
        `crossfuse.workload.build.emit_products`; of weights stored as [n, k].
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
        If the function is neither, or the tiles do not divide a product.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> sch = schedule_skinny(prim_func(parse("gemm:M=1,K=512,N=256,weights=nk")))
    >>> "threadIdx.y" in sch.mod.script()
    True
    """
    install()
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
    (product,) = chain.first
    i, j, k = sch.get_loops(product)
    grid, group, column = sch.split(j, [None, tiles.groups, tiles.columns])
    step, load, lane, element = sch.split(k, [None, tiles.loads, tiles.lanes, VECTOR])
    sch.reorder(grid, group, lane, step, load, element, i, column)
    sch.bind(grid, "blockIdx.x")
    partial = sch.rfactor(lane, 0)
    grid, group, lane, step, load, element, i, column = sch.get_loops(partial)
    sch.bind(group, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.set_scope(partial, 0, "local")
    _add_lanes(sch, product, group)
    _load(sch, partial, step, load)
    sch.decompose_reduction(partial, step)
    for loop in (load, element, i, column):
        sch.unroll(loop)
    _store(sch, chain, grid, tiles)


def _add_lanes(sch: Any, product: Any, group: Any) -> None:
    """Add up the sums of a group's threads, column by column, behind what makes them."""
    sch.reverse_compute_at(product, group, preserve_unit_loops=True)
    *_, lane, i, column = sch.get_loops(product)
    sch.reorder(i, column, lane)
    sch.bind(lane, "threadIdx.x")
    sch.set_scope(product, 0, "shared.dyn")


def _load(sch: Any, partial: Any, step: Any, load: Any) -> None:
    """Load weights of a step, all of them before any is used, and rows of the left operand.

    Registers are indexed by the iterators of the product, of which those of threads take no room.
    """
    weights = sch.reindex_cache_read(
        partial, 1, "local", lambda lane, i, j, step, load, e: (j, step, load, lane, e)
    )
    left = sch.reindex_cache_read(
        partial, 0, "local", lambda lane, i, j, step, load, e: (i, step, load, lane, e)
    )
    for block, at in ((weights, step), (left, load)):
        around = len(sch.get_loops(partial)) - (4 if block is weights else 3)
        sch.compute_at(block, at, preserve_unit_loops=True)
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
