"""Refusals of blocks that do not say plainly what they compute."""

from __future__ import annotations

from crossfuse.errors import PlanRefused, RefusedError, refuse

#: What to do with a function that says no more what it computes.
LOWERED = "extract the chain before the function is lowered"


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(PlanRefused, "extract", where, found=found, limit=limit, instead=instead)
