"""Refusals of functions that are no chain."""

from __future__ import annotations

from crossfuse.blocks import refusal
from crossfuse.errors import RefusedError

#: What to do with a function that has more, or something else, in it.
OUTLINE = "outline such a chain first (crossfuse.relax.outline), or leave the function unfused"


def refused(where: str, found: object, limit: str, instead: str = OUTLINE) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refusal.refused(where, found, limit, instead)
