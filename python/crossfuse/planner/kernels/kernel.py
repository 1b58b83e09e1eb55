"""Interface that kernels of every family share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from crossfuse.hardware import WARPGROUP, Device
from crossfuse.planner.kernels.memory import Memory, memory, resident
from crossfuse.planner.kernels.phase import Phase, copies_of, left_tile, right_tile, stored
from crossfuse.planner.kernels.shape import (
    NOTHING,
    Count,
    Flag,
    Shape,
    TileRule,
    all_kept,
    ceil_div,
    choose,
    has_equal_shares,
    read_extents,
)

if TYPE_CHECKING:
    from crossfuse.planner.cost.estimate import Clock, Load, Streams, Work
    from crossfuse.planner.cost.rates import Rates

_K = TypeVar("_K", bound="TileKernel")


@dataclass(frozen=True)
class Resources:
    """Resources of the device that one kernel of a candidate takes."""

    #: CTAs of the grid, and of a cluster.
    ctas: int
    cluster: int
    #: Of a CTA: warpgroups that multiply, and one that loads.
    threads: int
    #: Of a CTA.
    shared_bytes: int
    #: Stages of the rings.
    left_stages: int
    right_stages: int
    #: Float32 registers of a thread that the widest phase sums in.
    sums: int
    #: SMs that have a CTA at the same time.
    busy: int


class TileKernel(ABC):
    """Tiles of one candidate, or of many: frozen dataclasses of counts, one for each family."""

    #: Name of the family.
    family: ClassVar[str]
    #: Whether tiles pass through rings in shared memory, as those of the Hopper pipeline do. Trees
    #: have learned of no others.
    staged_tiles: ClassVar[bool] = True
    #: Its start beyond the latency of memory (`crossfuse.planner.cost.estimate.start_time`); None
    #: where that is as fitted.
    own_start: ClassVar[tuple[float, float] | None] = None
    #: Fields of the rule's tiles, in the order of the kernel's own, where all are extents.
    of_rule: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> TileKernel:
        """List all tiles of a shape before any rule, as arrays.

        Fields of the tiles that are `given` are not tried but fixed, where intermediates lie in
        parts.
        """

    @classmethod
    def read(cls: type[_K], tiles: Mapping[str, Any]) -> _K:
        """Make a kernel of the fields of its rule's tiles, the inverse of `tiles`.

        All that divide the chain must be given, else `crossfuse.schema.Damaged` is raised.
        """
        return cls(*read_extents(tiles, *cls.of_rule))

    @property
    @abstractmethod
    def cluster(self) -> Count:
        """CTAs of a cluster."""

    @abstractmethod
    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """Phases of each launched kernel; most families have one kernel."""
        return (self.phases(shape),)

    @abstractmethod
    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """Clusters that each kernel is launched with."""

    @abstractmethod
    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""

    def legal(self, shape: Shape, device: Device) -> Flag:
        """Whether the tiles keep all `rules`."""
        return all_kept(self.rules(shape, device))

    def tiles(self) -> dict[str, Any]:
        """Fields of the rule's tiles, of one candidate."""
        return {name: int(getattr(self, name)) for name in self.of_rule}

    @property
    def added_parts(self) -> Count:
        """Partial sums of the output that CTAs store and add through L2; 1 where none are."""
        return 1

    @abstractmethod
    def spend(self, work: Work, clock: Clock) -> None:
        """Add the terms of the estimate between the start and the last store."""

    @abstractmethod
    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Row and column of a CTA's tile in the first cluster, and its share of the reduction."""

    @abstractmethod
    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """Level of the intermediate of `size` bytes, and how it gets there in words."""

    def own_streams(
        self, phase: Phase, load: Load, shape: Shape, rates: Rates, target: Device
    ) -> Streams | None:
        """Time the streams of a phase's loop, if it is none of rings and tensor cores."""
        return None

    # Resources, and the bytes that move between levels.

    def memories(self, shape: Shape, device: Device) -> tuple[Memory, ...]:
        """Shared memory of each launched kernel."""
        kernels = self.kernels(shape)
        return tuple(memory(each, device, waits=self.added_parts > 1) for each in kernels)

    def fits(self, shape: Shape, device: Device) -> Flag:
        """Whether each launched kernel has shared memory for two stages of each ring."""
        found: Flag = True
        for each in self.memories(shape, device):
            found = found & np.asarray(each.fits, bool)
        return found

    def resources(self, shape: Shape, device: Device) -> tuple[Resources, ...]:
        """Resources of each launched kernel, of one candidate."""
        size = int(self.cluster)
        found = []
        launched = self.clusters(shape, device)
        rooms = self.memories(shape, device)
        for phases, clusters, room in zip(self.kernels(shape), launched, rooms, strict=True):
            found.append(
                Resources(
                    int(clusters) * size,
                    size,
                    WARPGROUP * (int(phases[0].warpgroups) + 1),
                    int(room.size),
                    int(room.left),
                    int(room.right),
                    max(int(each.sums) for each in phases),
                    min(int(clusters), int(resident(device, size))) * size,
                )
            )
        return tuple(found)

    def moved_bytes(self, shape: Shape) -> dict[str, int]:
        """Bytes that one candidate moves through L2, and between the CTAs of clusters.

        Tiles count whole, even where they reach beyond a tensor, since whole ones are loaded.
        """
        size = int(self.cluster)
        l2 = shape.m * shape.layers[-1].columns * shape.out + self.stored_bytes(shape)
        dsm = 0
        for phase in self.phases(shape):
            ctas = int(phase.tiles) * size
            left = phase.left / phase.left_sharers
            right = phase.right / phase.right_sharers
            l2 += int(ctas * phase.steps * (left + right))
            if phase.gathers:
                dsm += ctas * (size - 1) * int(phase.rows * phase.columns) * shape.item
            if phase.split > 1:
                dsm += ctas * int(phase.received * (phase.split - 1) / phase.split)
        return {"l2": l2, "dsm": dsm}

    @abstractmethod
    def stored_bytes(self, shape: Shape) -> int:
        """Bytes of what passes from phase to phase, or part to part, through L2."""


# Kernels of one launch whose intermediate never leaves its cluster, in parts of its columns.
#
# A cluster, or a CTA, makes one part of the intermediate and multiplies it at once; the sums of
# several parts are added.


class PartedKernel(TileKernel):
    """Tiles of a chain whose intermediate lies in parts of its columns."""

    #: Rows of a tile.
    rows: Count
    #: Parts of the intermediate's columns.
    parts: Count
    #: CTAs of a cluster.
    size: Count

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size

    @abstractmethod
    def tile_count(self, shape: Shape) -> Count:
        """Tiles of the output, each once for every part: one for each launched cluster."""

    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """Clusters that the kernel is launched with: one for each tile."""
        return (self.tile_count(shape),)

    def stored_bytes(self, shape: Shape) -> int:
        """Bytes of partial sums: each part stores its own, and all of them are read once."""
        if self.added_parts == 1:
            return 0
        second = self.phases(shape)[-1]
        rows = min(int(second.rows), shape.m)
        return 2 * int(second.tiles) * int(self.size) * rows * int(second.columns) * 4

    def has_room(self, shape: Shape, device: Device) -> Flag:
        """Whether clusters that wait for each other all run at once."""
        return self.tile_count(shape) <= resident(device, self.size)

    def has_equal_parts(self, shape: Shape, share: Count) -> TileRule:
        """Make the rule on parts of `share` columns of the intermediate."""
        fine = (self.parts == 1) | has_equal_shares(shape.n, self.parts, share)
        return TileRule("parts", "each part has columns of the intermediate", fine)

    def first_phase(self, shape: Shape, width: Count, readers: Count) -> Phase:
        """Make the phase in which each CTA makes `width` columns of the intermediate.

        `readers` clusters read each of the weights.
        """
        left, sharing = left_tile(self.rows, self.size)
        right, _ = right_tile(shape, width, shape.depth, 1)
        return Phase(
            self.rows,
            width,
            shape.products,
            shape.depth,
            ceil_div(shape.k, shape.depth),
            self.tile_count(shape),
            left,
            shape.products * right,
            left_sharers=sharing,
            copies=1 + shape.products * copies_of(shape, width, 1),
            readers=readers,
            functions=shape.functions,
        )

    def second_phase(self, shape: Shape, columns: Count, share: Count) -> Phase:
        """Make the phase in which each CTA multiplies `share` columns of the intermediate.

        It makes `columns` of the output.
        """
        depth = shape.depth if shape.k_major else shape.depth // 2
        steps = ceil_div(share, depth)
        boxes, _ = stored(self.rows, columns, steps, shape.out, staged=False)
        return Phase(
            self.rows,
            columns,
            1,
            depth,
            steps,
            self.tile_count(shape),
            0,
            right_tile(shape, columns, depth, 1)[0],
            copies=copies_of(shape, columns, 1),
            readers=ceil_div(shape.m, self.rows),
            boxes=choose(self.parts > 1, 0, boxes),
            functions=shape.output_functions,
        )
