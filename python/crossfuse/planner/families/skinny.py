"""Family ``skinny``: one product of few rows, by plain multiply-adds without shared memory.

The tiles of `crossfuse.schedule.rules.skinny`. All that matters of such a product is that memory
always has loads to answer: threads keep some in their registers, and several CTAs stand on an SM,
of which one loads while another adds. A tensor core has nothing to win: a weight that has been
loaded is multiplied at most eight times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from crossfuse.hardware import Device, device
from crossfuse.planner.cost.estimate import (
    Clock,
    Load,
    Streams,
    Work,
    fastest,
    ingest_speed,
    memory_speed,
    overlapped,
)
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.counts import Count, Share, ceil_div, least
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.arrays import NOTHING, count, grid, read_extents, select
from crossfuse.planner.kernels.kernel import Resources, TileKernel
from crossfuse.planner.kernels.memory import Memory
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import Shape, TileRule

#: Elements of 16 bits in a load.
VECTOR = 8
_LOAD_BYTES = 16
#: Rows at most: of more, multiply-adds take longer than loads of an H200.
ROWS = 8
#: Threads of a CTA, and registers of one at most, so that two CTAs of 256 stand on an SM.
_THREADS, _REGISTERS = (128, 256), 128
#: Registers of an SM, and of a thread beside sums and operands.
_OF_SM, _BESIDE = 65536, 26
#: Threads of an SM, and CTAs.
_ON_SM, _CTAS = 2048, 32
#: Share of the time in which a thread has its loads on their way; else it adds.
_LOADING = 0.6
#: Instructions of an SM in a cycle, a thread each, and the share of these that such loops reach.
_LANES, _ISSUED = 128, 0.75
#: Instructions for each element of an operand until it is float32, and for a shuffle and its sum,
#: in times of a multiply-add.
_CONVERT, _SHUFFLE = 1.0, 5.0


@dataclass(frozen=True)
class SkinnyKernel(TileKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "skinny"
    staged_tiles: ClassVar[bool] = False
    #: Threads that share a column of the output.
    lanes: Count
    #: Columns that they sum at the same time.
    columns: Count
    #: Groups of such threads in a CTA.
    groups: Count
    #: Loads of a column that a thread has on their way at the same time.
    loads: Count

    @classmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> SkinnyKernel:
        """List all tiles."""
        return cls(*grid((8.0, 16.0, 32.0), (1.0, 2.0, 4.0), (4.0, 8.0, 16.0, 32.0), _LOADS))

    @classmethod
    def read(cls, tiles: Mapping[str, Any]) -> SkinnyKernel:
        """Make a kernel of `SkinnyTiles`."""
        return cls(*read_extents(tiles, "lanes", "columns", "groups", "loads"))

    def tiles(self) -> dict[str, Any]:
        """Fields of `SkinnyTiles`, of one candidate."""
        return {name: int(getattr(self, name)) for name in ("lanes", "columns", "groups", "loads")}

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster: each sums whole rows of the weights."""
        return 1

    @property
    def threads(self) -> Count:
        """Threads of a CTA."""
        return self.lanes * self.groups

    @property
    def width(self) -> Count:
        """Columns of a CTA."""
        return self.groups * self.columns

    @property
    def depth(self) -> Count:
        """Elements of the reduction in a step."""
        return self.lanes * self.loads * VECTOR

    def registers(self, shape: Shape) -> Count:
        """Registers of a thread: sums, weights, a vector of each row, addresses."""
        sums, weights = shape.m * self.columns, 4 * self.columns * self.loads
        return _BESIDE + sums + weights + 4 * shape.m

    def together(self, shape: Shape) -> Count:
        """CTAs that find room on an SM."""
        by_registers = _OF_SM // (self.registers(shape) * self.threads)
        return least(least(by_registers, _ON_SM // self.threads), _CTAS)

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """The only phase, whose tiles pass from memory to registers."""
        row = self.depth * shape.item
        steps, tiles = ceil_div(shape.k, self.depth), ceil_div(shape.n, self.width)
        made = shape.m * self.width * 4
        return (
            Phase(
                shape.m,
                self.width,
                1,
                self.depth,
                steps,
                tiles,
                shape.m * row,
                self.width * row,
                boxes=made,
            ),
        )

    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """CTAs of the launch: one for each tile."""
        return (ceil_div(shape.n, self.width),)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule on tiles."""
        fewest, most = _THREADS
        threads = (self.threads >= fewest) & (self.threads <= most)
        return (
            TileRule("rows", f"at most {ROWS} rows", shape.m <= ROWS),
            TileRule(
                "weights",
                "one product of weights of 16 bits, stored as [n, k]",
                shape.products == 1 and shape.item == 2 and shape.k_major,
            ),
            TileRule("threads", f"{fewest} to {most} threads", threads),
            TileRule("columns", "CTAs divide the columns", shape.n % self.width == 0),
            TileRule("reduction", "steps divide the reduction", shape.k % self.depth == 0),
            TileRule(
                "registers",
                f"{_REGISTERS} registers of a thread for sums and loads",
                self.registers(shape) <= _REGISTERS,
            ),
        )

    def broken(self, shape: Shape) -> str:
        """Name the first rule that one candidate breaks, empty if none."""
        rules = self.rules(shape, device())
        return next((f"not: {each.text}" for each in rules if not each.keeps), "")

    def memories(self, shape: Shape, device: Device) -> tuple[Memory, ...]:
        """Shared memory: sums of a tile, and no ring."""
        return (Memory(0, 0, shape.m * self.width * 4, True),)

    def resources(self, shape: Shape, device: Device) -> tuple[Resources, ...]:
        """Resources of the kernel, of one candidate."""
        (ctas,), (room,) = self.clusters(shape, device), self.memories(shape, device)
        return (
            Resources(
                int(ctas),
                1,
                int(self.threads),
                int(room.size),
                0,
                0,
                int(shape.m * self.columns),
                min(int(ctas), device.sms),
            ),
        )

    def own_streams(
        self, phase: Phase, load: Load, shape: Shape, rates: Rates, target: Device
    ) -> Streams:
        """Time what goes on at once: what memory delivers, and instructions instead of products.

        Loads on their way are answered once in a memory's latency.
        """
        sms = target.sms
        turns, even = ceil_div(phase.tiles, sms), phase.tiles / sms
        own = phase.steps * phase.right
        resident = least(self.together(shape), turns)
        waiting = _LOADING * resident * self.threads * self.columns * self.loads * _LOAD_BYTES
        answered = waiting / rates.measured.hbm
        hbm = overlapped(load.fresh / memory_speed(rates), even * own / answered)
        left = phase.tiles * phase.steps * phase.left / least(self.together(shape), turns)
        l2 = (left + load.fresh) / (rates.fitted.l2 * rates.measured.l2_read)
        ingest = own / ingest_speed(rates)
        issue = self._instructions(shape, phase) / (_ISSUED * _LANES * target.clock_mhz)
        return Streams(hbm, l2, turns * ingest, turns * issue, (even * ingest, even * issue))

    def _instructions(self, shape: Shape, phase: Phase) -> Share:
        """Instructions of all threads of a CTA for a tile, but for loads."""
        weights = self.width * phase.steps * self.depth
        converted = (1 + shape.m / self.columns) * _CONVERT
        sums = shape.m * self.width * self.lanes * (1 + np.log2(self.lanes)) * _SHUFFLE
        return weights * (shape.m + converted) + sums

    def spend(self, work: Work, clock: Clock) -> None:
        """Add the loop; its epilogue stores a number of each thread at most."""
        (phase,), (fresh,) = self.phases(work.shape), work.shape.weight_bytes
        found = self.own_streams(phase, work.load(fresh), work.shape, work.rates, work.device)
        clock.loop(found, 0.0)

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Tiles stand side by side."""
        return 0, cta, 0

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """There is none."""
        raise AssertionError("a single product has no intermediate")

    def stored_bytes(self, shape: Shape) -> int:
        """Nothing passes through L2."""
        return 0


_LOADS = (1.0, 2.0, 4.0, 8.0)


def best_tiles(shape: Shape, target: Device | None = None) -> SkinnyKernel | None:
    """Choose the tiles with the least estimated time; None where none divide the product."""
    spec = target or device()
    found = FAMILY.every(shape, spec)
    if not count(found):
        return None
    (best,), _ = fastest(found, shape, spec, rates_of(spec))
    chosen: Any = select(found, int(best))
    return chosen


FAMILY = ChainFamily(
    SkinnyKernel,
    "one product of few rows, weights straight to registers",
    products=1,
    rule="skinny.schedule_skinny",
    tiles={"tiles": "skinny.SkinnyTiles"},
    counts=False,
    named_only=True,
)
