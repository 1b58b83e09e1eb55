"""Rule for attention and the product of what it makes: one kernel of two phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_last_product
from crossfuse.calls import checked
from crossfuse.cascade.rewrite.rows_first import RowsFirst, attended
from crossfuse.cascade.rewrite.tiled.tiled import tiled
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.errors import Rule, ScheduleRefused, refuse
from crossfuse.planner.families import ATTENTION_OUT
from crossfuse.planner.families.attention_out import AttentionOutTiles
from crossfuse.schedule.rules.cascade_tiles import bind_tiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import bind_product

if TYPE_CHECKING:
    from crossfuse.cascade.spec import Derivation, Site

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
    _check(parts.rows.params[-1], sizes)
    sch = ir.Schedule(attended(parts, tiled(site, derivation, sizes)))
    bind_tiles(sch, sizes)
    bind_product(sch, read_last_product(sch), tiles, constant_weights)
    merged = "merged_" if sizes.cluster > 1 else ""
    sch.grid_stage(sch.get_sblock(f"{merged}{parts.rows.params[-1].name}_store"))
    return sch


#: Columns that a CTA merges are a multiple of this.
_SLICE = 8


def _check(made: Any, tiles: CascadeTiles) -> None:
    """Refuse tiles of several sequences' rows, and slices that are not those of a head."""
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


def planned(site: Site, derivation: Derivation, tiles: AttentionOutTiles, constant: bool) -> Any:
    """Schedule attention that a product follows, in tiles of a plan."""
    if site.after is None:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{ATTENTION_OUT}'",
            found="a cascade that no product follows",
            limit="attention, and the product of all heads of a token and weights",
            instead="plan this function, which leaves the family out",
        )
    return schedule_attention_out(
        site.after,
        site,
        derivation,
        stream=tiles.stream,
        tiles=TensorTiles(**tiles.product),
        constant_weights=constant,
    )
