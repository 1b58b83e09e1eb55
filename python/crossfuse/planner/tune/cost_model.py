"""The analytical estimate, corrected by measurements.

``time = estimate * exp(correction)``. The correction is the mean of what is known, and, from some
measurements on, what trees (xgboost) add to it by the features of a kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from crossfuse.errors import ArtefactRefused, EnvironmentRefused, RefusedError, refuse
from crossfuse.files import read_bytes, read_text
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.terms import NAMES
from crossfuse.planner.cost.terms import features as features_of
from crossfuse.planner.kernels.shape import select
from crossfuse.planner.tune.kernel_space import KernelSpace, Space
from crossfuse.schema import Between, Damaged, read

# Features of the points of a search space.


def features(space: Space, points: Sequence[int] | np.ndarray) -> np.ndarray:
    """Describe points of a `KernelSpace` by numbers: see `crossfuse.planner.cost.terms.features`.

    Kernels of cascades have no features.
    """
    assert isinstance(space, KernelSpace), "cascades are searched without a model"
    found = np.zeros((len(points), len(NAMES)), np.float32)
    given = np.asarray(points, np.int64)
    shape, device = space.shape, space.device
    for group, here in space.by_group(given):
        kernel = select(group.kernels, given[here] - group.first)
        room = kernel.memories(shape, device)[-1]
        times = estimate(kernel, shape, device, space.rates, room)
        found[here] = features_of(kernel, shape, device, times, room)
    return found


VERSION = 1
#: The least number of measurements that trees are grown from.
FEWEST = 8
#: Measurements of no correction that the mean begins with.
_DOUBT = 2.0
#: Correction of what does not compile, hangs, dies or is wrong: four times the estimate.
_FAILED = math.log(4.0)
_SETTINGS = {
    "max_depth": 4,
    "eta": 0.15,
    "lambda": 1.0,
    "min_child_weight": 1,
    "base_score": 0.0,
    "tree_method": "exact",
    "nthread": 1,
    "objective": "reg:squarederror",
}
_ROUNDS = 80


@dataclass(frozen=True)
class _Learned:
    """Content of a saved model, besides its trees."""

    seed: Annotated[int, Between(0, 2**31 - 1)]
    names: Sequence[str]
    rows: Sequence[Sequence[float]]
    corrections: Sequence[Annotated[float, Between(-50, 50)]]


class CostModel:
    """Predicts times of kernels of chains, by the estimate alone until something was measured.

    Measurements of all chains teach one model: their extents are among the features. The seed is
    that of xgboost.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._rows: list[list[float]] = []
        self._corrections: list[float] = []
        self._mean = 0.0
        self._trees: Any = None

    def __len__(self) -> int:
        """Number of measurements that it learned from."""
        return len(self._rows)

    def predict(self, space: Space, points: np.ndarray) -> np.ndarray:
        """Predict the microseconds of kernels of a chain."""
        prior = space.prior[np.asarray(points, np.int64)]
        if not self._rows:
            return prior
        correction = self._mean
        if self._trees is not None:
            correction = correction + self._trees.inplace_predict(features(space, points))
        found: np.ndarray = prior * np.exp(correction)
        return found

    def update(
        self, space: Space, points: Sequence[int], microseconds: Sequence[float | None]
    ) -> None:
        """Learn from measured microseconds of kernels of a chain; None of what does not work."""
        given = np.asarray(points, np.int64)
        if not given.size:
            return
        for row, prior, time in zip(
            features(space, given).tolist(), space.prior[given], microseconds, strict=True
        ):
            self._rows.append(row)
            works = time is not None and math.isfinite(time)
            self._corrections.append(math.log(time / prior) if works and time else _FAILED)
        self._fit()

    def save(
        self, path: str | Path, write: Callable[[Path, bytes], Any] = Path.write_bytes
    ) -> None:
        """Write what was learned.

        The JSON file has the measurements; the trees go beside it, with the further suffix
        ``.ubj``, in xgboost's own format. `write` may be `crossfuse.files.write_atomically`.
        """
        document = {
            "version": VERSION,
            **asdict(_Learned(self._seed, NAMES, self._rows, self._corrections)),
        }
        if self._trees is not None:
            write(_trees_beside(path), bytes(self._trees.save_raw("ubj")))
        write(Path(path), json.dumps(document).encode())

    def load(self, path: str | Path) -> None:
        """Read what `save` wrote; what was known before is forgotten.

        Trees that are missing or damaged are grown again from the measurements. Measurements that
        are damaged, or of other features, are refused.
        """
        try:
            found = read(_Learned, read_text(Path(path)), version=VERSION, key="version")
        except Damaged as error:
            raise _damaged(path, error.found) from error
        if tuple(found.names) != NAMES or {len(each) for each in found.rows} - {len(NAMES)}:
            raise _damaged(path, f"rows of other features than the {len(NAMES)} of this version")
        if len(found.rows) != len(found.corrections):
            raise _damaged(path, f"{len(found.rows)} rows, {len(found.corrections)} corrections")
        self._seed = found.seed
        self._rows, self._corrections = list(map(list, found.rows)), list(found.corrections)
        self._fit(_read_trees(_trees_beside(path)))

    def _fit(self, trees: Any = None) -> None:
        self._mean = sum(self._corrections) / (len(self._corrections) + _DOUBT)
        self._trees = None
        if len(self._rows) < FEWEST:
            return
        if trees is not None:
            self._trees = trees
            return
        xgboost = require_xgboost()
        rest = np.array(self._corrections) - self._mean
        matrix = xgboost.DMatrix(np.array(self._rows, np.float32), rest)
        settings = {**_SETTINGS, "seed": self._seed}
        self._trees = xgboost.train(settings, matrix, num_boost_round=_ROUNDS)


def _trees_beside(path: str | Path) -> Path:
    return Path(f"{path}.ubj")


def _read_trees(path: Path) -> Any:
    """Read the trees of a file; None where there are none that can be read."""
    try:
        data = bytearray(read_bytes(path))
    except Damaged:
        return None
    xgboost = require_xgboost()
    try:
        found = xgboost.Booster()
        found.load_model(data)
    except xgboost.core.XGBoostError:
        return None
    return found if found.num_features() == len(NAMES) else None


def require_xgboost() -> Any:
    """Import xgboost; refused where it is not installed."""
    try:
        import xgboost
    except ImportError as error:
        raise refuse(
            EnvironmentRefused,
            "xgboost",
            "cost model",
            found="no package xgboost",
            limit="xgboost, which learns what the estimate misses",
            instead="install crossfuse[tune], or search with the estimate alone",
        ) from error
    return xgboost


def _damaged(path: str | Path, found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "cost-model",
        str(path),
        found=found,
        limit=f"a cost model of version {VERSION}, of the features of this version",
        instead="delete it: the records of the same folder teach a new one",
    )
