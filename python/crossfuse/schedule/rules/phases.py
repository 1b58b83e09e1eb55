"""Rule for three layers of products or more on tensor cores, in one kernel or one each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import Chain, Layer, read_layers
from crossfuse.blocks.scheduled import name_of
from crossfuse.calls import AnyFunction, checked
from crossfuse.errors import Rule, ScheduleRefused
from crossfuse.hardware import Device, device
from crossfuse.planner.cost.estimate import fill_tiles
from crossfuse.planner.families.phases import (
    ALONG,
    COLUMNS,
    LAUNCHES,
    PHASES,
    REDUCTION,
    ROWS_OF,
)
from crossfuse.planner.kernels.shape import shape_of_blocks
from crossfuse.schedule.rules.pipelined import bind_split, grouped, place_products
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schema import Damaged, Tile, typed

_refused = Rule(ScheduleRefused, "tiles")


@dataclass(frozen=True)
class PhaseTiles:
    """How the layer of one phase is divided."""

    #: Of a CTA's tile, a multiple of 8.
    columns: Tile
    #: What the CTAs of a cluster divide: ``"columns"``, and share the rows of the left operand;
    #: ``"rows"``, and share the weights; or ``"reduction"``, of which each sums a part.
    along: str = COLUMNS

    def __post_init__(self) -> None:
        if self.along not in ALONG:
            raise Damaged(repr(self.along), ", ".join(ALONG))


@checked
@dataclass(frozen=True)
class ChainTiles:
    """How a chain of layers is divided. Zero, and no phases, mean: choose."""

    #: Of a CTA's tile in all phases: 64, 128, 192 or 256.
    rows: Tile = 0
    #: CTAs of a cluster in all phases.
    cluster: Tile = 0
    #: One for each layer, or none.
    phases: tuple[PhaseTiles, ...] = ()


@checked
def schedule_phases(
    func: AnyFunction,
    *,
    tiles: ChainTiles | None = None,
    staged: bool = True,
    constant_weights: bool = False,
    target: str | Device | None = None,
) -> Any:
    """Schedule a chain of layers for the Hopper pipeline, a phase for each.

    Every intermediate goes through global memory, where the next phase finds it in L2::

        for t in blockIdx.x:                                 # a tile of the first intermediate
            for c in cluster x:                              # columns, rows, or parts of K
                for k0 in range(K / 64):                     # crossfuse.stages
                    gemm0[tile] += A B
                hidden0[tile] = relu(gemm0)                  # crossfuse.grid_stage
        for t in blockIdx.x:                                 # a tile of the next one
            ...
        for t in blockIdx.x:                                 # a tile of the output
            ...

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Layers of products, each with one elementwise block that the products of the next one read.
        All but the last may be gated.
    tiles : ChainTiles | None
        Tile extents; what is left out is chosen.
    staged : bool
        Whether all phases are one persistent kernel, see `grid_stage`; else each is a kernel, which
        loads its first weights before the one before it is over.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights.
    target : str | Device | None
        Device that tiles are chosen for.

    Returns
    -------
    tvm.s_tir.Schedule
        The schedule, with its trace.

    Raises
    ------
    ScheduleRefused
        If the function is no chain of layers, or the tiles are not those of a chain of as many.

    Examples
    --------
    >>> from crossfuse.workload import parse, prim_func
    >>> func = prim_func(parse("gemm_chain:M=128,K=256,N=512,L=256,weights=nk"))
    >>> tiles = ChainTiles(64, 2, (PhaseTiles(64), PhaseTiles(64, "rows")))
    >>> "crossfuse.grid_stage" in schedule_phases(func, tiles=tiles).mod.script()
    True
    """
    sch = ir.Schedule(func)
    chain = read_layers(sch)
    chosen = _completed(sch, chain, tiles or ChainTiles(), device(target), staged)
    for layer, phase in zip(chain.layers, chosen.phases, strict=True):
        if phase.along == REDUCTION:
            _split(sch, layer, chosen, phase, constant_weights)
        else:
            divide(sch, layer, chosen, phase, constant_weights)
    if staged:
        for layer in chain.layers[:-1]:
            sch.grid_stage(layer.epilogue)
    return sch


def _completed(
    sch: Any, chain: Chain, tiles: ChainTiles, target: Device, staged: bool
) -> ChainTiles:
    """Choose what the caller left open by estimated times."""
    layers = len(chain.layers)
    if tiles.rows and tiles.cluster and len(tiles.phases) == layers:
        return tiles
    family, shape = PHASES if staged else LAUNCHES, shape_of_blocks(chain)
    given = {"rows": tiles.rows, "size": tiles.cluster}
    tried = family.tried(shape, target, {name: each for name, each in given.items() if each})
    found = fill_tiles(tried, shape, target, lambda each: each.fits(shape, target))
    if found is None or tiles.phases:
        raise _refused(
            name_of(sch, chain.layers[0].products[0]),
            found=f"{tiles} for {layers} layers",
            limit="rows, a cluster and a phase for each layer; without phases, rows and clusters "
            f"that fit {target.name}",
            instead="leave them out, or name all",
        )
    return typed(ChainTiles, found.tiles())


def _split(sch: Any, layer: Layer, tiles: ChainTiles, phase: PhaseTiles, constant: bool) -> None:
    """Let each CTA of a cluster sum a part of a layer's reduction."""
    product, *others = layer.products
    if others:
        raise _refused(
            name_of(sch, product),
            found=f"reductions of {len(layer.products)} products split over {tiles.cluster} CTAs",
            limit="one product, of which they exchange the sums",
            instead="let the phase's clusters lie along its columns or rows",
        )
    split = TensorTiles(tiles.rows, phase.columns, cluster=1, split=tiles.cluster, across=1)
    bind_split(sch, product, layer.epilogue, split, constant)


def divide(sch: Any, layer: Layer, tiles: ChainTiles, phase: PhaseTiles, constant: bool) -> None:
    """Let each CTA of a cluster make a tile of its own, beside or below the others'.

    Tiles are those of what is made of the products, which move: TVM moves no block that reads what
    an earlier nest stores.
    """
    i, j = sch.get_loops(layer.epilogue)
    down, beside = (tiles.cluster, 1) if phase.along == ROWS_OF else (1, tiles.cluster)
    row_tile, below, row = sch.split(i, [None, down, tiles.rows])
    column_tile, side, column = sch.split(j, [None, beside, phase.columns])
    rank, single = (below, side) if phase.along == ROWS_OF else (side, below)
    outer, inner = grouped(sch, row_tile)
    sch.reorder(outer, column_tile, inner, single, rank, row, column)
    sch.bind(sch.fuse(outer, column_tile, inner), "blockIdx.x")
    sch.cluster_bind(single, "y")
    sch.cluster_bind(rank)
    place_products(sch, layer.products, rank, 0, constant)
