"""One option to schedule a function, and why it was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan


@dataclass(frozen=True)
class Option:
    """A way to schedule a function, with the plan that it follows."""

    #: Makes the schedule, or refuses.
    make: Callable[[], Any]
    #: None where a rule chooses the tiles, or the caller scheduled the function.
    plan: Plan | CascadePlan | None = None
    #: Plain values for the library's metadata: what was planned, or why nothing was.
    why: Mapping[str, Any] = field(default_factory=dict)
