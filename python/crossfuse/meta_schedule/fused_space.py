"""A SpaceGenerator of MetaSchedule whose designs are the kernels that the planner ranks first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator

from crossfuse.bench.problem import name_of, tag
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.meta_schedule.task import Task, Tasks
from crossfuse.schedule.records import note

# A Mutator of MetaSchedule: one step from a kernel to its neighbour.

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


# Postprocs of MetaSchedule: one that lowers schedules of ours, one that lets them pass.


@derived_object
class VerifyLowered(PyPostproc):
    """Accepts kernels of ours that lower: shared memory, registers and clusters are known then.

    Nothing is compiled. TVM's own ``VerifyGPUCode`` reads the schedule before shared memory is
    divided among the CTAs of a cluster, and counts too much. Schedules that are not of a plan pass.
    """

    def __init__(self, target: Device) -> None:
        super().__init__()
        self._target = target
        #: Why the last schedule was turned down; empty where it was not.
        self.reason = ""

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def apply(self, sch: Any) -> bool:
        """Whether the schedule of a function lowers within the device's limits."""
        from crossfuse.lower.extract import lower

        self.reason = ""
        if note(sch.trace) is None:
            return True
        try:
            lower(sch.mod, self._target)
        except RefusedError as error:
            self.reason = str(error)
        return not self.reason

    def clone(self) -> Any:
        """A check for the same device."""
        return VerifyLowered(self._target)


@derived_object
class ForOthers(PyPostproc):
    """A postproc of TVM that leaves kernels of ours alone.

    `inner` is applied to schedules that are not of a plan.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._inner._initialize_with_tune_context(context)

    def apply(self, sch: Any) -> bool:
        """Whether the schedule is of a plan, or passes the inner postproc."""
        return note(sch.trace) is not None or bool(self._inner.apply(sch))

    def clone(self) -> Any:
        """The same with a clone of the inner postproc."""
        return ForOthers(self._inner.clone())


@derived_object
class FusedSpace(PySpaceGenerator):
    """Designs of chains are traces of our kernels; other functions are left to TVM's rules.

    `tasks` is shared with the search strategy and the cost model. There are `designs` kernels of
    each family. `others` is the SpaceGenerator of functions that are no chain; None is TVM's
    ``post-order-apply`` with the rules of the target. The seed is that of the mutators.
    """

    def __init__(
        self, tasks: Tasks, *, designs: int = 4, others: Any = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.sch_rules: list[Any] = []
        self.postprocs = [VerifyLowered(tasks.target)]
        self.mutator_probs: Mapping[Any, float] = {MutateKernel(tasks, seed): 1.0}
        self._tasks, self._designs, self._others, self._seed = tasks, designs, others, seed
        self._inner: Any = None

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._inner = None
        if self._tasks.of(context.mod) is None:
            self._inner = others_context(context, space=self._others)

    def generate_design_space(self, mod: Any) -> list[Any]:
        """Schedule the best kernels of each family for a module of one function; at least one."""
        task = self._tasks.of(mod)
        if task is None:
            name = name_of(mod)
            found = self._inner.space_generator.generate_design_space(mod)
            return [tag(each, name) for each in found]
        return task.designs(self._designs)

    def clone(self) -> Any:
        """A generator of its own for each task, as MetaSchedule asks for."""
        return FusedSpace(self._tasks, designs=self._designs, others=self._others, seed=self._seed)


def others_context(context: Any, *, space: Any = None, strategy: Any = None) -> Any:
    """An initialised context in which TVM's own parts work on a function that is no chain.

    The defaults are ``post-order-apply`` and ``evolutionary``.
    """
    return ms.TuneContext(
        mod=context.mod,
        target=context.target,
        space_generator=space.clone() if space is not None else "post-order-apply",
        search_strategy=strategy.clone() if strategy is not None else "evolutionary",
        task_name=context.task_name,
        num_threads=int(context.num_threads),
        rand_state=int(context.rand_state),
    ).clone()
