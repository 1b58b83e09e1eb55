"""A Mutator of MetaSchedule: one step from a kernel to its neighbour."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.mutator import PyMutator

from crossfuse.errors import RefusedError
from crossfuse.meta_schedule.task import Task, Tasks

_TRIES = 4


@derived_object
class MutateKernel(PyMutator):
    """Changes a trace's cluster, tiles, split or placement to the next one that is legal.

    The trace of a neighbour is another sequence of primitives, not the same with other numbers. So
    it is made anew by the rule of its family.
    """

    def __init__(self, tasks: Tasks, seed: int = 0) -> None:
        super().__init__()
        self._tasks, self._seed = tasks, seed
        self._rng = np.random.default_rng(seed)
        self._task: Task | None = None

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._task = self._tasks.of(context.mod)

    def apply(self, trace: Any, _: Any = None) -> Any:
        """A neighbour's trace; None where the trace is not of a plan, or has no neighbour."""
        point = None if self._task is None else self._task.point(trace)
        if self._task is None or point is None:
            return None
        ways = self._task.space.ways(point)
        for _try in range(_TRIES if ways else 0):
            to = self._task.space.follow(point, ways[int(self._rng.integers(len(ways)))])
            if to is None or to == point:
                continue
            try:
                return self._task.schedule(to).trace
            except RefusedError:
                continue
        return None

    def clone(self) -> Any:
        """A mutator that makes the same draws from the beginning."""
        return MutateKernel(self._tasks, self._seed)
