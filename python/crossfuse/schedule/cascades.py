"""Schedules cascades by family, with tiles as plans name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crossfuse.errors import CascadeRefused, ScheduleRefused, refuse
from crossfuse.planner.families import EAGER, ROWS, STREAM
from crossfuse.planner.families.registry import CASCADE_FAMILIES

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site
    from crossfuse.planner.cascade.rows_space import RowsTiles


def only_site(func: Any) -> Site:
    """The one cascade of a function; several are refused."""
    from crossfuse.cascade.detect import detect

    sites = detect(func)
    if len(sites) == 1:
        return sites[0]
    raise refuse(
        CascadeRefused,
        "compile",
        "function",
        found=f"{len(sites)} cascades over different axes",
        limit="one, which becomes one kernel",
        instead="split the function between them, or run crossfuse.relax.FuseCascades on its model",
    )


def schedule_cascade(
    site: Site,
    derivation: Derivation,
    family: str,
    tiles: Mapping[str, Any],
    *,
    constant_weights: bool = False,
) -> Any:
    """Write a cascade as a stream, and schedule it by one of `CASCADE_FAMILIES`.

    Tiles are fields of `StreamTiles`, `CascadeTiles` or `RowsTiles`, with the class's defaults;
    `constant_weights` is of family ``rows``: no kernel that may still be running writes the
    weights. The trace replays on the stream, not on the function. Refused are other families and
    fields, and a cascade that has no such form.
    """
    from crossfuse.planner.cascade.space import read_tiles

    if family not in CASCADE_FAMILIES:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{family}'",
            found="a plan that leaves the cascade to separate kernels"
            if family == EAGER
            else "a family of chains of products",
            limit=", ".join(CASCADE_FAMILIES),
            instead="plan with only=('stream', 'tiles', 'rows')",
        )
    made: Any = read_tiles(family, tiles)
    if family == STREAM:
        from crossfuse.cascade.rewrite.streaming import streaming
        from crossfuse.schedule.rules.stream import schedule_stream

        return schedule_stream(streaming(site, derivation, made), made)
    if family == ROWS:
        return _rows_first(site, made, constant_weights)
    from crossfuse.schedule.rules.cascade_tiles import schedule_cascade_tiles

    return schedule_cascade_tiles(site, derivation, made)


def schedule_cascade_of(
    func: Any, family: str, tiles: Mapping[str, Any], *, constant_weights: bool = False
) -> Any:
    """Schedule the only cascade of a function; see `schedule_cascade`."""
    from crossfuse.cascade.algebra import derive

    site = only_site(func)
    return schedule_cascade(
        site, derive(site.cascade), family, tiles, constant_weights=constant_weights
    )


def _rows_first(site: Site, tiles: RowsTiles, constant: bool) -> Any:
    """Schedule rows in warps of their product's kernel."""
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.rewrite.rows_first import rows_first
    from crossfuse.schedule.rules.rows_gemm import schedule_rows_gemm
    from crossfuse.schedule.rules.tensor_tiles import TensorTiles

    parts = rows_first(site.function)
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
