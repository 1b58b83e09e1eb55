"""All kernels of a chain as points, with the steps that lead from one to the next.

A point is a number. Points of a family are the legal tiles of `crossfuse.planner.kernels.every`;
along each field of the tiles a step goes to the next value up or down, or on and off. Where no
legal tiles differ in that field alone, the step goes to the nearest ones that do::

    registers   rows=64 columns=256 parts=8  size=8      a step of parts up:
             -> rows=64 columns=256 parts=12 size=12     sizes are 1 or as many as parts

A step of the family goes to the nearest tiles of another place for the intermediate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from crossfuse.errors import PlanRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.planner.cost.corrected import corrected
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.kernels.every import Kernel, count, every, families, select
from crossfuse.planner.kernels.read import read_kernel
from crossfuse.planner.kernels.shape import Shape

#: Fields that are the same for all kernels of a family.
_FIXED = ("place", "multiple")
#: Fields that divide the second phase: a crossover takes them from the other parent.
_SECOND = {
    "registers": ("columns",),
    "dsm": ("parts",),
    "l2": ("columns2", "split2"),
    "global": ("columns2", "split2"),
    "gemm": ("columns",),
}


class Move(NamedTuple):
    """A step: from which family, along which field, and up, down, or to which family."""

    family: str
    axis: str
    way: str


@dataclass(frozen=True)
class Group:
    """The points of one family.

    Attributes
    ----------
    family : str
        Its name.
    kernels : Kernel
        Arrays with an entry for each point.
    first : int
        Number of the first of them.
    """

    family: str
    kernels: Kernel
    first: int

    @cached_property
    def size(self) -> int:
        """Points."""
        return count(self.kernels)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Fields of the tiles that can differ."""
        return tuple(each.name for each in fields(self.kernels) if each.name not in _FIXED)

    @cached_property
    def values(self) -> np.ndarray:
        """Fields of all points, as [axis, point]."""
        columns = [np.broadcast_to(getattr(self.kernels, each), self.size) for each in self.axes]
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
        """The entry whose fields are these."""
        return self._entries.get(tuple(values))

    def nearest(self, wanted: Mapping[str, float], pinned: str = "") -> int | None:
        """The entry nearest to some fields; that named `pinned` must be equal."""
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


@dataclass(frozen=True)
class KernelSpace:
    """All kernels of a chain that fit a device.

    Attributes
    ----------
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    rates : Rates
        What it does in a microsecond.
    groups : tuple[Group, ...]
        Families that have points.
    """

    shape: Shape
    device: Device
    rates: Rates
    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return sum(each.size for each in self.groups)

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

    @cached_property
    def order(self) -> np.ndarray:
        """All points, by estimated time."""
        return np.argsort(self.prior, kind="stable")

    def group(self, point: int) -> Group:
        """The family of a point."""
        return next(each for each in reversed(self.groups) if point >= each.first)

    def by_group(self, points: Sequence[int] | np.ndarray) -> list[tuple[Group, np.ndarray]]:
        """Places in `points` of those of each family that is among them."""
        given = np.asarray(points, np.int64)
        found = []
        for each in self.groups:
            (here,) = np.nonzero((given >= each.first) & (given < each.first + each.size))
            if here.size:
                found.append((each, here))
        return found

    def kernel(self, point: int) -> Kernel:
        """The kernel of one point, of plain numbers."""
        group = self.group(point)
        return select(group.kernels, int(point) - group.first)

    def tiles(self, point: int) -> tuple[str, dict[str, Any]]:
        """Family and tiles, as `crossfuse.planner.plan.Plan` names them."""
        kernel = self.kernel(point)
        return kernel.family, kernel.tiles()

    def find(self, family: str, tiles: Mapping[str, Any]) -> int | None:
        """The point of some tiles; None where they are not among the points."""
        try:
            kernel = read_kernel(family, tiles)
        except RefusedError:
            return None
        for group in self.groups:
            if group.family == family:
                entry = group.entry(float(getattr(kernel, each)) for each in group.axes)
                return None if entry is None else entry + group.first
        return None

    def ways(self, point: int) -> list[Move]:
        """The steps that there may be from a point."""
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
        """Where a step leads; None where nothing is."""
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
        """All steps from a point, and where they lead."""
        found = {each: self.follow(point, each) for each in self.ways(point)}
        return {move: to for move, to in found.items() if to is not None}

    def cross(self, one: int, other: int) -> int:
        """The point nearest to the first phase of one, and the second phase of another."""
        group, second = self.group(one), self.group(other)
        wanted = group.fields_of(one - group.first)
        given = second.fields_of(other - second.first)
        names = _SECOND[group.family]
        wanted |= {name: value for name, value in given.items() if name in names}
        found = group.nearest(wanted)
        assert found is not None
        return found + group.first


def space_of(
    shape: Shape, device: Device, rates: Rates, *, only: Sequence[str] = ()
) -> KernelSpace:
    """List the kernels of a chain.

    Parameters
    ----------
    shape : Shape
        What is computed.
    device : Device
        Its limits.
    rates : Rates
        What it does in a microsecond.
    only : Sequence[str]
        Families; all that there are where it is empty.

    Returns
    -------
    KernelSpace
        At least one point.

    Raises
    ------
    PlanRefused
        If no tiles fit.
    """
    groups: list[Group] = []
    first = 0
    for family in families(shape):
        if only and family not in only:
            continue
        group = Group(family, every(family, shape, device), first)
        if group.size:
            groups.append(group)
            first += group.size
    if not groups:
        raise refuse(
            PlanRefused,
            "kernel-space",
            f"chain of {shape.m} x {shape.k} x {shape.n} x {shape.l}",
            found=f"no tiles of {', '.join(only) or 'any family'} that fit",
            limit=f"the shared memory, registers and resident clusters of {device.name}",
            instead="leave `only` out, or leave the chain to a library",
        )
    return KernelSpace(shape, device, rates, tuple(groups))
