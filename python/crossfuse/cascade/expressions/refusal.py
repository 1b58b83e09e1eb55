"""Refusals of expressions."""

from __future__ import annotations

from crossfuse.errors import CascadeRefused, RefusedError, refuse


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of an expression; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-expression", where, found=found, limit=limit, instead=instead
    )
