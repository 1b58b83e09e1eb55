"""Checks of the arguments of primitives: live blocks and loops of this schedule."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import ScheduleRefused, refuse

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
