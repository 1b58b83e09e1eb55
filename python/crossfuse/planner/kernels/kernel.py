"""Interface that kernels of every family share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from crossfuse.hardware import Device
from crossfuse.planner.counts import Count, Flag, ceil_div, choose
from crossfuse.planner.kernels.memory import resident
from crossfuse.planner.kernels.phase import Phase, copies_of, left_tile, right_tile, stored
from crossfuse.planner.kernels.shape import Shape, TileRule, all_kept, has_equal_shares


class TileKernel(ABC):
    """Tiles of one candidate, or of many: frozen dataclasses of counts, one for each family."""

    @property
    @abstractmethod
    def family(self) -> str:
        """Name of the family."""

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

    @abstractmethod
    def tiles(self) -> dict[str, Any]:
        """Fields of the rule's tiles, of one candidate."""


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
        )
