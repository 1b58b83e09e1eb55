"""All kernels of a cascade as points of a search, the best by the estimate first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cached_property
from heapq import merge
from typing import Any

import numpy as np

from crossfuse.cascade.rewrite.tiles import RESIDENCES
from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.kernel import Tiles
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.space import Timed, read_tiles, tile_fields, timed
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.tune.space import Group, Space

#: Fields of tiles that are searched; the others are chosen with them.
_AXES = {
    "stream": ("threads", "unroll", "cluster", "rows", "resident"),
    "tiles": ("rows", "elements", "cluster"),
    "rows": ("rows", "columns", "cluster", "split", "across", "chunk"),
}


@dataclass(frozen=True)
class CascadeSpace(Space):
    """All kernels of a cascade that fit a device.

    Attributes
    ----------
    shape : CascadeShape
        What is computed.
    device : Device
        Its limits.
    rates : Rates
        What it does in a microsecond.
    listed : tuple[StreamTiles | CascadeTiles | RowsTiles, ...]
        The points.
    times : tuple[float, ...]
        Their estimated microseconds.
    groups : tuple[Group, ...]
        Its families.
    """

    shape: CascadeShape
    device: Device
    rates: Rates
    listed: tuple[Tiles, ...]
    times: tuple[float, ...]
    groups: tuple[Group, ...]

    @cached_property
    def prior(self) -> np.ndarray:
        """Estimated microseconds of all points."""
        return np.array(self.times)

    @cached_property
    def order(self) -> np.ndarray:
        """All points as the planner has them: of times that are equal the most usual first."""
        ranks = [range(each.first, each.first + each.size) for each in self.groups]
        return np.array(list(merge(*ranks, key=lambda point: self.times[point])))

    @cached_property
    def _numbers(self) -> dict[Tiles, int]:
        return {each: number for number, each in enumerate(self.listed)}

    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as `crossfuse.planner.cascade.plan.CascadePlan` names them."""
        return self.group(int(point)).family, tile_fields(self.listed[int(point)])

    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """The point of some tiles; None where they are not among the points."""
        if family not in self.shape.families:
            return None
        try:
            return self._numbers.get(read_tiles(family, tiles))
        except RefusedError:
            return None


def cascade_space_of(shape: CascadeShape, device: Device, rates: Rates) -> CascadeSpace:
    """List the kernels of a cascade.

    Raises
    ------
    PlanRefused
        If no tiles fit.
    """
    found: list[Timed] = []
    groups: list[Group] = []
    for family in shape.families:
        _, of_family = timed(shape, device, rates, family)
        if of_family:
            columns = _columns(family, [tiles for _, tiles in of_family])
            groups.append(Group(family, columns, len(found)))
            found += of_family
    if not found:
        raise refuse(
            PlanRefused,
            "kernel-space",
            shape.name,
            found=f"no tiles of {' or '.join(shape.families)} that fit",
            limit=f"the shared memory and registers of {device.name}",
            instead="split the cascade, or leave it to a library",
        )
    times, listed = zip(*found, strict=True)
    return CascadeSpace(shape, device, rates, listed, times, tuple(groups))


def _columns(family: str, listed: Sequence[Tiles]) -> Any:
    """The fields that are searched as arrays; places of elements as their number."""
    kind = make_dataclass("Columns", _AXES[family], frozen=True)
    rows = [[_number(getattr(tiles, name)) for name in _AXES[family]] for tiles in listed]
    return kind(*np.array(rows, np.float64).T)


def _number(value: Any) -> float:
    return float(RESIDENCES.index(value)) if isinstance(value, str) else float(value)
