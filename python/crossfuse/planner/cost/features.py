"""What learned corrections are told of kernels: the estimate's terms, tiles, and bytes by level."""

from __future__ import annotations

from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.terms import LEARNED, TERMS, Estimate
from crossfuse.planner.families import FAMILIES
from crossfuse.planner.kernels.every import Kernel, count
from crossfuse.planner.kernels.memory import Memory
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.shape import Shape

_SHAPE = ("m", "n", "k", "l", "products", "item", "k_major")
_FIELDS = (
    "rows",
    "columns",
    "steps",
    "tiles",
    "split",
    "copies",
    "readers",
    "sums",
    "left",
    "right",
    "left_sharers",
    "right_sharers",
    "received",
)
_PHASE = (*_FIELDS, "ctas", "turns", "l2", "dsm")
_TERMS = tuple(each for each in TERMS if each != LEARNED)
_KERNEL = ("cluster", "waves", "left_stages", "right_stages", "shared")
#: Names of the columns of `features`, in their order.
NAMES = (
    "estimate",
    *(f"term {each}" for each in _TERMS),
    *(f"share {each}" for each in _TERMS),
    *(f"family {each}" for each in FAMILIES),
    *(f"shape {each}" for each in _SHAPE),
    *(f"kernel {each}" for each in _KERNEL),
    *(f"first {each}" for each in _PHASE),
    *(f"second {each}" for each in _PHASE),
)


def features(
    kernel: Kernel, shape: Shape, device: Device, estimate: Estimate, room: Memory
) -> np.ndarray:
    """Describe kernels by numbers.

    Parameters
    ----------
    kernel : Kernel
        Tiles of one candidate, or of many.
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    estimate : Estimate
        Their times, without any correction.
    room : Memory
        Shared memory of the last kernel.

    Returns
    -------
    np.ndarray
        float32 of [candidate, name], by `NAMES`. Shares of the estimate and families are from 0 to
        1; everything else is on a scale of logarithms to the base 2 of one more, times in
        microseconds.
    """
    total = np.maximum(np.asarray(estimate.microseconds, np.float64), 1e-9)
    clusters = kernel.clusters(shape, device)[-1]
    phases = kernel.phases(shape)
    raw: dict[str, Any] = {
        "estimate": total,
        **{f"term {name}": value for name, value in estimate.terms.items()},
        **{f"shape {name}": getattr(shape, name) for name in _SHAPE},
        "kernel cluster": kernel.cluster,
        "kernel waves": phases[0].tiles / np.minimum(clusters, resident(device, kernel.cluster)),
        "kernel left_stages": room.left,
        "kernel right_stages": room.right,
        "kernel shared": room.size,
    }
    for name, phase in zip(("first", "second"), phases, strict=False):
        told = _phase(phase, kernel, shape, device)
        raw |= {f"{name} {each}": value for each, value in told.items()}
    found = np.zeros((count(kernel), len(NAMES)), np.float32)
    for name, value in raw.items():
        found[:, NAMES.index(name)] = np.log2(1 + np.maximum(value, 0))
    for name, value in estimate.terms.items():
        found[:, NAMES.index(f"share {name}")] = value / total
    found[:, NAMES.index(f"family {kernel.family}")] = 1
    return found


def _phase(phase: Phase, kernel: Kernel, shape: Shape, device: Device) -> dict[str, Any]:
    ctas = phase.tiles * kernel.cluster
    right = phase.right / phase.right_sharers
    slices = (kernel.cluster - 1) * phase.rows * phase.columns * shape.item
    sent = phase.received * (phase.split - 1) / phase.split
    return {
        **{each: getattr(phase, each) for each in _FIELDS},
        "ctas": ctas,
        "turns": np.ceil(phase.tiles / resident(device, kernel.cluster)),
        "l2": ctas * phase.steps * (phase.left / phase.left_sharers + right),
        "dsm": ctas * (sent + (slices if phase.gathers else 0)),
    }
