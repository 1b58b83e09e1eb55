"""All kernels of a cascade as points of a search, the best by the estimate first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crossfuse.cascade.rewrite.tiles import RESIDENCES
from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.space import Tiles, estimate, in_order, read_tiles, tile_fields
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.tune.space import Group, Space

#: Fields of tiles that are searched; the others are chosen with them.
_AXES = {
    "stream": ("threads", "unroll", "cluster", "rows", "resident"),
    "tiles": ("rows", "elements", "cluster"),
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
    listed : tuple[StreamTiles | CascadeTiles, ...]
        The points.
    groups : tuple[Group, ...]
        Its one family.
    """

    shape: CascadeShape
    device: Device
    rates: Rates
    listed: tuple[Tiles, ...]
    groups: tuple[Group, ...]

    @cached_property
    def prior(self) -> np.ndarray:
        """Estimated microseconds of all points."""
        found = [estimate(self.shape, e, self.device, self.rates) for e in self.listed]
        return np.array([each.microseconds for each in found])

    @cached_property
    def order(self) -> np.ndarray:
        """All points as the planner has them: of times that are equal the most usual first."""
        return np.arange(len(self.listed))

    @cached_property
    def _numbers(self) -> dict[Tiles, int]:
        return {each: number for number, each in enumerate(self.listed)}

    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as `crossfuse.planner.cascade.plan.CascadePlan` names them."""
        return self.shape.family, tile_fields(self.listed[int(point)])

    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """The point of some tiles; None where they are not among the points."""
        if family != self.shape.family:
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
    _, listed = in_order(shape, device, rates)
    if not listed:
        raise refuse(
            PlanRefused,
            "kernel-space",
            shape.name,
            found=f"no tiles of {shape.family} that fit",
            limit=f"the shared memory and registers of {device.name}",
            instead="split the cascade, or leave it to a library",
        )
    return CascadeSpace(
        shape, device, rates, listed, (Group(shape.family, _columns(shape.family, listed), 0),)
    )


def _columns(family: str, listed: Sequence[Tiles]) -> Any:
    """The fields that are searched as arrays; places of elements as their number."""
    kind = make_dataclass("Columns", _AXES[family], frozen=True)
    rows = [[_number(getattr(tiles, name)) for name in _AXES[family]] for tiles in listed]
    return kind(*np.array(rows, np.float64).T)


def _number(value: Any) -> float:
    return float(RESIDENCES.index(value)) if isinstance(value, str) else float(value)
