"""Refusals of functions that hold no cascade."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from crossfuse.errors import CascadeRefused, PlanRefused, RefusedError, refuse

#: What to do with a function whose reductions do not share an axis.
SPLIT = "split the function there, and fuse each part by itself"


def refused(where: str, found: object, limit: str, instead: str = SPLIT) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(
        CascadeRefused, "cascade-detect", where, found=found, limit=limit, instead=instead
    )


@contextmanager
def as_cascade() -> Iterator[None]:
    """Say of blocks that the planner's reader refuses that they are in no cascade."""
    try:
        yield
    except PlanRefused as error:
        raise CascadeRefused(replace(error.refusal, rule="cascade-detect")) from error
