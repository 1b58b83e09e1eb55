"""All kernels of a chain as points, with the steps that lead from one to the next.

A point is a number. Points of a family are the legal tiles of their families;
along each field of the tiles a step goes to the next value up or down, or on and off. Where no
legal tiles differ in that field alone, the step goes to the nearest ones that do::

    registers   rows=64 columns=256 parts=8  size=8      a step of parts up:
             -> rows=64 columns=256 parts=12 size=12     sizes are 1 or as many as parts

A step of the family goes to the nearest tiles of another place for the intermediate.
"""

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
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.families.cascade import Timed
from crossfuse.planner.families.registry import (
    CASCADE_FAMILIES,
    cascade_families,
    families,
    read_kernel,
    read_tiles,
)
from crossfuse.planner.kernels.arrays import entries, select
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape
from crossfuse.planner.tune.space import Group, Space


@dataclass(frozen=True)
class KernelSpace(Space):
    """All kernels of a chain that fit a device."""

    shape: Shape
    device: Device
    rates: Rates
    #: Families that have points.
    groups: tuple[Group, ...]

    @cached_property
    def prior(self) -> np.ndarray:
        """Estimated microseconds of all points."""
        found = [
            np.broadcast_to(
                corrected(each.kernels, self.shape, self.device, self.rates).microseconds, each.size
            )
            for each in self.groups
        ]
        return np.concatenate(found)

    def kernel(self, point: int) -> TileKernel:
        """Kernel of one point, of plain numbers."""
        group = self.group(point)
        return select(group.kernels, int(point) - group.first)

    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as `crossfuse.planner.plan.Plan` names them."""
        kernel = self.kernel(point)
        return kernel.family, kernel.tiles()

    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """Find the point of some tiles; None where they are not among the points."""
        try:
            kernel = read_kernel(family, tiles)
        except RefusedError:
            return None
        for group in self.groups:
            if group.family == family:
                known = entries(kernel)
                entry = group.entry(float(known[each]) for each in group.axes)
                return None if entry is None else entry + group.first
        return None


def space_of(
    shape: Shape, device: Device, rates: Rates, *, only: Sequence[str] = ()
) -> KernelSpace:
    """List the kernels of a chain, of the families `only` or of all; refused if no tiles fit."""
    groups: list[Group] = []
    first = 0
    for family in families(shape):
        if only and family.name not in only:
            continue
        group = Group(family.name, family.every(shape, device), first, family.second)
        if group.size:
            groups.append(group)
            first += group.size
    if not groups:
        raise refuse(
            PlanRefused,
            "kernel-space",
            f"chain of {shape.text}",
            found=f"no tiles of {', '.join(only) or 'any family'} that fit",
            limit=f"the shared memory, registers and resident clusters of {device.name}",
            instead="leave `only` out, or leave the chain to a library",
        )
    return KernelSpace(shape, device, rates, tuple(groups))


# All kernels of a cascade as points of a search, the best by the estimate first.


@dataclass(frozen=True)
class CascadeSpace(Space):
    """All kernels of a cascade that fit a device."""

    shape: CascadeShape
    device: Device
    rates: Rates
    #: The points, and their estimated microseconds.
    listed: tuple[Any, ...]
    times: tuple[float, ...]
    #: Families that have points.
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
    def _numbers(self) -> dict[Any, int]:
        return {each: number for number, each in enumerate(self.listed)}

    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as `crossfuse.planner.cascade.plan.CascadePlan` names them."""
        family = CASCADE_FAMILIES[self.group(int(point)).family]
        return family.name, family.fields(self.listed[int(point)])

    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """Find the point of some tiles; None where they are not among the points."""
        if family not in (each.name for each in cascade_families(self.shape)):
            return None
        try:
            return self._numbers.get(read_tiles(family, tiles))
        except RefusedError:
            return None


def cascade_space_of(shape: CascadeShape, device: Device, rates: Rates) -> CascadeSpace:
    """List the kernels of a cascade; refused if no tiles fit."""
    found: list[Timed[Any]] = []
    groups: list[Group] = []
    families = cascade_families(shape)
    for family in families:
        _, of_family = family.timed(device, rates)
        if of_family:
            columns = _columns(family.axes, [tiles for _, tiles in of_family])
            groups.append(Group(family.name, columns, len(found), family.second))
            found += of_family
    if not found:
        raise refuse(
            PlanRefused,
            "kernel-space",
            shape.name,
            found=f"no tiles of {' or '.join(each.name for each in families)} that fit",
            limit=f"the shared memory and registers of {device.name}",
            instead="split the cascade, or leave it to a library",
        )
    times, listed = zip(*found, strict=True)
    return CascadeSpace(shape, device, rates, listed, times, tuple(groups))


def _columns(axes: Sequence[str], listed: Sequence[Any]) -> Any:
    """Convert the fields that are searched to arrays; places of elements as their number."""
    kind = make_dataclass("Columns", axes, frozen=True)
    rows = [[_number(getattr(tiles, name)) for name in axes] for tiles in listed]
    return kind(*np.array(rows, np.float64).T)


def _number(value: Any) -> float:
    return float(RESIDENCES.index(value)) if isinstance(value, str) else float(value)
