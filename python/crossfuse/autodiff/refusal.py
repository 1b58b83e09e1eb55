"""Refusals of functions whose gradient is not written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from crossfuse.errors import GradientRefused, PlanRefused, RefusedError, refuse


def refused(where: str, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a function; see `crossfuse.errors.Refusal`."""
    return refuse(GradientRefused, "gradient", where, found=found, limit=limit, instead=instead)


@contextmanager
def as_gradient() -> Iterator[None]:
    """Turn refusals by the reader of blocks into those of gradients."""
    try:
        yield
    except PlanRefused as error:
        raise GradientRefused(replace(error.refusal, rule="gradient")) from error
