"""Grows trees from measured kernels, and judges them by workloads that they did not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import NAMES, Trees, features
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import read_kernel
from crossfuse.schema import parse
from study.fit import Sample

#: Features of kernels, see `rows_of`, and corrections of their estimates.
Rows = tuple[np.ndarray, np.ndarray]
_DEPTH, _ROUNDS = 5, 300
_SETTINGS = {
    "max_depth": _DEPTH,
    "eta": 0.1,
    "subsample": 0.7,
    "colsample_bytree": 0.5,
    "min_child_weight": 3,
    "lambda": 3.0,
    "base_score": 0.0,
    "seed": 0,
    "nthread": 2,
}


def rows_of(samples: Sequence[Sample], device: Device, rates: Rates) -> np.ndarray:
    """Features of measured kernels, see `crossfuse.planner.cost.terms`."""
    found = np.zeros((len(samples), len(NAMES)), np.float32)
    for row, each in zip(found, samples, strict=True):
        kernel = read_kernel(each.family, each.tiles)
        room = kernel.memories(each.shape, device)[-1]
        times = estimate(kernel, each.shape, device, rates, room)
        row[:] = features(kernel, each.shape, device, times, room)[0]
    return found


def joined(one: Rows, other: Rows) -> Rows:
    """All kernels of two."""
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])


def grow(rows: np.ndarray, corrections: np.ndarray, device: Device) -> Trees:
    """Learn corrections.

    Parameters
    ----------
    rows : np.ndarray
        Features, see `rows_of`.
    corrections : np.ndarray
        Logarithm of measured over estimated time of each.
    device : Device
        Of the measurements.
    """
    import xgboost

    data = xgboost.DMatrix(rows, corrections)
    grown = xgboost.train(_SETTINGS, data, _ROUNDS)
    dumps = [parse(each) for each in grown.get_dump(dump_format="json")]
    nodes = 2**_DEPTH - 1
    feature = np.zeros((len(dumps), nodes), np.int64)
    threshold = np.zeros((len(dumps), nodes), np.float32)
    leaf = np.zeros((len(dumps), nodes + 1), np.float32)
    for number, dump in enumerate(dumps):
        _place(dump, 0, feature[number], threshold[number], leaf[number])
    return Trees(device.name, len(rows), feature, threshold, leaf)


def _place(
    node: dict[str, Any], at: int, feature: np.ndarray, threshold: np.ndarray, leaf: np.ndarray
) -> None:
    """Write a node and those below it; a leaf that ends early fills all leaves below it."""
    nodes = len(feature)
    if at >= nodes:
        leaf[at - nodes] = node["leaf"]
        return
    if "leaf" in node:
        below = (node, node)
    else:
        feature[at], threshold[at] = int(node["split"][1:]), node["split_condition"]
        ids = {each["nodeid"]: each for each in node["children"]}
        below = (ids[node["yes"]], ids[node["no"]])
    for way, each in enumerate(below):
        _place(each, 2 * at + 1 + way, feature, threshold, leaf)


def held_out(
    samples: Sequence[Sample],
    rows: np.ndarray,
    corrections: np.ndarray,
    device: Device,
    beside: Rows | None = None,
    folds: int = 6,
) -> np.ndarray:
    """Correct each kernel by trees that saw no kernel of its workload, of any number of rows.

    Parameters
    ----------
    samples, rows, corrections, device
        See `grow`; the samples are none of cuBLAS.
    beside : Rows | None
        Kernels that all trees see.
    folds : int
        In how many parts workloads are divided.

    Returns
    -------
    np.ndarray
        What trees say of each.
    """
    groups = [(each.shape.n, each.shape.k, each.shape.l, each.shape.products) for each in samples]
    order = sorted(set(groups))
    np.random.default_rng(0).shuffle(order)
    part = np.array([order.index(each) % folds for each in groups])
    found = np.zeros(len(samples))
    for number in range(folds):
        inside = part == number
        if inside.any():
            seen: Rows = (rows[~inside], corrections[~inside])
            seen = joined(seen, beside) if beside else seen
            found[inside] = grow(*seen, device).sum(rows[inside])
    return found


def without_eager(samples: Sequence[Sample]) -> np.ndarray:
    """Which samples are kernels of ours, as a mask."""
    return np.array([each.family != EAGER for each in samples], bool)
