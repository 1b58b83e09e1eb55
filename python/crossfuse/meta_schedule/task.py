"""A function of a search, its kernels, and the parts of MetaSchedule that propose them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.meta_schedule.schedule_rule import PyScheduleRule
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator
from tvm_ffi import structural_equal

from crossfuse import _tvm as ir
from crossfuse.bench.problem import TAG, name_of, tag
from crossfuse.blocks.chain import read_layers
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.meta_schedule.records import FAILED_SECONDS
from crossfuse.planner.chain.build import chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import Plan, ranked
from crossfuse.planner.tune.kernel_space import KernelSpace, space_of
from crossfuse.schedule.planned import annotate_plan, note, read_note, schedule_planned
from crossfuse.schema import Damaged


@dataclass(frozen=True)
class Task:
    """One function and all of its kernels."""

    #: The ``tvm.tirx.PrimFunc``, unscheduled.
    func: Any
    chain: Chain
    space: KernelSpace

    @cached_property
    def name(self) -> str:
        """Name of the function, see `crossfuse.bench.problem.name_of`."""
        return name_of(self.func)

    @cached_property
    def _frame(self) -> Plan:
        shape = self.space.shape
        device = self.space.device
        (found,) = ranked(self.chain, device, k_major=shape.k_major, only=(EAGER,))
        return found

    def schedule(self, point: int) -> Any:
        """Schedule one kernel, a point of `space`; its trace names the plan and the function.

        It is refused if the rule does not take these tiles.
        """
        family, tiles = self.space.tiles(point)
        plan = replace(self._frame, family=family, tiles=tiles)
        sch = schedule_planned(self.func, plan, constant_weights=True)
        annotate_plan(sch, family, tiles)
        return tag(sch, self.name)

    def designs(self, count: int) -> list[Any]:
        """Schedule the best `count` kernels of each family by the estimate.

        The planner counts kernels that the rules should take; where the two differ, the rule is
        right, and the kernel is left out.
        """
        found = []
        for group in self.space.groups:
            for point in self.space.ranked(group, count):
                with suppress(RefusedError):
                    found.append(self.schedule(point))
        return found

    def point(self, trace: Any) -> int | None:
        """The kernel that a trace's note names; None without a note or such a kernel."""
        text = note(trace)
        if text is None:
            return None
        try:
            said = read_note(text)
            return self.space.find(said.family, said.tiles)
        except (Damaged, KeyError, TypeError):
            return None

    def measured(
        self, candidates: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[int], list[float | None]]:
        """Points and microseconds of MetaSchedule's candidates; those that name none are left out.

        A time is None if there is just an error.
        """
        known = [
            (point, microseconds_of(result.run_secs))
            for each, result in zip(candidates, results, strict=True)
            if (point := self.point(each.sch.trace)) is not None
        ]
        return [point for point, _ in known], [time for _, time in known]


def microseconds_of(seconds: Any) -> float | None:
    """Mean time of a result in seconds; None where it failed."""
    if not seconds:
        return None
    mean = sum(float(each) for each in seconds) / len(seconds)
    return mean * 1e6 if math.isfinite(mean) and mean < FAILED_SECONDS / 2 else None


def task_of(func: Any, target: Device) -> Task:
    """Read an unscheduled function, or the only one of a module.

    It is refused if it is no chain, or there are no kernels of it.
    """
    from crossfuse.lower.extract import only_function

    func = only_function(func)
    read = read_layers(ir.Schedule(func))
    chain = chain_of_blocks(read)
    shape = shape_of(chain, k_major=read.k_major)
    return Task(func, chain, space_of(shape, target, rates_of(target)))


class Tasks:
    """Functions that a search has met, since reading one and listing its kernels takes a while."""

    def __init__(self, target: Device) -> None:
        self.target = target
        #: All functions that were met, by `crossfuse.bench.problem.name_of`.
        self.functions: dict[str, Any] = {}
        self._known: dict[str, Task | RefusedError] = {}

    def of(self, module: Any) -> Task | None:
        """The task of a module of one function; None where no kernel of ours computes it."""
        found = self.look(module)
        return found if isinstance(found, Task) else None

    def look(self, module: Any) -> Task | RefusedError:
        """The task of a module, or why there is none."""
        text = str(module.script())
        if text not in self._known:
            self.functions[name_of(module)] = module
            try:
                self._known[text] = task_of(module, self.target)
            except RefusedError as error:
                self._known[text] = error
        return self._known[text]


# A SpaceGenerator of MetaSchedule whose designs are the kernels that the planner ranks first.


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


# A ScheduleRule of MetaSchedule, for TVM's ``PostOrderApply`` beside rules of the target.


#: Annotation by which ``PostOrderApply`` leaves a block to the custom rule that it names.
_CUSTOM = "schedule_rule"


@derived_object
class ScheduleKernels(PyScheduleRule):
    """Schedules a whole chain when it is applied to the first of its blocks.

    What comes out are the best `designs` kernels of each family by the planner's estimate. Their
    blocks are marked as done, so that later rules skip them. Functions that are no chain are left
    to those rules as they are, but for their name in the trace. `tasks` may be shared with a search
    strategy and a cost model.
    """

    def __init__(self, tasks: Tasks, *, designs: int = 4) -> None:
        super().__init__()
        self._tasks, self._designs = tasks, designs
        self._mod: Any = None

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._mod = context.mod
        # So that its function is known whatever schedules it.
        self._tasks.look(self._mod)

    def apply(self, sch: Any, block: Any) -> list[Any]:
        """Schedule the chain of a block, once for each kernel.

        It gives `sch` itself where no kernel of ours computes the function. Blocks of a chain that
        is scheduled already are only marked.
        """
        if note(sch.trace) is not None:
            return [_done(sch, block)]
        # What another rule has scheduled before is no chain to read any more.
        task = self._tasks.of(self._mod) if structural_equal(sch.mod, self._mod) else None
        designs = [] if task is None else task.designs(self._designs)
        found = [_done(_copied(sch, each.trace), block) for each in designs]
        if not found and sch.get(block).name_hint == "root":
            # The rules that come next change how it is computed; its name stays.
            sch.annotate(block, TAG, name_of(self._mod))
        return found or [sch]

    def clone(self) -> Any:
        """A rule that shares the functions read so far."""
        return ScheduleKernels(self._tasks, designs=self._designs)


def post_order_apply(tasks: Tasks, *, designs: int = 4, kind: str = "cuda", seed: int = 0) -> Any:
    """TVM's ``PostOrderApply`` with our parts before those of a target.

    `kind`, ``"cuda"`` or ``"cuda-tensorcore"``, names the rules of functions that are no chain.
    Postprocs check schedules of ours by lowering them, and others as TVM does. `tasks` may be
    shared with a search strategy and a cost model; the seed is that of our mutator.
    """
    return ms.space_generator.PostOrderApply(
        sch_rules=[ScheduleKernels(tasks, designs=designs), *ms.ScheduleRule.create(kind)],
        postprocs=[VerifyLowered(tasks.target), *map(ForOthers, ms.Postproc.create(kind))],
        mutator_probs={MutateKernel(tasks, seed): 1.0, **ms.Mutator.create(kind)},
    )


def _copied(sch: Any, trace: Any) -> Any:
    """A copy with a trace applied; what earlier rules have recorded stays part of it."""
    found = sch.copy()
    trace.apply_to_schedule(found, remove_postproc=False)
    return found


def _done(sch: Any, block: Any) -> Any:
    """Mark a block for later rules; the lowering ignores the mark."""
    sch.annotate(block, _CUSTOM, "None")
    return sch
