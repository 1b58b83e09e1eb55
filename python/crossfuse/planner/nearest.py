"""The fastest of many kernels by the corrected estimate, some of whose tiles may be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import corrected, estimate
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.counts import Flag
from crossfuse.planner.kernels.every import Kernel, count, every, fitting, legal, possible, select
from crossfuse.planner.kernels.shape import Shape

#: Tiles of a family, the best by the estimate, that are corrected by what was learned.
_NEAR = 4000


def fastest(
    kernels: Kernel, shape: Shape, device: Device, rates: Rates, keep: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Find the kernels with the least corrected time.

    Parameters
    ----------
    kernels : Kernel
        Legal tiles of one family, as arrays; at least one.
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    rates : Rates
        What it does.
    keep : int
        How many, at most.

    Returns
    -------
    tuple[np.ndarray, np.ndarray]
        Their indices, the fastest first, and their microseconds.
    """
    # What trees say costs more than the estimate: only those near the best are worth it.
    found = with_own(estimate(kernels, shape, device, rates), rates.own, kernels, shape, device)
    times = np.asarray(found.microseconds)
    near = np.argsort(times, kind="stable")[: max(_NEAR, keep)]
    times = np.asarray(corrected(select(kernels, near), shape, device, rates).microseconds)
    order = np.argsort(times, kind="stable")[:keep]
    return near[order], times[order]


def fill_tiles(
    family: str,
    shape: Shape,
    device: Device,
    given: Mapping[str, int],
    allowed: Callable[[Any], Flag],
) -> Kernel | None:
    """Choose the tiles that a caller left open.

    Parameters
    ----------
    family : str
        ``"registers"`` or ``"dsm"``.
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    given : Mapping[str, int]
        Fields of the rule's tiles that the caller names.
    allowed : Callable
        Which of many kernels the rule would take, beyond those that are legal.

    Returns
    -------
    Kernel | None
        Plain numbers: the kernel with the least corrected time; None if no tiles are legal.
    """
    found = possible(family, shape, given)
    found = select(found, legal(found, shape, device))
    if count(found):
        found = select(found, np.broadcast_to(np.asarray(allowed(found), bool), (count(found),)))
    if not count(found):
        return None
    # Where nothing has room for two stages, the lowering says of which buffers there is too much.
    room = fitting(found, shape, device)
    found = select(found, room) if room.any() else found
    if count(found) == 1:
        return select(found, 0)
    (best,), _ = fastest(found, shape, device, rates_of(device))
    return select(found, int(best))


def family_times(
    shape: Shape, device: Device, families: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    """Microseconds of the fastest kernel of each family that has any, the fastest first.

    Parameters
    ----------
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    families : tuple[str, ...]
        Some of `crossfuse.planner.families.FAMILIES`.
    """
    rates, found = rates_of(device), []
    for family in families:
        kernels = every(family, shape, device)
        if count(kernels):
            _, times = fastest(kernels, shape, device, rates)
            found.append((family, float(times[0])))
    return tuple(sorted(found, key=lambda each: each[1]))
