"""Rule for a chain of two products whose left operand a cascade makes: one persistent kernel."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, read_two_products
from crossfuse.calls import checked
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.rows_first import RowsFirst, joined, rows_before_chain
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device, device
from crossfuse.planner.families import ROWS_CHAIN
from crossfuse.planner.families.rows_chain import RowsChainTiles
from crossfuse.planner.families.tiled import StagedKernel
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.schedule.rules.rows_gemm import multiplying_warpgroups, row_tiles
from crossfuse.schedule.rules.stream import bind_stream
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import bind_two_products

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site


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
        `crossfuse.schedule.rules.rows_gemm.row_tiles`.
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
    on = device(target)
    chosen = _complete(parts, first or TensorTiles(), second or TensorTiles(), on)
    sizes = stream or row_tiles(site, derivation, _warpgroups(parts, *chosen, on))
    sch = ir.Schedule(joined(parts, streaming(site, derivation, sizes)))
    bind_stream(sch, sizes)
    chain = _chain_in(sch, parts)
    bind_two_products(sch, chain, *chosen, True, constant_weights, on)
    sch.grid_stage(sch.get_sblock("outputs"))
    return sch


def planned(site: Site, _: Derivation, tiles: RowsChainTiles, constant: bool) -> Any:
    """Schedule a function as rows, and the products behind them, in tiles of a plan."""
    parts = rows_before_chain(site.function)
    if parts is None:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{ROWS_CHAIN}'",
            found="a function without two products of weights behind rows that a cascade makes",
            limit="a norm or a quantiser of rows, and a chain of two products behind it",
            instead="plan this function, which leaves the family out",
        )
    (rows,) = detect(parts.rows)
    first, second = (TensorTiles(**tiles.phases[each]) for each in ("first", "second"))
    derivation = derive(rows.cascade)
    return schedule_rows_chain(
        parts, rows, derivation, first=first, second=second, constant_weights=constant
    )


def _chain_in(sch: Any, parts: RowsFirst) -> Chain:
    """The chain of a joined function: its blocks, by the names that they have in the products'."""
    own = ir.Schedule(parts.product)
    chain = read_two_products(own, "rows_chain")

    def here(block: Any) -> Any:
        return sch.get_sblock(str(own.get(block).name_hint))

    layers = (
        replace(each, products=tuple(map(here, each.products)), epilogue=here(each.epilogue))
        for each in chain.layers
    )
    return replace(chain, layers=tuple(layers))


def _complete(
    parts: RowsFirst, first: TensorTiles, second: TensorTiles, on: Device
) -> tuple[TensorTiles, TensorTiles]:
    """Tiles of both phases with what was left out."""
    own = ir.Schedule(parts.product)
    chain = read_two_products(own, "rows_chain")
    tiles = first.of_first(own, chain, on, staged=True)
    return tiles, second.of_second(own, chain, tiles, on)


def _warpgroups(parts: RowsFirst, first: TensorTiles, second: TensorTiles, on: Device) -> int:
    """Multiplying warpgroups of all CTAs of the kernel."""
    shape = shape_of_blocks(read_two_products(ir.Schedule(parts.product), "rows_chain"))
    tiles = {"first": asdict(first), "second": asdict(second)}
    return multiplying_warpgroups(StagedKernel.read(tiles), shape, on)
