"""Tile extents of chains whose intermediate stays in registers: given by the caller, or chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import Device
from crossfuse.schedule.facts import name_of
from crossfuse.schedule.rules.chain import Chain
from crossfuse.schedule.rules.cluster_tiles import rows_in_parts
from crossfuse.schedule.shares import has_equal_shares

#: Columns that parts of the intermediate are multiples of: a row of a tile of D.
_STEP = 64
#: Registers of a thread for what is kept, a quarter of one for each column, and for the sums of the
#: output beside it, a half for each.
_REGISTERS = 192
#: The same for what is kept and the sums that it is made of, where the rule chooses: a long
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
                limit=f"parts of a multiple of {_STEP} columns, each with some of them, of at most "
                f"{256 // len(chain.first)} (a single part: all of them), and tiles of the output "
                f"of a multiple of 8 that together take {_REGISTERS} registers a thread; parts "
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

    def ctas(self, chain: Chain) -> int:
        """CTAs of the kernel."""
        return -(-chain.m // self.rows) * -(-chain.l // self.columns) * self.parts

    def width(self, chain: Chain) -> int:
        """Columns of the intermediate that a CTA makes; the last part may reach beyond it."""
        return -(-chain.n // (self.parts * _STEP)) * _STEP

    def divides(self, chain: Chain) -> bool:
        """Whether no part and no tile that is added reaches beyond its tensor."""
        if self.parts * self.width(chain) != chain.n:
            return False
        through_l2 = self.parts > self.cluster
        whole = not through_l2 or self.rows_of_sum(chain) == min(self.rows, chain.m)
        return self.parts == 1 or (whole and chain.l % self.columns == 0)

    def rows_of_sum(self, chain: Chain) -> int:
        """Rows of a tile of which each part adds as many elements, through L2.

        Rows beyond the output are added by nobody.
        """
        return rows_in_parts(min(self.rows, chain.m), self.columns, self.parts)

    def fits(self, chain: Chain, device: Device) -> bool:
        """Whether tiles fit, and every part has some of the intermediate."""
        width = self.width(chain)
        if width > 256 // len(chain.first) or width // 4 + self.columns // 2 > _REGISTERS:
            return False
        if self.columns % 8 or self.columns > 256:
            return False
        if self.parts == 1:  # nothing tells that its only tile is wider than the intermediate
            return self.cluster == 1 and self.divides(chain)
        if not has_equal_shares(chain.n, self.parts, width):
            return False
        if self.cluster > 1:
            return self._fits_cluster(chain, device)
        return self.rows_of_sum(chain) <= self.rows and self.waves(chain, device) == 1

    def _fits_cluster(self, chain: Chain, device: Device) -> bool:
        """Whether the CTAs of a cluster make all parts, and sum slices of a tile."""
        size, rows = self.cluster, min(self.rows, chain.m)
        # Slices are whole rows of a tile, or equal parts of the only one. They lie within the tile
        # that is multiplied, and the last ones may end before.
        within = rows % size == 0 or -(-chain.m // size) * size <= self.rows
        equal = self.columns % (2 * size) == 0 if rows == 1 else within
        return size == self.parts and size <= device.max_cluster and equal

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
