"""Refusals of cascades, as values that name the stage and the obstacle."""

from __future__ import annotations

from crossfuse.errors import CascadeRefused, RefusedError, refuse


def refused(rule: str, stage: str, *, found: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a stage.

    Parameters
    ----------
    rule : str
        ``"cascade-separable"``, ``"cascade-sign"`` or ``"cascade-form"``.
    stage : str
        Name of the stage.
    found, limit, instead
        See `crossfuse.errors.Refusal`.

    Returns
    -------
    RefusedError
        To raise.
    """
    where = f"stage {stage}"
    return refuse(CascadeRefused, rule, where, found=found, limit=limit, instead=instead)
