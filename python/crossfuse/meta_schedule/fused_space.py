"""A SpaceGenerator of MetaSchedule whose designs are the kernels that the planner ranks first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.space_generator import PySpaceGenerator

from crossfuse.meta_schedule.functions import name_of, tag
from crossfuse.meta_schedule.mutator import MutateKernel
from crossfuse.meta_schedule.task import Tasks
from crossfuse.meta_schedule.verify import VerifyLowered


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
