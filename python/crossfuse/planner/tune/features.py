"""What a learned model is told of a kernel: the estimate's terms, tiles, and bytes by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossfuse.planner.cost.estimate import TERMS, estimate
from crossfuse.planner.kernels.every import FAMILIES, memories, select
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.tune.kernel_space import KernelSpace

_SHAPE = ("m", "n", "k", "l", "products", "item")
_PHASE = ("rows", "columns", "steps", "tiles", "split", "copies", "readers", "l2", "dsm", "sums")
_KERNEL = ("cluster", "waves", "left_stages", "right_stages", "shared")
#: Names of the columns of `features`, in their order.
NAMES = (
    "estimate",
    *(f"term {each}" for each in TERMS),
    *(f"family {each}" for each in FAMILIES),
    *(f"shape {each}" for each in _SHAPE),
    *(f"kernel {each}" for each in _KERNEL),
    *(f"first {each}" for each in _PHASE),
    *(f"second {each}" for each in _PHASE),
)


def features(space: KernelSpace, points: Sequence[int] | np.ndarray) -> np.ndarray:
    """Describe kernels by numbers.

    Parameters
    ----------
    space : KernelSpace
        Whose points they are.
    points : Sequence[int]
        Which.

    Returns
    -------
    np.ndarray
        float32 of [point, name], by `NAMES`. Times are in microseconds, on a scale of logarithms
        to the base 2 of one more, as is everything but families.
    """
    found = np.zeros((len(points), len(NAMES)), np.float32)
    given = np.asarray(points, np.int64)
    for group, here in space.by_group(given):
        columns = _columns(space, group.family, group.kernels, given[here] - group.first)
        for name, values in columns.items():
            found[here, NAMES.index(name)] = values
    return found


def _columns(
    space: KernelSpace, family: str, kernels: Any, entries: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns that are not zero."""
    shape, device = space.shape, space.device
    kernel = select(kernels, entries)
    room = memories(kernel, shape, device)[-1]
    times = estimate(kernel, shape, device, space.rates, room)
    clusters = kernel.clusters(shape, device)[-1]
    phases = kernel.phases(shape)
    raw: dict[str, Any] = {
        "estimate": times.microseconds,
        **{f"term {name}": value for name, value in times.terms.items()},
        **{f"shape {name}": getattr(shape, name) for name in _SHAPE},
        "kernel cluster": kernel.cluster,
        "kernel waves": phases[0].tiles / np.minimum(clusters, resident(device, kernel.cluster)),
        "kernel left_stages": room.left,
        "kernel right_stages": room.right,
        "kernel shared": room.size,
    }
    for name, phase in zip(("first", "second"), phases, strict=False):
        ctas = phase.tiles * kernel.cluster
        right = phase.right / phase.right_sharers
        raw |= {
            f"{name} {each}": getattr(phase, each) for each in _PHASE if each not in ("l2", "dsm")
        }
        raw[f"{name} l2"] = ctas * phase.steps * (phase.left / phase.left_sharers + right)
        slices = (kernel.cluster - 1) * phase.rows * phase.columns * shape.item
        sent = phase.received * (phase.split - 1) / phase.split
        raw[f"{name} dsm"] = ctas * (sent + (slices if phase.gathers else 0))
    logs = {name: np.log2(1 + np.maximum(value, 0)) for name, value in raw.items()}
    return {**logs, f"family {family}": np.ones(len(entries))}
