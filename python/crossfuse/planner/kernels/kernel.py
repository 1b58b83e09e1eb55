"""What kernels of every family say of themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from crossfuse.hardware import Device
from crossfuse.planner.counts import Count, Flag
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.rules import TileRule, all_kept
from crossfuse.planner.kernels.shape import Shape


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
        """What CTAs do, one after another."""

    def kernels(self, shape: Shape) -> tuple[tuple[Phase, ...], ...]:
        """The phases of each kernel; of most families there is one."""
        return (self.phases(shape),)

    @abstractmethod
    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """Clusters that each kernel is launched with."""

    @abstractmethod
    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """What the rule and the lowering ask of the tiles, but for shared memory."""

    def legal(self, shape: Shape, device: Device) -> Flag:
        """Whether the tiles keep all `rules`."""
        return all_kept(self.rules(shape, device))

    @abstractmethod
    def tiles(self) -> dict[str, Any]:
        """The fields of the rule's tiles, of one candidate."""
