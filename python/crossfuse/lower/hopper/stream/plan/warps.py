"""Decides all that a kernel needs to know whose warps stream keys each by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from crossfuse.hardware import WARPGROUP, Device
from crossfuse.lower.hopper.stream.common_subexpressions import share_elements
from crossfuse.lower.hopper.stream.plan.kernel import (
    RegisterPlan,
    StreamKernel,
    TileOrder,
    order_tiles,
    plan_registers,
)
from crossfuse.lower.hopper.stream.plan.memory import Mailbox, plan_mailbox
from crossfuse.lower.hopper.stream.program import StreamProgram
from crossfuse.lower.hopper.stream.seen_keys import seen_keys
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.memory import Arena
from crossfuse.planner.kernels.stream import COLUMN_STEP, DEPTH_STEP, ROWS, WarpStream


@dataclass(frozen=True)
class WarpPlan(StreamKernel):
    """The decisions of a kernel: each CTA has one tile of rows, or shares its keys in a cluster."""

    program: StreamProgram
    size: WarpStream
    registers: RegisterPlan
    order: TileOrder
    arena: Arena
    #: CTAs that an SM holds: registers are limited accordingly.
    resident: int
    #: Layout of what CTAs of a cluster hand over; None if none share keys.
    mailbox: Mailbox | None = None
    #: None: nothing is left to a second kernel.
    states: BufferSpec | None = None
    rings: ClassVar[tuple[tuple[str, int], ...]] = ()
    readers: ClassVar[tuple[int, ...]] = ()
    tensor_maps: ClassVar[tuple[TensorMap, ...]] = ()

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.size.threads

    @property
    def consumers(self) -> int:
        """Warpgroups of a CTA, all of which multiply."""
        return self.threads // WARPGROUP

    @property
    def receives(self) -> bool:
        """Whether CTAs of a cluster hand their states to one another."""
        return self.mailbox is not None

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return 1 if self.mailbox is None else self.mailbox.size

    @property
    def clusters(self) -> int:
        """Clusters that are launched."""
        return self.order.turns

    @property
    def scores(self) -> int:
        """Registers of a thread for scores."""
        return self.size.scores

    @property
    def words(self) -> int:
        """Registers of a thread for weights of 16 bits."""
        return self.size.scores // 2

    @property
    def sums(self) -> int:
        """Registers of a thread for the second product."""
        return self.size.sums


def has_few_rows(program: StreamProgram) -> bool:
    """Whether warps multiply a stream's tiles by themselves: a warpgroup has 64 rows at least."""
    return program.tile[0] <= max(ROWS)


def plan_warps(program: StreamProgram, device: Device) -> WarpPlan:
    """Plan the kernel of a stream of few rows; refuses tiles that registers cannot take."""
    program = replace(share_elements(program), seen=seen_keys(program))
    registers, mailbox = plan_registers(program), plan_mailbox(program)
    rows, keys = program.tile
    columns, depth = program.output.columns, program.queries.columns
    size = WarpStream(rows, keys, depth, columns, registers.count)
    broken = size.broken()
    if program.beside is not None or (program.split is not None and program.split.in_memory):
        broken = "CTAs that share more, or later, than the keys of a cluster"
    if broken:
        raise refuse(
            "warp-stream",
            f"scores '{program.scores.name}'",
            found=broken,
            limit=f"tiles of {' or '.join(map(str, ROWS))} rows and 64, 128 or 256 keys, of "
            f"multiples of {DEPTH_STEP} elements with values of multiples of {COLUMN_STEP} that "
            "registers hold; clusters that merge in distributed shared memory",
            instead="take fewer keys a tile, or 64 rows, which a warpgroup multiplies",
        )
    inbox = 0 if mailbox is None else mailbox.bytes
    arena = size.arena(len(registers.rows), inbox)
    order = order_tiles(program, device)
    order = TileOrder(order.outer, order.inner, order.uneven, False, 0)
    order = replace(order, ctas=order.turns)
    resident = size.resident(arena.size, device)
    return WarpPlan(program, size, registers, order, arena, resident, mailbox)
