"""Rule for a product whose left operand a cascade makes: one kernel of two phases."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_last_product
from crossfuse.calls import Whole, checked
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.rewrite.row_chunks import RowChunks, chunked_rows, row_chunks
from crossfuse.cascade.rewrite.rows_first import RowsFirst, joined, rows_first
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.rewrite.work import work_of
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import WARP, WARPGROUP, Device, device
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.rows import RowsTiles
from crossfuse.planner.families.tiled import GemmKernel
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, shape_of_blocks
from crossfuse.schedule.rules.stream import bind_stream
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import bind_product

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site

#: Registers of a thread for loads in flight: of elements for the state, and of those for outputs.
#: More spill beside those of `crossfuse.lower.hopper.plan.kernel`.
_AHEAD, _WANTED = 32, 64
#: Most vectors that a thread holds in registers.
_WHOLE = 4
#: Registers for the elements that outputs need, of a row that a warpgroup holds as a whole:
#: unpacked they take twice as many, of the 168 of a launch.
_AT_ONCE = 64


@checked
def schedule_rows_gemm(
    parts: RowsFirst,
    site: Site,
    derivation: Derivation,
    *,
    tiles: TensorTiles | None = None,
    stream: StreamTiles | None = None,
    chunk: Whole = 0,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a norm, or another cascade of rows, and the product of what it makes.

    The left operand goes through global memory, where the second phase finds it in L2::

        for row in blockIdx.x:
            for thread in threadIdx.x:                       # a warp, or a warpgroup
                segment, merge: the state of the row
            for thread in threadIdx.x:
                left[row] = elements of the row              # crossfuse.grid_stage
        for t in blockIdx.x:                                 # as `schedule_tiled_gemm`
            ...

    Parameters
    ----------
    parts : RowsFirst
        The function.
    site : Site
        The cascade of `parts.rows`.
    derivation : Derivation
        How it streams.
    tiles : TensorTiles | None
        Tile extents of the product; what is left out is chosen.
    stream : StreamTiles | None
        Sizes of the stream, of 32 or 128 threads; None takes those of `row_tiles`.
    chunk : int
        Elements of a chunk of a row, which the product takes in as they come; 0 makes whole rows.
        `stream` and `constant_weights` are for these.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.
    target : str | Device | None
        What the sizes are for.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace, which replays on `joined` of `parts` and the stream.

    Raises
    ------
    CascadeRefused, ScheduleRefused
        If the cascade does not stream, or the function is no single product behind it.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.cascade.rewrite.rows_first import rows_first
    >>> from crossfuse.workload import cascade_build, cascades
    >>> spec = cascades.parse("rmsnorm_gemm:tokens=64,K=64,N=64")
    >>> parts = rows_first(cascade_build.prim_func(spec))
    >>> (site,) = detect(parts.rows)
    >>> sch = schedule_rows_gemm(parts, site, derive(site.cascade))
    >>> [str(each.name) for each in sch.mod["main"].params]
    ['x', 'gamma', 'weight', 'out']
    """
    if chunk:
        return _by_chunks(parts, row_chunks(parts, site, derivation, chunk), tiles)
    sizes = stream or row_tiles(site, derivation, _warpgroups(parts.product, tiles, target))
    sch = ir.Schedule(joined(parts, streaming(site, derivation, sizes)))
    bind_stream(sch, sizes)
    bind_product(sch, read_last_product(sch), tiles, constant_weights)
    sch.grid_stage(sch.get_sblock("outputs"))
    return sch


def rows_before_product(func: Any, tiles: RowsTiles, constant: bool) -> Any:
    """Schedule a function as rows, and the product that reads them, in tiles of a plan."""
    from crossfuse.schedule.planned import only_site

    parts = rows_first(func)
    if parts is None:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{ROWS}'",
            found="a function whose last product reads no rows that a cascade makes",
            limit="a norm or a quantiser of rows, and a product of them and weights",
            instead="plan this function, which leaves the family out",
        )
    rows = only_site(parts.rows)
    return schedule_rows_gemm(
        parts,
        rows,
        derive(rows.cascade),
        tiles=TensorTiles(**tiles.product),
        chunk=tiles.chunk,
        constant_weights=constant,
    )


def _by_chunks(parts: RowsFirst, chunks: RowChunks, tiles: TensorTiles | None) -> Any:
    """Schedule rows that are made chunk by chunk."""
    sch = ir.Schedule(joined(*chunked_rows(parts, chunks)))
    rows = sch.get_sblock("rows")
    sch.bind(sch.get_loops(rows)[0], "blockIdx.x")
    bind_product(sch, read_last_product(sch), tiles, False)
    sch.grid_stage(rows)
    return sch


def _warpgroups(product: Any, tiles: TensorTiles | None, target: str | Device | None) -> int:
    """Multiplying warpgroups of all CTAs of a product that run at the same time."""
    sch = ir.Schedule(product)
    chain = read_last_product(sch)
    chosen = (tiles or TensorTiles()).complete(chain)
    kernel = GemmKernel.read(asdict(chosen))
    return multiplying_warpgroups(kernel, shape_of_blocks(chain), device(target))


def multiplying_warpgroups(kernel: TileKernel, shape: Shape, on: Device) -> int:
    """Multiplying warpgroups of all CTAs of a kernel of one launch, by its first phase."""
    phase, *_ = kernel.phases(shape)
    (clusters,) = kernel.clusters(shape, on)
    return int(clusters * kernel.cluster * phase.warpgroups)


def row_tiles(site: Site, derivation: Derivation, warpgroups: int = 0) -> StreamTiles:
    """Sizes of a stream whose rows have a warp each, or a warpgroup.

    If there are as many multiplying `warpgroups` as rows, each makes one row, as a whole in its
    registers, while it would wait for the first left tile. Of a warp, outputs load their elements
    again, from the SM's cache: nvcc would hold those that stay in registers in float32, which takes
    twice as many.
    """
    work = work_of(site, derivation)
    at_once = -(-work.length // (WARPGROUP * work.vector))
    if work.rows <= warpgroups and at_once * max(1, work.emitted) <= _AT_ONCE:
        return StreamTiles(threads=WARPGROUP, unroll=at_once, resident="registers")
    vectors = -(-work.length // (WARP * work.vector))
    # A row of one step stays in registers, too: nvcc sees that it is loaded twice.
    steps = vectors if vectors <= _WHOLE else vectors - 1
    most = min(_AHEAD // max(1, work.swept), _WANTED // max(1, work.emitted), steps)
    unroll = 1 << max(0, most.bit_length() - 1)
    # A rest has conditions, and registers for them.
    rest = work.length % (unroll * WARP * work.vector)
    return StreamTiles(threads=WARP, unroll=max(1, unroll // 2) if rest else unroll)


def planned(site: Site, _: Derivation, tiles: RowsTiles, constant: bool) -> Any:
    """Take the function of a cascade apart; see `rows_before_product`."""
    return rows_before_product(site.function, tiles, constant)
