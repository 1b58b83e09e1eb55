"""All kernels of a chain as points, with the steps that lead from one to the next.

A point is a number. Points of a family are the legal tiles of their families;
along each field of the tiles a step goes to the next value up or down, or on and off. Where no
legal tiles differ in that field alone, the step goes to the nearest ones that do::

    registers   rows=64 columns=256 parts=8  size=8      a step of parts up:
             -> rows=64 columns=256 parts=12 size=12     sizes are 1 or as many as parts

A step of the family goes to the nearest tiles of another place for the intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import cached_property
from heapq import merge
from typing import Any, NamedTuple

import numpy as np

from crossfuse.cascade.rewrite.tiles import RESIDENCES
from crossfuse.errors import PlanRefused, RefusedError, Rule
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.families.family import Timed
from crossfuse.planner.families.registry import (
    CASCADE_FAMILIES,
    cascade_families,
    families,
    read_kernel,
    read_tiles,
)
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, count, entries, select

_refused = Rule(PlanRefused, "kernel-space")

# Points of a search, family by family, and the steps from one to another.


class Move(NamedTuple):
    """A step: from which family, along which field, and up, down, or to which family."""

    family: str
    axis: str
    way: str


@dataclass(frozen=True)
class Group:
    """The points of one family."""

    family: str
    #: A dataclass of arrays with an entry for each point.
    kernels: Any
    #: Number of the first point.
    first: int
    #: Fields that divide the second phase: a crossover takes them from the other parent.
    second: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Number of points."""
        return count(self.kernels)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Fields of the tiles that can differ."""
        return tuple(entries(self.kernels))

    @cached_property
    def values(self) -> np.ndarray:
        """Fields of all points, as [axis, point]."""
        known = entries(self.kernels)
        columns = [np.broadcast_to(known[each], self.size) for each in self.axes]
        return np.array(columns, np.float64)

    @cached_property
    def places(self) -> np.ndarray:
        """`values` on scales on which a factor of two is 1, as is a flag."""
        return np.log2(1 + self.values).astype(np.float32)

    @cached_property
    def known(self) -> tuple[np.ndarray, ...]:
        """Values of each field, ascending."""
        return tuple(np.unique(each) for each in self.values)

    @cached_property
    def _entries(self) -> dict[tuple[float, ...], int]:
        return {each: number for number, each in enumerate(map(tuple, self.values.T.tolist()))}

    @cached_property
    def _with(self) -> dict[tuple[int, float], np.ndarray]:
        return {}

    def fields_of(self, entry: int) -> dict[str, float]:
        """Fields of the tiles of one entry."""
        return dict(zip(self.axes, self.values[:, entry].tolist(), strict=True))

    def entry(self, values: Iterable[float]) -> int | None:
        """Find the entry whose fields are these."""
        return self._entries.get(tuple(values))

    def nearest(self, wanted: Mapping[str, float], pinned: str = "") -> int | None:
        """Find the entry nearest to some fields; that named `pinned` must be equal."""
        axes = [number for number, each in enumerate(self.axes) if each in wanted]
        if not self.size or not axes:
            return None
        aims = [wanted[self.axes[each]] for each in axes]
        exact = self.entry(aims) if len(axes) == len(self.axes) else None
        if exact is not None:
            return exact
        among = self._equal(self.axes.index(pinned), wanted[pinned]) if pinned else None
        places = self.places[axes] if among is None else self.places[axes][:, among]
        if not places.shape[1]:
            return None
        aimed = np.log2(1 + np.array(aims, np.float32))[:, None]
        best = int(np.argmin(np.abs(places - aimed).sum(0)))
        return best if among is None else int(among[best])

    def _equal(self, row: int, value: float) -> np.ndarray:
        """Entries with one value of one field."""
        if (row, value) not in self._with:
            (self._with[row, value],) = np.nonzero(self.values[row] == value)
        return self._with[row, value]


class Space(ABC):
    """All kernels of a workload, numbered: families one after another.

    Subclasses are dataclasses with `groups`, the families that have points.
    """

    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return sum(each.size for each in self.groups)

    @property
    @abstractmethod
    def prior(self) -> np.ndarray:
        """Estimated microseconds of all points."""

    @abstractmethod
    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as plans name them."""

    @abstractmethod
    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """Find the point of some tiles; None where they are not among the points."""

    @cached_property
    def order(self) -> np.ndarray:
        """All points, by estimated time."""
        return np.argsort(self.prior, kind="stable")

    def group(self, point: int) -> Group:
        """Find the family of a point."""
        return next(each for each in reversed(self.groups) if point >= each.first)

    def ranked(self, group: Group, count: int) -> list[int]:
        """The best `count` points of a family by the estimate."""
        order = self.order
        inside = order[(order >= group.first) & (order < group.first + group.size)]
        return [int(each) for each in inside[:count]]

    def by_group(self, points: Sequence[int] | np.ndarray) -> list[tuple[Group, np.ndarray]]:
        """Places in `points` of those of each family that is among them."""
        given = np.asarray(points, np.int64)
        found = []
        for each in self.groups:
            (here,) = np.nonzero((given >= each.first) & (given < each.first + each.size))
            if here.size:
                found.append((each, here))
        return found

    def ways(self, point: int) -> list[Move]:
        """Steps that may be possible from a point."""
        group = self.group(point)
        found = []
        for axis, known, value in zip(
            group.axes, group.known, group.values[:, point - group.first], strict=True
        ):
            found += [Move(group.family, axis, "up")] if value < known[-1] else []
            found += [Move(group.family, axis, "down")] if value > known[0] else []
        others = [each.family for each in self.groups if each is not group]
        return found + [Move(group.family, "family", each) for each in others]

    def follow(self, point: int, move: Move) -> int | None:
        """Point that a step leads to; None where there is none."""
        group = self.group(point)
        here = group.fields_of(point - group.first)
        if move.axis == "family":
            (group,) = (each for each in self.groups if each.family == move.way)
            to = group.nearest(here)
        else:
            known = group.known[group.axes.index(move.axis)]
            rank = int(np.searchsorted(known, here[move.axis]))
            value = float(known[rank + (1 if move.way == "up" else -1)])
            to = group.nearest({**here, move.axis: value}, move.axis)
        return None if to is None else to + group.first

    def moves(self, point: int) -> dict[Move, int]:
        """All steps from a point, and the points that they lead to."""
        found = {each: self.follow(point, each) for each in self.ways(point)}
        return {move: to for move, to in found.items() if to is not None}

    def cross(self, one: int, other: int) -> int:
        """Find the point nearest to the first phase of one, and the second phase of another."""
        group, second = self.group(one), self.group(other)
        wanted = group.fields_of(one - group.first)
        given = second.fields_of(other - second.first)
        wanted |= {name: value for name, value in given.items() if name in group.second}
        found = group.nearest(wanted)
        assert found is not None
        return found + group.first


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
        raise _refused(
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
        raise _refused(
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
