"""Cascades over several calls of a dataflow block, with the kernels that they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.relax.calls import Flow
from crossfuse.relax.cascades.forms import Forms
from crossfuse.relax.cascades.found import Found, Kernel
from crossfuse.relax.cascades.grow import Growth
from crossfuse.relax.units import Unit, places


@dataclass(frozen=True, eq=False)
class Group:
    """Calls that become one kernel.

    Attributes
    ----------
    members : Unit
        The calls.
    found : Found
        What they are together.
    kernel : Kernel
        What they become.
    apart : tuple[str, ...]
        Neighbours that were not taken in, each with the reason.
    before : int
        Bytes that the calls move as they are, see `crossfuse.relax.cascades.traffic`.
    """

    members: Unit
    found: Found
    kernel: Kernel
    apart: tuple[str, ...]
    before: int


@dataclass(frozen=True)
class Refused:
    """Calls that are one cascade for which there is no kernel.

    Attributes
    ----------
    calls : tuple[str, ...]
        The functions.
    reason : str
        Why not.
    """

    calls: tuple[str, ...]
    reason: str


def find_groups(
    mod: Any, flow: Flow, forms: Forms
) -> tuple[tuple[Group, ...], tuple[Refused, ...]]:
    """Find the cascades of a dataflow block.

    Where what was taken together has no kernel, the largest part that has one is kept, and the
    rest is tried again without what is known to fail.

    Parameters
    ----------
    mod : tvm.IRModule
        The module of the block.
    flow : Flow
        The block.
    forms : Forms
        What judges functions.

    Returns
    -------
    groups : tuple[Group, ...]
        In the order of their last calls; no call is in two of them.
    refused : tuple[Refused, ...]
        What was tried and has none.
    """
    groups: list[Group] = []
    refused: dict[Unit, Refused] = {}
    failed = True
    while failed:
        growth = Growth(mod, flow, forms, [each.members for each in groups])
        growth.grow()
        failed = False
        for steps in growth.steps.values():
            kept, reason = _largest(growth, forms, steps)
            if reason and steps[-1] not in refused:
                # What grew so is not taken together again: its kernel is known to fail. What is
                # kept of it may grow in another way.
                refused[steps[-1]] = Refused(calls_of(steps[-1]), reason)
                failed = True
            elif kept:
                groups.append(kept)
    groups.sort(key=lambda each: places(each.members)[1])
    return tuple(groups), tuple(dict.fromkeys(refused.values()))


def _largest(growth: Growth, forms: Forms, steps: list[Unit]) -> tuple[Group | None, str]:
    """The last step that has a kernel, and why the last one of all has none."""
    reason = ""
    for step in reversed(steps):
        found = growth.found(step)
        if found.reason or found.is_plain:
            continue
        kernel = forms.kernel(found)
        if isinstance(kernel, Kernel):
            group = Group(step, found, kernel, growth.apart(step), growth.before(step))
            return group, reason
        reason = reason or kernel
    return None, reason


def calls_of(unit: Unit) -> tuple[str, ...]:
    """Names of the functions that a unit calls, in order."""
    nodes = sorted(unit, key=lambda each: each.place)
    return tuple(each.name for each in nodes if each.func is not None)
