"""Refusals of chains that cannot be."""

from __future__ import annotations

from crossfuse.errors import PlanRefused, RefusedError, refuse


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a chain; see `crossfuse.errors.Refusal`."""
    return refuse(PlanRefused, "chain", where, found=found, limit=limit, instead=instead)
