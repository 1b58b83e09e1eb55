"""Tile extents of chains whose intermediate stays in a cluster: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.kernels.clustered import SLICE, ClusteredKernel
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.rules.chain import Chain


@dataclass(frozen=True)
class ClusterTiles:
    """How a chain is divided over clusters. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of a cluster's tile: 64 for each warpgroup that multiplies.
    cluster : int
        CTAs of a cluster: each makes a slice of the intermediate and of the output.
    parts : int
        Parts of the intermediate's columns, which different clusters make.
    stages : int
        Stages in shared memory; 0 for as many as fit.
    multiple : int
        Columns that slices of the intermediate are multiples of.
    """

    rows: int = 0
    cluster: int = 0
    parts: int = 0
    stages: int = 0
    multiple: int = field(default=SLICE, repr=False)

    def complete(
        self,
        sch: Any,
        chain: Chain,
        device: Device,
        multiple: int = SLICE,
        *,
        several: bool = False,
    ) -> ClusterTiles:
        """Fill in what the caller left open: the least time by the planner's estimate.

        Parameters
        ----------
        sch : tvm.s_tir.Schedule
            The schedule, for messages.
        chain : Chain
            What is divided.
        device : Device
            Whose clusters are counted.
        multiple : int
            Columns that slices are multiples of: whole steps of the second product in ring order.
        several : bool
            Whether parts that are left open are two or more.

        Raises
        ------
        ScheduleRefused
            If no division fits.
        """
        from crossfuse.planner.nearest import fill_tiles

        fields = {"rows": self.rows, "cluster": self.cluster, "parts": self.parts}
        given = {name: value for name, value in fields.items() if value}
        least = 2 if several and not self.parts else 1
        found = fill_tiles(
            "dsm",
            chain.shape,
            device,
            given | {"multiple": multiple},
            lambda kernels: kernels.parts >= least,
        )
        if found is None and several:  # what adds parts says that there is just one
            return self.complete(sch, chain, device, multiple)
        if found is None:
            raise refuse(
                ScheduleRefused,
                "cluster-tiles",
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}{chain.narrow}",
                limit=f"clusters with slices of multiples of {multiple} and 8 columns that "
                "find room at the same time, and parts that each have some; elements of 16 bits",
                instead="leave tiles open, or keep the intermediate in L2 (schedule_tiled_ffn)",
            )
        return ClusterTiles(**found.tiles(), stages=self.stages, multiple=multiple)

    @property
    def kernel(self) -> ClusteredKernel:
        """The same tiles, whose arithmetic they are."""
        return ClusteredKernel(self.rows, self.cluster, self.parts, self.multiple)

    def width(self, chain: Chain) -> int:
        """Columns of a slice of the intermediate; the last ones may reach beyond it."""
        return int(self.kernel.width(chain.shape))

    def share(self, chain: Chain) -> int:
        """Columns of the intermediate that a cluster makes."""
        return self.cluster * self.width(chain)

    def columns(self, chain: Chain) -> int:
        """Columns of a CTA's tile of the output; the last one may reach beyond it."""
        return int(self.kernel.columns(chain.shape))

    def pads(self, chain: Chain) -> bool:
        """Whether slices reach beyond the intermediate."""
        return self.parts * self.share(chain) > chain.n

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements.

        Rows beyond the output are added by nobody.
        """
        return int(self.kernel.rows_of_sum(chain.shape))
