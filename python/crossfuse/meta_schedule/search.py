"""A SearchStrategy of MetaSchedule among our kernels, with its CostModel and FeatureExtractor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.cost_model import PyCostModel
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy

from crossfuse.errors import RefusedError
from crossfuse.files import write_atomically
from crossfuse.meta_schedule.task import Task, Tasks, microseconds_of, others_context
from crossfuse.planner.cost.terms import NAMES
from crossfuse.planner.tune.cost_model import CostModel, features
from crossfuse.planner.tune.strategy import Strategy, make_strategy

# Cost and features, based on the planner's estimate.


@derived_object
class KernelCost(PyCostModel):
    """Scores kernels by the estimate and what was measured; the less time, the higher.

    `tasks` and `model`, which predicts and learns, are shared with the search. `others` is
    MetaSchedule's CostModel of functions that are no chain; None scores them all alike.
    """

    def __init__(self, tasks: Tasks, model: CostModel | None = None, others: Any = None) -> None:
        super().__init__()
        self._tasks, self._others = tasks, others
        self.model = CostModel() if model is None else model

    def load(self, path: str) -> None:
        """Read what `save` wrote, see `crossfuse.planner.tune.cost_model.CostModel.load`."""
        self.model.load(path)
        if self._others is not None and Path(_beside(path)).exists():
            self._others.load(_beside(path))

    def save(self, path: str) -> None:
        """Write what was learned; the model of other functions has a file beside this one."""
        self.model.save(path, write_atomically)
        if self._others is not None:
            self._others.save(_beside(path))

    def update(self, context: Any, candidates: list[Any], results: list[Any]) -> None:
        """Learn from the times of measurements, or from their errors."""
        task = self._tasks.of(context.mod)
        if task is None:
            if self._others is not None:
                self._others.update(context, candidates, results)
            return
        self.model.update(task.space, *task.measured(candidates, results))

    def predict(self, context: Any, candidates: list[Any]) -> np.ndarray:
        """Score candidates in kernels a microsecond; 0 for schedules that are none of ours."""
        task = self._tasks.of(context.mod)
        found = np.zeros(len(candidates))
        if task is None:
            if self._others is None:
                return found
            scores: np.ndarray = self._others.predict(context, candidates)
            return scores
        points = [task.point(each.sch.trace) for each in candidates]
        known = [number for number, each in enumerate(points) if each is not None]
        if known:
            which = np.array([points[each] for each in known], np.int64)
            found[known] = 1 / self.model.predict(task.space, which)
        return found


@derived_object
class KernelFeatures(PyFeatureExtractor):
    """The features that the cost model learns from, `crossfuse.planner.tune.cost_model.NAMES`.

    `tasks` is shared with the search.
    """

    def __init__(self, tasks: Tasks) -> None:
        super().__init__()
        self._tasks = tasks

    def extract_from(self, context: Any, candidates: list[Any]) -> list[Any]:
        """Describe candidates as float32 of [1, features]; zeros if none of our kernels."""
        task = self._tasks.of(context.mod)
        found = []
        for each in candidates:
            point = None if task is None else task.point(each.sch.trace)
            row = np.zeros((1, len(NAMES)), np.float32)
            if task is not None and point is not None:
                row = features(task.space, [point])
            found.append(tvm.runtime.tensor(row))
        return found


def _beside(path: str) -> str:
    return f"{path}.others"


# The search.

#: Proposals in a row of which none can be scheduled, before a search ends.
_PATIENCE = 8


@derived_object
class KernelSearch(PySearchStrategy):
    """Proposes kernels of a chain; other functions are left to TVM's search.

    What the database holds of the same function is known from the start and not measured again.
    `tasks` is shared with the space generator; `kind` is one of
    `crossfuse.planner.tune.strategy.STRATEGIES`. The model predicts times: that of
    `crossfuse.meta_schedule.search.KernelCost`, which teaches it, or None for the estimate.
    `others` is the SearchStrategy of functions that are no chain; None is TVM's ``evolutionary``.
    The same seed and measurements give the same proposals.
    """

    def __init__(
        self,
        tasks: Tasks,
        kind: str = "evolution",
        model: CostModel | None = None,
        *,
        others: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._tasks, self._kind, self._model = tasks, kind, model
        self._others, self._seed = others, seed
        self._context: Any = None
        self._inner: Any = None
        self._task: Task | None = None
        self._search: Strategy | None = None
        self._left = self._batch = 0

    def _initialize_with_tune_context(self, context: Any) -> None:
        self._context, self._inner = context, None
        self._task = self._tasks.of(context.mod)
        if self._task is None:
            self._inner = others_context(context, strategy=self._others).search_strategy

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: list[Any],
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        """Begin a search, knowing what the database has of the function.

        Design spaces and cost model are for functions that are no chain; a chain's kernels are all
        searched.
        """
        if self._inner is not None:
            self._inner.pre_tuning(
                max_trials, num_trials_per_iter, design_spaces, database, cost_model
            )
            return
        assert self._task is not None
        self._search = make_strategy(self._kind, self._task.space, self._model, self._seed)
        self._left, self._batch = int(max_trials), int(num_trials_per_iter)
        if database is not None:
            self._remember(self._task, self._search, database)

    def post_tuning(self) -> None:
        """End a search."""
        if self._inner is not None:
            self._inner.post_tuning()
        self._search = None

    def generate_measure_candidates(self) -> list[Any] | None:
        """The kernels to measure next; None at the end."""
        if self._inner is not None:
            found = self._inner.generate_measure_candidates()
            return None if found is None else list(found)
        assert self._task is not None and self._search is not None
        candidates: list[Any] = []
        wanted = min(self._batch, self._left)
        for _ in range(_PATIENCE if wanted else 0):
            points = self._search.propose(wanted - len(candidates))
            candidates += [each for each in map(self._candidate, points) if each is not None]
            if len(candidates) == wanted or not points:
                break
        self._left -= len(candidates)
        return candidates or None

    def notify_runner_results(self, measure_candidates: list[Any], results: list[Any]) -> None:
        """Learn from the times of candidates, or from their errors."""
        if self._inner is not None:
            self._inner.notify_runner_results(measure_candidates, results)
            return
        assert self._task is not None and self._search is not None
        self._search.observe(*self._task.measured(measure_candidates, results))

    def clone(self) -> Any:
        """A search of its own for each task; the model is shared."""
        return KernelSearch(
            self._tasks, self._kind, self._model, others=self._others, seed=self._seed
        )

    def _candidate(self, point: int) -> Any:
        """A kernel as MetaSchedule measures it; None where it cannot be scheduled."""
        assert self._task is not None and self._search is not None
        try:
            sch = self._task.schedule(point)
        except RefusedError:
            self._search.observe([point], [None])
            return None
        checks = self._context.space_generator.postprocs or []
        if not all(each.apply(sch) for each in checks):
            self._search.observe([point], [None])
            return None
        return MeasureCandidate(sch, ArgInfo.from_prim_func(self._task.func))

    def _remember(self, task: Task, search: Strategy, database: Any) -> None:
        module = self._context.mod
        if not database.has_workload(module):
            return
        workload = database.commit_workload(module)
        for record in database.get_all_tuning_records():
            if not record.workload.same_as(workload) and not _equal(record.workload.mod, module):
                continue
            point = task.point(record.trace)
            if point is not None:
                search.observe([point], [microseconds_of(record.run_secs)])


def _equal(one: Any, other: Any) -> bool:
    from tvm_ffi import structural_equal

    return bool(structural_equal(one, other))
