"""Family ``skinny``: products of few rows, by plain multiply-adds without shared memory.

One product, or gate and up and what is made of both: to a thread the columns of a second weight
are more columns to sum.

The tiles of `crossfuse.schedule.rules.skinny`. All that matters of such a product is that memory
always has loads to answer: threads keep some in their registers, and several CTAs stand on an SM,
of which one loads while another adds. A tensor core has nothing to win: a weight that has been
loaded is multiplied at most eight times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from crossfuse.hardware import SM_CTAS, SM_REGISTERS, SM_THREADS, WARP, Device, device
from crossfuse.planner.cost.estimate import (
    Clock,
    Load,
    Streams,
    Work,
    fastest,
    overlapped,
)
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.kernels.arrays import (
    NOTHING,
    Count,
    Share,
    ceil_div,
    count,
    grid,
    least,
    read_extents,
    select,
)
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
#: Registers of a thread beside sums and operands: ptxas takes 14 to 24.
_BESIDE = 18
#: Instructions of an SM in a cycle, a thread each, and bytes that L1 delivers: 128 of either (CUDA
#: C++ Programming Guide, compute capability 9.0).
_LANES, _L1 = 128, 128
#: Instructions for each element of an operand until it is float32, and for a shuffle and its sum.
_CONVERT, _SHUFFLE = 1.0, 2.0
#: Cycles from a sum to the next one of the same element.
_CHAINED = 4.0

# Fitted to 199 kernels of 1, 2, 4 and 8 rows and eight shapes on an H200: 3 % off in the median.

#: What memory loses each time that half as many threads share a column, and warps read more rows.
_APART = 0.01
#: Share of the schedulers' instructions that these loops reach.
_ISSUED = 0.67
#: Time of a step's loads on their way, in latencies of memory: others stand in its queue.
_WAITING = 2.43
#: Cycles from one shuffle of a sum to the next, at the end, where nothing else goes on.
_SHUFFLED = 26.0
#: Microseconds of a start beyond the latency of memory, however many CTAs begin.
_START = (1.14, 0.0)


@dataclass(frozen=True)
class SkinnyKernel(TileKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "skinny"
    staged_tiles: ClassVar[bool] = False
    own_start: ClassVar[tuple[float, float] | None] = _START
    #: Threads that share a column of the output.
    lanes: Count
    #: Columns that they sum at the same time, of each weight.
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

    @property
    def least_resident(self) -> int:
        """CTAs of one candidate that an SM holds if threads take as many registers as they may."""
        return int(SM_REGISTERS // (_REGISTERS * self.threads))

    def registers(self, shape: Shape) -> Count:
        """Registers of a thread at least: sums, weights, a vector of each row, addresses."""
        weights = 4 * self.columns * shape.products * self.loads
        return _BESIDE + self.sums(shape) + weights + 4 * shape.m

    def sums(self, shape: Shape) -> Count:
        """Sums of a thread."""
        return shape.m * self.columns * shape.products

    def together(self, shape: Shape) -> Count:
        """CTAs that find room on an SM; ptxas loads all rows of a step ahead if it may."""
        ahead = self.registers(shape) + 4 * shape.m * (self.loads - 1)
        given = ceil_div(least(ahead, _REGISTERS), 8) * 8
        by_registers = SM_REGISTERS // (given * self.threads)
        return least(least(by_registers, SM_THREADS // self.threads), SM_CTAS)

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """The only phase, whose tiles pass from memory to registers."""
        row = self.depth * shape.item
        steps, tiles = ceil_div(shape.k, self.depth), ceil_div(shape.n, self.width)
        return (
            Phase(
                shape.m,
                self.width,
                shape.products,
                self.depth,
                steps,
                tiles,
                shape.m * row,
                self.width * shape.products * row,
                boxes=self._made(shape),
            ),
        )

    def _made(self, shape: Shape) -> Count:
        """Bytes of the sums of a tile."""
        return shape.m * self.width * shape.products * 4

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
                "weights of 16 bits, stored as [n, k]",
                shape.item == 2 and shape.k_major,
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
        return (Memory(0, 0, self._made(shape), True),)

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
                int(self.sums(shape)),
                min(int(ctas), device.sms),
            ),
        )

    def own_streams(
        self, phase: Phase, load: Load, shape: Shape, rates: Rates, target: Device
    ) -> Streams:
        """Time what goes on at once: weights from memory, rows from L1, instructions.

        An SM has the weights of a step on their way to each of its threads, and none while these
        add: memory's stream is as slow as its answers come.
        """
        turns, even = ceil_div(phase.tiles, target.sms), phase.tiles / target.sms
        clock = target.clock_mhz
        rounds = ceil_div(turns, least(self.together(shape), turns))
        step = self._step(shape, clock, _WAITING * rates.measured.hbm)
        speed = rates.measured.hbm_read * (1 - _APART * np.log2(WARP / self.lanes))
        rows = phase.steps * phase.left
        l2 = (phase.tiles * rows + load.fresh) / (rates.fitted.l2 * rates.measured.l2_read)
        # Threads of a warp that share rows of x are told them at once.
        told = rows * self.threads / WARP
        passed = (phase.steps * phase.right + told) / (_L1 * clock)
        issue = self._instructions(shape, phase) / (_ISSUED * _LANES * clock)
        return Streams(
            overlapped(load.fresh / speed, rounds * phase.steps * step),
            l2,
            turns * passed,
            turns * issue,
            (even * passed, even * issue),
        )

    def _step(self, shape: Shape, clock: int, waiting: float) -> Share:
        """Time of a step of one warp alone: its loads, and sums that wait for one another."""
        sums = np.maximum(_CHAINED, self.sums(shape))
        return waiting + self.loads * VECTOR * sums / clock

    def _instructions(self, shape: Shape, phase: Phase) -> Share:
        """Instructions of all threads of a CTA for a tile, but for loads."""
        columns = self.width * shape.products
        weights = columns * phase.steps * self.depth
        converted = (1 + shape.m / (self.columns * shape.products)) * _CONVERT
        sums = shape.m * columns * self.lanes * (1 + np.log2(self.lanes)) * _SHUFFLE
        return weights * (shape.m + converted) + sums

    def spend(self, work: Work, clock: Clock) -> None:
        """Add the loop, and the shuffles of the last CTAs."""
        (phase,), (fresh,) = self.phases(work.shape), work.shape.weight_bytes
        found = self.own_streams(phase, work.load(fresh), work.shape, work.rates, work.device)
        clock.loop(found, 0.0)
        sums = self.sums(work.shape) * np.log2(self.lanes)
        clock.add("epilogue", _SHUFFLED * sums / work.device.clock_mhz)

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Tiles stand side by side."""
        return 0, cta, 0

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """There is none."""
        raise AssertionError("products of an input alone have no intermediate")

    def stored_bytes(self, shape: Shape) -> int:
        """Nothing passes through L2."""
        return 0


_LOADS = (1.0, 2.0, 4.0, 8.0)


def together(shapes: Sequence[Shape]) -> Shape:
    """The product that has the columns of several products of the same rows.

    Whether CTAs have the columns of one weight or of another is the same to memory.
    """
    first = shapes[0]
    columns, further = sum(each.n for each in shapes), sum(each.further for each in shapes)
    return replace(first, n=columns, further=further)


def best_tiles(*shapes: Shape, target: Device | None = None) -> SkinnyKernel | None:
    """Choose the tiles with the least estimated time; None where none divide each product."""
    spec, shape = target or device(), together(shapes)
    found: Any = FAMILY.every(shape, spec)
    if not count(found):
        return None
    order, _ = fastest(found, shape, spec, rates_of(spec), count(found))
    ranked = (select(found, int(each)) for each in order)
    return next((each for each in ranked if not any(map(each.broken, shapes))), None)


FAMILY = ChainFamily(
    SkinnyKernel,
    "products of one operand of few rows, weights straight to registers",
    products=1,
    rule="skinny.schedule_skinny",
    tiles={"tiles": "skinny.SkinnyTiles"},
    counts=False,
    most_rows=ROWS,
    pairs=True,
)
