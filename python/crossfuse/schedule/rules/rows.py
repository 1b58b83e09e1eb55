"""Rules for products whose left operand is made in the same kernel: by rows, or by attention."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_last_product, read_two_products
from crossfuse.calls import Whole, checked
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.row_chunks import RowChunks, chunked_rows, row_chunks
from crossfuse.cascade.rewrite.rows_first import (
    RowsFirst,
    attended,
    joined,
    rows_before_chain,
    rows_first,
)
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.cascade.rewrite.work import work_of
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.hardware import WARP, WARPGROUP, Device, device
from crossfuse.planner.families import ATTENTION_OUT, ROWS, ROWS_CHAIN
from crossfuse.planner.families.attention_out import AttentionOutTiles
from crossfuse.planner.families.rows import RowsTiles, rules_beside_rows
from crossfuse.planner.families.rows_chain import RowsChainTiles, rules_beside_chain
from crossfuse.planner.families.tiled import GemmKernel, StagedKernel
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, all_kept, shape_of_blocks
from crossfuse.schedule.rules.stream import bind_stream, bind_tiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles, complete_pair
from crossfuse.schedule.rules.tiled_ffn import bind_two_products
from crossfuse.schedule.rules.tiled_gemm import bind_product

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site

_other_function = Rule(
    ScheduleRefused, "plan", instead="plan this function, which leaves the family out"
)

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
    chosen, warpgroups = _product_tiles(parts, tiles, device(target))
    sizes = stream or row_tiles(site, derivation, warpgroups)
    sch = ir.Schedule(joined(parts, streaming(site, derivation, sizes)))
    bind_stream(sch, sizes)
    bind_product(sch, read_last_product(sch), chosen, constant_weights)
    sch.grid_stage(sch.get_sblock("outputs"))
    return sch


def rows_before_product(func: Any, tiles: RowsTiles, constant: bool) -> Any:
    """Schedule a function as rows, and the product that reads them, in tiles of a plan."""
    from crossfuse.schedule.planned import only_site

    parts = rows_first(func)
    if parts is None:
        raise _other_function(
            f"family '{ROWS}'",
            found="a function whose last product reads no rows that a cascade makes",
            limit="a norm or a quantiser of rows, and a product of them and weights",
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


def _product_tiles(
    parts: RowsFirst, tiles: TensorTiles | None, on: Device
) -> tuple[TensorTiles, int]:
    """Tiles of a product, and multiplying warpgroups of all CTAs that run at the same time."""
    sch = ir.Schedule(parts.product)
    chain = read_last_product(sch)
    shape = shape_of_blocks(chain)
    chosen = (tiles or TensorTiles()).complete(
        *(sch, chain, on), lambda each: all_kept(rules_beside_rows(each, shape, on))
    )
    return chosen, multiplying_warpgroups(GemmKernel.read(asdict(chosen)), shape, on)


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


def planned_rows_gemm(site: Site, _: Derivation, tiles: RowsTiles, constant: bool) -> Any:
    """Take the function of a cascade apart; see `rows_before_product`."""
    return rows_before_product(site.function, tiles, constant)


# Rule for a chain of two products whose left operand a cascade makes: one persistent kernel.


@checked
def schedule_rows_chain(
    parts: RowsFirst,
    site: Site,
    derivation: Derivation,
    *,
    first: TensorTiles | None = None,
    second: TensorTiles | None = None,
    stream: StreamTiles | None = None,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a norm, or another cascade of rows, and a chain of two products of what it makes.

    Rows and the intermediate go through global memory, where the next phase finds them in L2::

        for row in blockIdx.x:                               # as `schedule_rows_gemm`
            for thread in threadIdx.x:
                left[row] = elements of the row              # crossfuse.grid_stage
        for t in blockIdx.x:                                 # as `schedule_tiled_ffn`
            hidden[tile] = silu(left B_gate) * (left B_up)   # crossfuse.grid_stage
        for t in blockIdx.x:
            out[tile] = hidden D + x[tile]

    Parameters
    ----------
    parts : RowsFirst
        The function, from `crossfuse.cascade.rewrite.rows_first.rows_before_chain`.
    site : Site
        The cascade of `parts.rows`.
    derivation : Derivation
        How it streams.
    first, second : TensorTiles | None
        Tile extents of either phase; what is left out is chosen.
    stream : StreamTiles | None
        Sizes of the stream, of 32 or 128 threads; None takes those of
        `crossfuse.schedule.rules.rows.row_tiles`.
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
        If the cascade does not stream, or what is behind it is no chain of two products.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.cascade.rewrite.rows_first import rows_before_chain
    >>> from crossfuse.workload import cascade_build, cascades
    >>> spec = cascades.parse("rmsnorm_ffn:tokens=64,K=64,N=128")
    >>> parts = rows_before_chain(cascade_build.prim_func(spec))
    >>> (site,) = detect(parts.rows)
    >>> sch = schedule_rows_chain(parts, site, derive(site.cascade))
    >>> [str(each.name) for each in sch.mod["main"].params]
    ['x', 'gamma', 'gate', 'up', 'down', 'out']
    """
    on, own = device(target), ir.Schedule(parts.product)
    chain = read_two_products(own, "rows_chain")
    shape, open_tiles = shape_of_blocks(chain), TensorTiles()
    chosen = complete_pair(
        *(own, chain, first or open_tiles, second or open_tiles, on),
        allowed=lambda each: all_kept(rules_beside_chain(each, shape, on)),
    )
    kernel = StagedKernel.read(dict(zip(("first", "second"), map(asdict, chosen), strict=True)))
    warpgroups = multiplying_warpgroups(kernel, shape, on)
    sizes = stream or row_tiles(site, derivation, warpgroups)
    sch = ir.Schedule(joined(parts, streaming(site, derivation, sizes)))
    bind_stream(sch, sizes)
    bind_two_products(sch, _chain_in(sch, own, chain), *chosen, True, constant_weights)
    sch.grid_stage(sch.get_sblock("outputs"))
    return sch


def planned_rows_chain(site: Site, _: Derivation, tiles: RowsChainTiles, constant: bool) -> Any:
    """Schedule a function as rows, and the products behind them, in tiles of a plan."""
    parts = rows_before_chain(site.function)
    if parts is None:
        raise _other_function(
            f"family '{ROWS_CHAIN}'",
            found="a function without two products of weights behind rows that a cascade makes",
            limit="a norm or a quantiser of rows, and a chain of two products behind it",
        )
    (rows,) = detect(parts.rows)
    first, second = (TensorTiles(**tiles.phases[each]) for each in ("first", "second"))
    derivation = derive(rows.cascade)
    return schedule_rows_chain(
        parts, rows, derivation, first=first, second=second, constant_weights=constant
    )


def _chain_in(sch: Any, own: Any, chain: Chain) -> Chain:
    """The chain of a joined function: its blocks, by the names that they have in the product."""

    def here(block: Any) -> Any:
        return sch.get_sblock(str(own.get(block).name_hint))

    layers = (
        replace(each, products=tuple(map(here, each.products)), epilogue=here(each.epilogue))
        for each in chain.layers
    )
    return replace(chain, layers=tuple(layers))


# Rule for attention and the product of what it makes: one kernel of two phases.


_refused = Rule(ScheduleRefused, "tiles")


@checked
def schedule_attention_out(
    parts: RowsFirst,
    site: Site,
    derivation: Derivation,
    *,
    stream: CascadeTiles | None = None,
    tiles: TensorTiles | None = None,
    constant_weights: bool = False,
) -> Any:
    """Schedule attention, and the product that reads all heads of a token.

    The left operand goes through global memory, where the second phase finds it in L2::

        for bh in blockIdx.y:
            for q in blockIdx.x:
                block tile:                                  # as `schedule_cascade_tiles`
                    for t in range(tiles that are needed):   # crossfuse.stream
                    context[tile] = ...                      # crossfuse.grid_stage
        for t in blockIdx.x:                                 # as `schedule_tiled_gemm`
            ...

    Parameters
    ----------
    parts : RowsFirst
        The function, see `crossfuse.cascade.rewrite.rows_first.attention_first`.
    site : Site
        The cascade of `parts.rows`.
    derivation : Derivation
        How it streams.
    stream : CascadeTiles | None
        Sizes of the stream, with as many rows as the product's tiles; None chooses them.
    tiles : TensorTiles | None
        Tile extents of the product; what is left out is chosen.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace, which replays on
        `crossfuse.cascade.rewrite.rows_first.attended` of `parts` and the stream.

    Raises
    ------
    CascadeRefused, ScheduleRefused
        If the cascade has no tile form, or the function is no single product behind it.

    Examples
    --------
    >>> from crossfuse.cascade.algebra import derive
    >>> from crossfuse.cascade.detect import detect
    >>> from crossfuse.cascade.rewrite.rows_first import attention_first
    >>> from crossfuse.workload import cascade_build, cascades
    >>> text = "attention_out:batch=1,heads=2,q_len=64,kv_len=128,head_dim=64,hidden=64"
    >>> parts = attention_first(cascade_build.prim_func(cascades.parse(text)))
    >>> (site,) = detect(parts.rows)
    >>> sch = schedule_attention_out(parts, site, derive(site.cascade))
    >>> [str(each.name) for each in sch.mod["main"].params]
    ['q', 'k', 'v', 'weight', 'residual', 'out']
    """
    sizes = stream or CascadeTiles()
    rows = _check(parts.rows.params[-1], sizes)
    given = tiles or TensorTiles(rows=rows, cluster=1, split=sizes.cluster)
    sch = ir.Schedule(attended(parts, tiled(site, derivation, sizes)))
    bind_tiles(sch, sizes)
    bind_product(sch, read_last_product(sch), given, constant_weights)
    merged = "merged_" if sizes.cluster > 1 else ""
    sch.grid_stage(sch.get_sblock(f"{merged}{parts.rows.params[-1].name}_store"))
    return sch


#: Columns that a CTA merges are a multiple of this.
_SLICE = 8


def _check(made: Any, tiles: CascadeTiles) -> int:
    """Rows of a tile; refuses those of several sequences, and slices that are none of a head."""
    sequences, _, queries, columns = (int(each) for each in made.ty.shape)
    rows = tiles.complete(queries, 0, columns, columns).rows
    if sequences > 1 and queries % rows:
        raise _refused(
            f"tensor '{made.name}'",
            found=f"{sequences} sequences of {queries} queries, in tiles of {rows} rows",
            limit="a multiple of the tile's rows: rows of one sequence lie below those of another",
            instead="take other rows a tile, or schedule attention and its product apart",
        )
    if tiles.cluster > 1 and columns % (_SLICE * tiles.cluster):
        raise _refused(
            f"tensor '{made.name}'",
            found=f"{columns} columns of a head, of which {tiles.cluster} CTAs merge a slice each",
            limit=f"slices of a multiple of {_SLICE} columns that make up a head",
            instead="take another number of CTAs a tile (CascadeTiles.cluster)",
        )
    return rows


def planned_attention_out(
    site: Site, derivation: Derivation, tiles: AttentionOutTiles, constant: bool
) -> Any:
    """Schedule attention that a product follows, in tiles of a plan."""
    if site.after is None:
        raise _other_function(
            f"family '{ATTENTION_OUT}'",
            found="a cascade that no product follows",
            limit="attention, and the product of all heads of a token and weights",
        )
    return schedule_attention_out(
        site.after,
        site,
        derivation,
        stream=tiles.stream,
        tiles=TensorTiles(**tiles.product),
        constant_weights=constant,
    )
