"""What primitives share: checks of arguments, and rehearsals that leave no half of a change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse

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
