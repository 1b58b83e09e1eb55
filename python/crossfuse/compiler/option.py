"""One way to schedule a function for the Hopper pipeline, and why that one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


@dataclass(frozen=True)
class Option:
    """A way to schedule a function.

    Attributes
    ----------
    make : Callable
        Makes the schedule, or refuses.
    plan : Plan | CascadePlan | None
        What it follows; None where a rule chooses the tiles, or the caller scheduled it.
    why : Mapping[str, Any]
        Plain values for the metadata of the library: what was planned, or why nothing was.
    """

    make: Callable[[], Any]
    plan: Plan | CascadePlan | None = None
    why: Mapping[str, Any] = field(default_factory=dict)
