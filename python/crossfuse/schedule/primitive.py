"""What primitives share: checks of arguments, and rehearsals that leave no half of a change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import ClusterLoop, cluster_loops, function
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.markers import AXES, MAX_CLUSTER, cluster_axis

# Checks of the arguments of primitives: live blocks and loops of this schedule.

_SOURCE = {"block": "sch.get_sblock(name)", "loop": "sch.get_loops(block)"}


def check_block(sch: Any, rule: str, role: str, item: Any) -> None:
    """Refuse anything but a live block of `sch`; `role` is the parameter's name."""
    _check(sch, rule, role, item, "block", ir.SBlockRV)


def check_loop(sch: Any, rule: str, role: str, item: Any) -> None:
    """Refuse anything but a live loop of `sch`; `role` is the parameter's name."""
    _check(sch, rule, role, item, "loop", ir.LoopRV)


def _check(sch: Any, rule: str, role: str, item: Any, kind: str, expected: type) -> None:
    found = type(item).__name__ if not isinstance(item, expected) else _missing(sch, item, kind)
    if found:
        raise refuse(
            ScheduleRefused,
            rule,
            f"argument '{role}'",
            found=found,
            limit=f"{expected.__name__} of a {kind} of this schedule that still exists",
            instead=f"take it anew from {_SOURCE[kind]}; primitives that make loops or blocks anew "
            "end the variables of the old ones",
        )


def _missing(sch: Any, item: Any, kind: str) -> str:
    """Why a random variable stands for nothing; empty if it is live."""
    try:
        sch.get(item)
    except IndexError:
        return f"a {kind} of another schedule"
    except ValueError:
        return f"a {kind} that no longer exists"
    return ""


# Rehearsal: a primitive either does all of its work or leaves the schedule as it was.

Facts = TypeVar("Facts")
Result = TypeVar("Result")


def rehearsed(
    sch: Any,
    read: Callable[[Any], Facts],
    change: Callable[[Any, Facts], Result],
    check: Callable[[Any, Facts, Result], None],
) -> Result:
    """Read facts, make a composite change and check its result: on a copy, then on the schedule.

    TVM has no way back from a recorded instruction, and records questions such as ``get_loops``
    too, so a refusal half way has to come before the first of them. A copy shares all nodes but
    those that change and keeps the random variables: the rehearsal costs what the change costs. It
    takes its seed from the schedule's random state, which moves on by one step. `read` returns
    facts without random variables of the copy, and `check` gets the changed copy with the result of
    `change`, and raises to refuse.
    """
    trial = sch.copy()
    facts = read(trial)
    check(trial, facts, change(trial, facts))
    return change(sch, facts)


@contextmanager
def refusing(rule: str, where: str, *, limit: str, instead: str) -> Iterator[None]:
    """Turn TVM's schedule errors into a refusal with an alternative."""
    try:
        yield
    except ir.ScheduleError as error:
        raise refuse(
            ScheduleRefused, rule, where, found=reason(error), limit=limit, instead=instead
        ) from error


def reason(error: Exception) -> str:
    """The sentence of a schedule error, without the rendered program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error message:"):
            line = line.removeprefix("Error message:").removeprefix(" ScheduleError:")
            break
    else:
        line = lines[-1] if lines else type(error).__name__
    # TVM's names of nodes point into the program that is left out.
    return re.sub(r" (s_tir|tirx)\.\w+#\d+", "", line).strip().rstrip(".:")


# Checks on which all cluster-bound loops of a function must agree: axes, extents, nesting.


def check_axis(rule: str, where: str, axis: Any) -> None:
    """Refuse an axis that a cluster does not have."""
    if axis not in AXES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"axis {axis!r}",
            limit="'x', 'y' or 'z'",
            instead="name one of the three cluster axes",
        )


def check_extent(rule: str, where: str, extent: int) -> None:
    """Refuse an extent that no cluster has."""
    if not 1 <= extent <= MAX_CLUSTER:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {extent}",
            limit=f"1 to {MAX_CLUSTER} CTAs in a cluster",
            instead="split the loop so that one part has at most that extent, and pass that part",
        )


def check_agreement(sch: Any, rule: str, where: str, loop: Any, axis: str, extent: int) -> None:
    """Refuse an extent that contradicts other cluster-bound loops, one by one or as a cluster."""
    known = {other.axis: other for other in cluster_loops(function(sch, loop))}
    check_same(rule, where, known, ClusterLoop(axis, "", extent))
    check_cluster(rule, where, known)


def check_same(rule: str, where: str, known: dict[str, ClusterLoop], loop: ClusterLoop) -> None:
    """Refuse a loop of another extent than the known one on its axis; a first one becomes known."""
    other = known.setdefault(loop.axis, loop)
    if other.extent != loop.extent:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"extent {loop.extent} on axis {loop.axis}",
            limit=f"extent {other.extent}, as loop '{other.name}' has on that axis",
            instead="split both loops by the same number of CTAs",
        )


def check_cluster(rule: str, where: str, known: dict[str, ClusterLoop]) -> None:
    """Refuse a cluster, given by a loop for each axis, that is too large."""
    size = prod(each.extent for each in known.values())
    if size > MAX_CLUSTER:
        shape = " x ".join(f"{name}={known[name].extent}" for name in AXES if name in known)
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a cluster of {size} CTAs ({shape})",
            limit=f"{MAX_CLUSTER} CTAs over all axes",
            instead="bind a smaller loop on one of the axes",
        )


def check_not_within(rule: str, where: str, nest: list[Any], axis: str) -> None:
    """Refuse a nest in which a ``For`` is bound to `axis` already."""
    for loop in nest:
        if cluster_axis(loop) == axis:
            raise refuse(
                ScheduleRefused,
                rule,
                where,
                found=f"loop '{loop.loop_var.name}' of the same nest bound to axis {axis} too",
                limit="one loop a nest on each cluster axis",
                instead="bind the second loop to another axis, or fuse the two loops and bind that",
            )
