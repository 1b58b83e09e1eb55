"""Schedules cascades by family, with tiles as plans name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crossfuse.errors import CascadeRefused, ScheduleRefused, refuse
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import CASCADE_FAMILIES

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site


def only_site(func: Any) -> Site:
    """The one cascade of a function; several are refused.

    Of rows in front of a chain it is that of the rows, of attention and a product that of
    attention.
    """
    from crossfuse.cascade.rewrite.rows_first import sites_of

    sites = sites_of(func)
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

    Tiles are fields of the family's `kind`, with the class's defaults; `constant_weights` is of
    families ``rows`` and ``rows_chain``: no kernel that may still be running writes the weights.
    The trace replays on the stream, not on the function. Refused are other families and fields, and
    a cascade that has no such form.
    """
    if family not in CASCADE_FAMILIES:
        raise refuse(
            ScheduleRefused,
            "plan",
            f"family '{family}'",
            found="a plan that leaves the cascade to separate kernels"
            if family == EAGER
            else "a family of chains of products",
            limit=", ".join(CASCADE_FAMILIES),
            instead=f"plan with only={tuple(CASCADE_FAMILIES)}",
        )
    of = CASCADE_FAMILIES[family]
    return of.schedule(site, derivation, of.read(tiles), constant=constant_weights)


def schedule_cascade_of(
    func: Any, family: str, tiles: Mapping[str, Any], *, constant_weights: bool = False
) -> Any:
    """Schedule the only cascade of a function; see `schedule_cascade`."""
    from crossfuse.cascade.algebra import derive

    site = only_site(func)
    return schedule_cascade(
        site, derive(site.cascade), family, tiles, constant_weights=constant_weights
    )
