"""Cascades over several calls of a dataflow block, with the kernels that they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.relax.calls import Flow
from crossfuse.relax.cascade_forms import Forms, Found, Kernel
from crossfuse.relax.grow import Growth
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
        Bytes that the calls move as they are, see `crossfuse.relax.traffic`.
    """

    members: Unit
    found: Found
    kernel: Kernel
    apart: tuple[str, ...]
    before: int


def find_groups(mod: Any, flow: Flow, forms: Forms) -> tuple[Group, ...]:
    """Find the cascades of a dataflow block.

    Where what was taken together has no kernel, steps are taken back until there is one.

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
    tuple[Group, ...]
        In the order of their last calls; no call is in two of them.
    """
    growth = Growth(mod, flow, forms)
    growth.grow()
    found: list[Group] = []
    for steps in growth.steps.values():
        taken: Unit = frozenset()
        reasons: list[str] = []
        for step in reversed(steps):
            known = growth.found(step)
            if step & taken or known.reason or known.is_plain:
                continue
            kernel = forms.kernel(known)
            if isinstance(kernel, str):
                reasons.append(kernel)
                continue
            apart = (*growth.apart(step), *dict.fromkeys(reasons))
            found.append(Group(step, known, kernel, apart, growth.before(step)))
            taken |= step
    return tuple(sorted(found, key=lambda each: places(each.members)[1]))
