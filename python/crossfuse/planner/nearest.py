"""The fastest of many kernels by the corrected estimate, some of whose tiles may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import corrected, estimate
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.counts import Flag
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.arrays import count, flags, select
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape

#: Tiles of a family, the best by the estimate, that are corrected by trees.
_NEAR = 4000


def fastest(
    kernels: TileKernel, shape: Shape, device: Device, rates: Rates, keep: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Find at most `keep` kernels with the least corrected time: their indices, and microseconds.

    The kernels are legal tiles of one family as arrays, at least one; the fastest comes first.
    """
    # What trees say costs more than the estimate: only those near the best are worth it.
    found = with_own(estimate(kernels, shape, device, rates), rates.own, kernels, shape, device)
    times = np.asarray(found.microseconds)
    near = np.argsort(times, kind="stable")[: max(_NEAR, keep)]
    times = np.asarray(corrected(select(kernels, near), shape, device, rates).microseconds)
    order = np.argsort(times, kind="stable")[:keep]
    return near[order], times[order]


def fill_tiles(
    kind: type[TileKernel],
    shape: Shape,
    device: Device,
    given: Mapping[str, int],
    allowed: Callable[[Any], Flag],
) -> TileKernel | None:
    """Choose the tiles of a kind of kernels that a caller did not give.

    `allowed` flags those of many kernels that the rule would take, beyond those that are legal. The
    result is of plain numbers; None if no tiles are legal.
    """
    found = kind.possible(shape, given)
    found = select(found, flags(found, found.legal(shape, device)))
    if count(found):
        found = select(found, flags(found, allowed(found)))
    if not count(found):
        return None
    # Where nothing has room for two stages, the lowering says of which buffers there is too much.
    room = flags(found, found.fits(shape, device))
    found = select(found, room) if room.any() else found
    if count(found) == 1:
        return select(found, 0)
    (best,), _ = fastest(found, shape, device, rates_of(device))
    return select(found, int(best))


def family_times(
    shape: Shape, device: Device, families: Iterable[ChainFamily]
) -> tuple[tuple[str, float], ...]:
    """Microseconds of the fastest kernel of each family that has any, the fastest first."""
    rates, found = rates_of(device), []
    for family in families:
        kernels = family.every(shape, device)
        if count(kernels):
            _, times = fastest(kernels, shape, device, rates)
            found.append((family.name, float(times[0])))
    return tuple(sorted(found, key=lambda each: each[1]))
