"""A CostModel and a FeatureExtractor of MetaSchedule, based on the planner's estimate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.cost_model import PyCostModel
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor

from crossfuse.files import write_atomically
from crossfuse.meta_schedule.task import Tasks
from crossfuse.planner.cost.trees import NAMES
from crossfuse.planner.tune.cost_model import CostModel, features


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
