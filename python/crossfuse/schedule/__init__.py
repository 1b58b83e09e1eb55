"""Schedule primitives for thread-block clusters and distributed shared memory.

The package can be called: ``crossfuse.schedule(workload, plan)`` is
`crossfuse.schedule.planned.schedule_workload`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan


class _Callable(ModuleType):
    """The package as a callable, which schedules a workload by a plan."""

    def __call__(self, workload: Any, plan: Plan, *, constant_weights: bool = False) -> Any:
        """Schedule a workload by a plan."""
        from crossfuse.schedule.planned import schedule_workload

        return schedule_workload(workload, plan, constant_weights=constant_weights)


# Python's documented way to give a module behaviour of its own.
sys.modules[__name__].__class__ = _Callable
