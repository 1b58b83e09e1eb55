"""Refusals of the tile form."""

from __future__ import annotations

from crossfuse.errors import CascadeRefused, RefusedError, refuse


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a tile form; see `crossfuse.errors.Refusal`."""
    return refuse(CascadeRefused, "cascade-tiles", where, found=found, limit=limit, instead=instead)
