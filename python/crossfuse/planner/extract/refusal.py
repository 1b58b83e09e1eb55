"""Refusals of functions that are no chain."""

from __future__ import annotations

from crossfuse.errors import PlanRefused, RefusedError, refuse

#: What to do with a function that has more, or something else, in it.
OUTLINE = "outline such a chain first (crossfuse.relax.outline), or leave the function unfused"
#: What to do with a function that says no more what it computes.
LOWERED = "extract the chain before the function is lowered"


def refused(where: str, found: object, limit: str, instead: str = OUTLINE) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(PlanRefused, "extract", where, found=found, limit=limit, instead=instead)
