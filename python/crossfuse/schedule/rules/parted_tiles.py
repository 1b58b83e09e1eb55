"""Tile extents of chains whose intermediate lies in parts: given by the caller, or chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from typing import Any, ClassVar, TypeVar

from crossfuse.blocks.chain import Chain
from crossfuse.blocks.scheduled import name_of
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.families.dsm import ClusteredKernel
from crossfuse.planner.families.registers import RegisterKernel
from crossfuse.planner.kernels.arrays import Flag
from crossfuse.planner.kernels.shape import shape_of_blocks

Tiles = TypeVar("Tiles", bound="PartedTiles")


class PartedTiles(ABC):
    """Tiles of one launch, as dataclasses of the rule's extents. Zero means: choose."""

    #: The planner's kernels of these tiles.
    kind: ClassVar[type[ClusteredKernel] | type[RegisterKernel]]
    #: Name of the rule in refusals.
    rule: ClassVar[str]
    #: Alternative that refusals suggest where no division fits.
    instead: ClassVar[str]
    #: Parts of the intermediate's columns.
    parts: int
    #: Stages in shared memory; 0 for as many as fit.
    stages: int

    @property
    @abstractmethod
    def kernel(self) -> ClusteredKernel | RegisterKernel:
        """The planner's kernel of the same tiles, which computes their widths."""

    @abstractmethod
    def limit(self, chain: Chain) -> str:
        """Requirements on tiles of a chain, for refusals."""

    def in_l2(self: Tiles) -> Tiles:
        """Tiles whose parts are summed through L2, whatever the caller left open."""
        return self

    def leaves_room(self, chain: Chain, kernels: Any) -> Flag:
        """Which of many legal kernels may be chosen."""
        return True

    def complete(
        self: Tiles, sch: Any, chain: Chain, device: Device, *, several: bool = False
    ) -> Tiles:
        """Choose the sizes that the caller left open: the fastest by the planner's estimate.

        With `several`, open sizes make two parts or more that are summed through L2. The schedule
        is for messages. Refused if no division fits.
        """
        from crossfuse.planner.cost.estimate import fill_tiles

        wanted = asdict(self.in_l2() if several else self)  # type: ignore[call-overload]
        given = {name: each for name, each in wanted.items() if each and name != "stages"}
        least = 2 if several and not self.parts else 1
        found = fill_tiles(
            self.kind,
            shape_of_blocks(chain),
            device,
            given,
            lambda kernels: (kernels.parts >= least) & self.leaves_room(chain, kernels),
        )
        if found is None and several:  # what adds parts says that there is just one
            return self.complete(sch, chain, device)
        if found is None:
            raise refuse(
                ScheduleRefused,
                self.rule,
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}{chain.narrow}",
                limit=self.limit(chain),
                instead=self.instead,
            )
        return replace(self, **found.tiles())  # type: ignore[type-var]

    def width(self, chain: Chain) -> int:
        """Columns of the intermediate that a CTA makes; the last ones may reach beyond it."""
        return int(self.kernel.width(shape_of_blocks(chain)))

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements, through L2.

        Rows beyond the output are added by nobody.
        """
        return int(self.kernel.rows_of_sum(shape_of_blocks(chain)))
