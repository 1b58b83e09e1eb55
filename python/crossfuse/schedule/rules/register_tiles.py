"""Tile extents of chains whose intermediate stays in registers: given by the caller, or chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.planner.kernels.registers import REGISTERS, STEP, RegisterKernel
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.rules.chain import Chain

#: Registers of what is kept and the sums that it is made of, where the rule chooses: a long
#: epilogue needs some more.
_MAKING = 160
_MAX_PARTS = 32
_COLUMNS = (256, 192, 128, 96, 64, 48, 32)


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

    def complete(self, sch: Any, chain: Chain, device: Device) -> RegisterTiles:
        """Fill in what the caller left open by what takes the least time.

        Raises
        ------
        ScheduleRefused
            If no division fits.
        """
        fitting = [each for each in self._options(chain) if each.fits(chain, device)]
        # What divides leaves nothing to fill up.
        fitting = [each for each in fitting if each.divides(chain)] or fitting
        if not fitting:
            raise refuse(
                ScheduleRefused,
                "register-tiles",
                name_of(sch, chain.second),
                found=f"{chain.n} columns of the intermediate and {chain.l} of the output, "
                f"for {self}",
                limit=f"parts of a multiple of {STEP} columns, each with some of them, of at most "
                f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
                f"of a multiple of 8 that together take {REGISTERS} registers a thread; parts "
                "that all find room at the same time, or that are the CTAs of a cluster and have "
                "as many rows of a tile each",
                instead="leave tiles open, or keep the intermediate in the cluster "
                "(schedule_clustered_ffn) or in L2 (schedule_tiled_ffn)",
            )
        return min(fitting, key=lambda each: each.microseconds(chain, device))

    def _options(self, chain: Chain) -> Iterator[RegisterTiles]:
        rows = [self.rows] if self.rows else [64, 128]
        whole = [-(-chain.l // 8) * 8] if chain.l <= 256 else []
        columns = [self.columns] if self.columns else [*whole, *_COLUMNS]
        parts = [self.parts] if self.parts else self._parts(chain)
        for choice in product(rows, columns, parts):
            parts_of_choice = choice[-1]
            clusters = [self.cluster] if self.cluster else sorted({1, parts_of_choice})
            for cluster in clusters:
                yield RegisterTiles(*choice, cluster, self.stages)

    def _parts(self, chain: Chain) -> list[int]:
        """Numbers of parts that leave registers for an epilogue of any length."""
        column = len(chain.first) / 2 + 1 / 4
        return [n for n in range(1, _MAX_PARTS + 1) if column * chain.n <= _MAKING * n]

    @property
    def kernel(self) -> RegisterKernel:
        """The same tiles, whose arithmetic they are."""
        return RegisterKernel(self.rows, self.columns, self.parts, self.cluster)

    def ctas(self, chain: Chain) -> int:
        """CTAs of the kernel."""
        return -(-chain.m // self.rows) * -(-chain.l // self.columns) * self.parts

    def width(self, chain: Chain) -> int:
        """Columns of the intermediate that a CTA makes; the last part may reach beyond it."""
        return int(self.kernel.width(chain.shape))

    def divides(self, chain: Chain) -> bool:
        """Whether no part and no tile that is added reaches beyond its tensor."""
        return bool(self.kernel.divides(chain.shape))

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements, through L2.

        Rows beyond the output are added by nobody.
        """
        return int(self.kernel.rows_of_sum(chain.shape))

    def fits(self, chain: Chain, device: Device) -> bool:
        """Whether tiles fit, and every part has some of the intermediate."""
        return bool(self.kernel.legal(chain.shape, device))

    def waves(self, chain: Chain, device: Device) -> int:
        """How often the GPU is filled with CTAs."""
        clusters = -(-self.ctas(chain) // self.cluster)
        return -(-clusters // device.resident_clusters(self.cluster))

    def microseconds(self, chain: Chain, device: Device) -> float:
        """What a division costs more than another, as `ClusterTiles` counts."""
        width = self.width(chain)
        first = (self.rows + len(chain.first) * width) * chain.k
        loaded = 2 * (first + self.columns * width)
        sums = 2.5 + 0.2 * self.parts if self.parts > 1 else 0.0
        if self.cluster > 1:  # what is received is sent at half the speed of loads
            sums = 2 * self.rows * self.columns * 4 / 50e3 + (1.2 if self.cluster > 8 else 0.0)
        return self.waves(chain, device) * loaded / 50e3 + sums
