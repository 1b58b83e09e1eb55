"""A ScheduleRule of MetaSchedule, for TVM's ``PostOrderApply`` beside rules of the target."""

from __future__ import annotations

from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule import PyScheduleRule
from tvm_ffi import structural_equal

from crossfuse.bench.problem import TAG, name_of
from crossfuse.meta_schedule.fused_space import ForOthers, MutateKernel, VerifyLowered
from crossfuse.meta_schedule.task import Tasks
from crossfuse.schedule.records import note

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
