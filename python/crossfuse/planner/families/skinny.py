"""Family ``skinny``: products of few rows, whose weights pass from memory to tensor cores.

One product, or gate and up and what is made of both: to a thread the columns of a second weight
are more columns to sum.

The tiles of `crossfuse.schedule.rules.skinny`. All that matters of such a product is that memory
always has loads to answer: threads keep some in their registers, and several CTAs stand on an SM,
of which one loads while another adds. Nothing of the weights passes through shared memory; rows of
the left operand come from L1, where CTAs of an SM find them, and are what more rows cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse.hardware import MMA_GROUPS, MMA_LANES, MMA_ROWS, SM_REGISTERS, WARP, Device, device
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
from crossfuse.planner.kernels.kernel import Resources, TileKernel
from crossfuse.planner.kernels.memory import Memory
from crossfuse.planner.kernels.phase import Phase
from crossfuse.planner.kernels.shape import (
    NOTHING,
    Count,
    Shape,
    Share,
    TileRule,
    ceil_div,
    count,
    grid,
    least,
    select,
    shape_of,
)

if TYPE_CHECKING:
    from crossfuse.planner.plan import Plan

#: Elements of 16 bits in a load.
VECTOR = 8
_LOAD_BYTES = 16
#: Rows at most: of more, CTAs load more of the left operand than of the weights.
ROWS = 32
#: Registers of a thread at most, so that two CTAs of 256 threads stand on an SM.
REGISTERS = 128
#: Warps that were not timed, and what others sum over in a step at least.
_FEWEST, _TIMED = 2, 4 * MMA_LANES * VECTOR
#: Loads of weights that a thread has on their way: more leave no room on an SM for the CTAs of a
#: kernel that starts early, and gain nothing.
MOST_LOADS = 8
#: Sums of a thread at most, beside what it loads: nvcc 13.0 spilt nothing at 32.
_MOST_SUMS = 32
#: Bytes that L1 delivers in a cycle (CUDA C++ Programming Guide, compute capability 9.0).
_L1 = 128

# Fitted to 349 kernels of 1 to 32 rows and ten shapes alone, and 370 of five shapes that start
# early behind sixteen of their kind, on an H200: 5.3 % off in the median.

#: What memory loses where four threads share a column, and a warp's load has 64 bytes of a row.
_APART = 0.1
#: How often L1 delivers then, of half a line each, for once where eight threads have a whole line.
_HALF_LINES = 3.6
#: Time of a step's loads on their way, in latencies of memory: others stand in its queue.
_WAITING = 1.21
#: Cycles of an SM for a pair of instructions of tensor cores.
_MULTIPLIED = 15.8
#: Cycles until the sum of one more warp is added, at the end, where nothing else goes on.
_SUMMED = 73.0
#: Microseconds of a start beyond the latency of memory, however many CTAs begin.
_START = (1.10, 0.0)

#: Microseconds of a kernel that pass while the one before it ends, where warps fill each SM and ask
#: for weights: in rows of sixteen kernels that start early, 104 of 1 to 16 rows on an H200.
_AHEAD, _FULL = 1.1, 16


@dataclass(frozen=True)
class SkinnyKernel(TileKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "skinny"
    staged_tiles: ClassVar[bool] = False
    own_start: ClassVar[tuple[float, float] | None] = _START
    of_rule: ClassVar[tuple[str, ...]] = ("lanes", "warps", "loads")
    #: Threads that share a column of the output.
    lanes: Count
    #: Warps of a CTA, which share the reduction.
    warps: Count
    #: Loads of a column that a thread has on their way at the same time.
    loads: Count

    @classmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> SkinnyKernel:
        """List all tiles."""
        return cls(*grid(_LANES, _WARPS, _LOADS))

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster: each sums whole rows of the weights."""
        return 1

    @property
    def threads(self) -> Count:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def width(self) -> Count:
        """Columns of a CTA: as many as a fragment has rows for, if four lanes share one."""
        return MMA_ROWS

    @property
    def columns(self) -> Count:
        """Columns of the output that a thread loads weights of, of each product."""
        return self.width // self.groups

    @property
    def groups(self) -> Count:
        """Groups of threads of a warp, each with columns of its own."""
        return WARP // self.lanes

    @property
    def depth(self) -> Count:
        """Elements of the reduction in a step."""
        return self.warps * self.loads * self.lanes * VECTOR

    @property
    def resident(self) -> Count:
        """CTAs that an SM holds: ptxas takes all registers to load ahead that threads may have."""
        return SM_REGISTERS // (REGISTERS * self.threads)

    def row_tiles(self, shape: Shape) -> Count:
        """Fragments that hold all rows."""
        return ceil_div(shape.m, self.most_rows)

    @property
    def most_rows(self) -> Count:
        """Rows that a fragment holds, beside those of other lanes of a column."""
        return MMA_GROUPS * MMA_LANES // self.lanes

    def fragments(self, shape: Shape) -> Count:
        """Fragments of sums of a thread: of two columns and the rows of a tile each."""
        return self.columns // 2 * shape.products * self.row_tiles(shape)

    def sums(self, shape: Shape) -> Count:
        """Sums of a thread."""
        return 4 * self.fragments(shape)

    @property
    def halved(self) -> Count:
        """Whether a warp's load has less than whole lines of the weights."""
        return self.lanes == MMA_LANES

    def row_bytes(self, shape: Shape) -> Count:
        """Bytes of rows that a warp loads with a load of the weights."""
        return self.row_tiles(shape) * WARP * _LOAD_BYTES

    def cycles(self, shape: Shape) -> Share:
        """Cycles of an SM in which a warp multiplies what it has loaded."""
        return self.fragments(shape) * _MULTIPLIED

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
                boxes=self.made(shape),
            ),
        )

    def made(self, shape: Shape) -> Count:
        """Bytes of the sums of a tile, of each warp."""
        return shape.m * self.width * shape.products * 4 * self.warps

    def clusters(self, shape: Shape, device: Device) -> tuple[Count, ...]:
        """CTAs of the launch: one for each tile."""
        return (ceil_div(shape.n, self.width),)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule on tiles."""
        return (
            TileRule("rows", f"at most {ROWS} rows", shape.m <= ROWS),
            TileRule(
                "weights",
                "weights of 16 bits, stored as [n, k]",
                shape.item == 2 and shape.k_major,
            ),
            TileRule(
                "lanes",
                f"4 lanes that share a column, or 8 with {_MOST_SUMS} sums of a thread at most",
                (self.lanes == MMA_LANES)
                | (self.lanes == 2 * MMA_LANES) & (self.sums(shape) <= _MOST_SUMS),
            ),
            TileRule(
                "warps",
                f"at most {SM_REGISTERS // (REGISTERS * WARP)} warps",
                self.resident >= 1,
            ),
            TileRule(
                "few warps",
                "2 warps only of a reduction that 4 do not divide",
                (self.warps > _FEWEST) | (shape.k % _TIMED != 0),
            ),
            TileRule(
                "loads",
                f"{MOST_LOADS} loads of a thread at a time",
                self.columns * shape.products * self.loads <= MOST_LOADS,
            ),
            TileRule("columns", "CTAs divide the columns", shape.n % self.width == 0),
            TileRule("reduction", "steps divide the reduction", shape.k % self.depth == 0),
        )

    def broken(self, shape: Shape) -> str:
        """Name the first rule that one candidate breaks, empty if none."""
        rules = self.rules(shape, device())
        return next((f"not: {each.text}" for each in rules if not each.keeps), "")

    def ahead(self, shape: Shape, device: Device) -> float:
        """Microseconds by which one candidate is done sooner that starts early, behind another.

        Weights are on their way when it may begin, as many as its warps ask for. CTAs for which
        there is no room at once ask later.
        """
        (ctas,) = self.clusters(shape, device)
        if ctas > self.resident * device.sms:
            return 0.0
        return _AHEAD * min(1.0, float(self.warps * ctas / device.sms / _FULL))

    def memories(self, shape: Shape, device: Device) -> tuple[Memory, ...]:
        """Shared memory: sums of a tile, and no ring."""
        return (Memory(0, 0, self.made(shape), True),)

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
        rounds = ceil_div(turns, least(self.resident, turns))
        speed = rates.measured.hbm_read * (1 - _APART * self.halved)
        waiting = rounds * phase.steps * _WAITING * rates.measured.hbm
        rows = phase.steps * phase.left
        l2 = (phase.tiles * rows + load.fresh) / (rates.fitted.l2 * rates.measured.l2_read)
        # Each load of a warp has all rows, or as many that are there twice.
        loads = phase.steps * self.warps * self.loads
        told = loads * self.row_bytes(shape)
        often = 1 + (_HALF_LINES - 1) * self.halved
        passed = often * (phase.steps * phase.right + told) / (_L1 * clock)
        issue = loads * self.cycles(shape) / clock
        return Streams(
            overlapped(load.fresh / speed, waiting),
            l2,
            turns * passed,
            turns * issue,
            (even * passed, even * issue),
        )

    def spend(self, work: Work, clock: Clock) -> None:
        """Add the loop, and the sums of warps of the last CTAs."""
        shape = work.shape
        (phase,), (fresh,) = self.phases(shape), shape.weight_bytes
        found = self.own_streams(phase, work.load(fresh), shape, work.rates, work.device)
        clock.loop(found, 0.0)
        clock.add("epilogue", _SUMMED * self.warps * shape.products / work.device.clock_mhz)

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Tiles stand side by side."""
        return 0, cta, 0

    def intermediate(self, shape: Shape, size: int, device: Device) -> tuple[str, str]:
        """There is none."""
        raise AssertionError("products of an input alone have no intermediate")

    def stored_bytes(self, shape: Shape) -> int:
        """Nothing passes through L2."""
        return 0


_LANES, _WARPS, _LOADS = (4.0, 8.0), (float(_FEWEST), 4.0, 8.0, 16.0), (1.0, 2.0, 4.0)


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


def behind_another(plan: Plan, target: Device) -> Plan:
    """A plan of the family with the time of a kernel that starts early, as those of a model do."""
    shape = shape_of(plan.chain, k_major=plan.k_major)
    sooner = SkinnyKernel.read(plan.tiles).ahead(shape, target)
    terms = {**plan.terms, "ahead": -sooner}
    return replace(plan, microseconds=plan.microseconds - sooner, terms=terms)


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
