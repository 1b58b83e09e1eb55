"""Refusals of the rewriting."""

from __future__ import annotations

from crossfuse.errors import CascadeRefused, RefusedError, refuse


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a rewriting; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-stream", where, found=found, limit=limit, instead=instead
    )
