"""Tile extents of chains whose intermediate stays in registers: given by the caller, or chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.dataflow.counts import Count, Flag
from crossfuse.planner.kernels.registers import REGISTERS, STEP, RegisterKernel
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.rules.chain import Chain

#: Registers of what is kept and the sums that it is made of, where the rule chooses: a long
#: epilogue needs some more.
_MAKING = 160


@dataclass(frozen=True)
class RegisterTiles:
    """How a chain is divided over CTAs. Zero means: choose.

    Attributes
    ----------
    rows : int
        Rows of a CTA's tiles: 64 for each warpgroup that multiplies.
    columns : int
        Columns of a tile of the output. Each CTA makes the intermediate that it needs: where
        several tiles stand side by side, it is made several times.
    parts : int
        Parts of the intermediate's columns, which different CTAs make.
    cluster : int
        1: the parts are summed through L2. As many as parts: they are the CTAs of a cluster, which
        sum them through DSM.
    stages : int
        Stages in shared memory; 0 for as many as fit.
    """

    rows: int = 0
    columns: int = 0
    parts: int = 0
    cluster: int = 0
    stages: int = 0

    def complete(
        self, sch: Any, chain: Chain, device: Device, *, several: bool = False
    ) -> RegisterTiles:
        """Fill in what the caller left open: the least time by the planner's estimate.

        Parameters
        ----------
        sch : tvm.s_tir.Schedule
            The schedule, for messages.
        chain : Chain
            What is divided.
        device : Device
            Whose CTAs are counted.
        several : bool
            Whether what is left open makes parts that are summed through L2.

        Raises
        ------
        ScheduleRefused
            If no division fits.
        """
        from crossfuse.planner.nearest import fill_tiles

        names = ("rows", "columns", "parts", "cluster")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        if several:
            given.setdefault("cluster", 1)
        least = 2 if several and not self.parts else 1
        found = fill_tiles(
            "registers",
            chain.shape,
            device,
            given,
            lambda kernels: (kernels.parts >= least) & self._leaves_registers(chain, kernels.parts),
        )
        if found is None and several:  # what adds parts says that there is just one
            return self.complete(sch, chain, device)
        if found is None:
            raise refuse(
                ScheduleRefused,
                "register-tiles",
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}{chain.narrow}",
                limit=f"parts of a multiple of {STEP} columns, each with some of them, of at most "
                f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
                f"of a multiple of 8 that together take {REGISTERS} registers a thread; parts "
                "that all find room at the same time, or that are the CTAs of a cluster and have "
                "as many rows of a tile each; elements of 16 bits",
                instead="leave tiles open, or keep the intermediate in the cluster "
                "(schedule_clustered_ffn) or in L2 (schedule_tiled_ffn)",
            )
        return RegisterTiles(**found.tiles(), stages=self.stages)

    def _leaves_registers(self, chain: Chain, parts: Count) -> Flag:
        """Whether chosen numbers of parts leave registers for an epilogue of any length."""
        column = len(chain.first) / 2 + 1 / 4
        return bool(self.parts) | (column * chain.n <= _MAKING * parts)

    @property
    def kernel(self) -> RegisterKernel:
        """The same tiles, whose arithmetic they are."""
        return RegisterKernel(self.rows, self.columns, self.parts, self.cluster)

    def width(self, chain: Chain) -> int:
        """Columns of the intermediate that a CTA makes; the last part may reach beyond it."""
        return int(self.kernel.width(chain.shape))

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements, through L2.

        Rows beyond the output are added by nobody.
        """
        return int(self.kernel.rows_of_sum(chain.shape))
