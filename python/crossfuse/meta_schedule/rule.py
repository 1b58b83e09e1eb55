"""A ScheduleRule of MetaSchedule, for TVM's ``PostOrderApply`` beside rules of the target."""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule import PyScheduleRule
from tvm_ffi import structural_equal

from crossfuse.meta_schedule.functions import TAG, name_of
from crossfuse.meta_schedule.mutator import MutateKernel
from crossfuse.meta_schedule.task import Tasks
from crossfuse.meta_schedule.verify import ForOthers, VerifyLowered
from crossfuse.schedule.notes import note

#: Annotation by which ``PostOrderApply`` leaves a block to the custom rule that it names.
_CUSTOM = "schedule_rule"


@derived_object
class ScheduleKernels(PyScheduleRule):
    """Schedules a whole chain when it meets the first of its blocks.

    What comes out are the best kernels of each family by the planner's estimate. Their blocks are
    marked as done, so that rules that come after this one pass them by. Functions that are no chain
    stay as they are for those rules, but for their name in the trace.

    Parameters
    ----------
    tasks : Tasks
        May be shared with a search strategy and a cost model.
    designs : int
        Kernels of each family.
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
        """Schedule the chain that a block is of.

        Parameters
        ----------
        sch : tvm.s_tir.Schedule
            Of one function.
        block : tvm.s_tir.schedule.SBlockRV
            A block of it; those of a chain that is scheduled already are marked.

        Returns
        -------
        list[tvm.s_tir.Schedule]
            One for each kernel; `sch` where no kernel of ours computes the function.
        """
        if note(sch.trace) is not None:
            return [_done(sch, block)]
        # What another rule has scheduled before is no chain to read any more.
        task = self._tasks.of(self._mod) if structural_equal(sch.mod, self._mod) else None
        found = [_done(_copied(sch, each), block) for each in _traces(task, self._designs)]
        if not found and sch.get(block).name_hint == "root":
            # The rules that come next change how it is computed; its name stays.
            sch.annotate(block, TAG, name_of(self._mod))
        return found or [sch]

    def clone(self) -> Any:
        """A rule that knows the same functions."""
        return ScheduleKernels(self._tasks, designs=self._designs)


def post_order_apply(tasks: Tasks, *, designs: int = 4, kind: str = "cuda", seed: int = 0) -> Any:
    """TVM's ``PostOrderApply`` with our parts before those of a target.

    Parameters
    ----------
    tasks : Tasks
        May be shared with a search strategy and a cost model.
    designs : int
        Kernels of each family.
    kind : str
        Whose rules functions that are no chain go to: ``"cuda"`` or ``"cuda-tensorcore"``.
    seed : int
        Of our mutator.

    Returns
    -------
    tvm.s_tir.meta_schedule.space_generator.PostOrderApply
        Its postprocs check schedules of ours by lowering them, and others as TVM does.
    """
    return ms.space_generator.PostOrderApply(
        sch_rules=[ScheduleKernels(tasks, designs=designs), *ms.ScheduleRule.create(kind)],
        postprocs=[VerifyLowered(tasks.target), *map(ForOthers, ms.Postproc.create(kind))],
        mutator_probs={MutateKernel(tasks, seed): 1.0, **ms.Mutator.create(kind)},
    )


def _traces(task: Any, designs: int) -> list[Any]:
    return [] if task is None else [each.trace for each in task.designs(designs)]


def _copied(sch: Any, trace: Any) -> Any:
    """A copy with a trace applied; what the rules before have recorded stays part of it."""
    found = sch.copy()
    trace.apply_to_schedule(found, remove_postproc=False)
    return found


def _done(sch: Any, block: Any) -> Any:
    """Mark a block for the rules after this one; the lowering passes the mark by."""
    sch.annotate(block, _CUSTOM, "None")
    return sch
