"""Rows of the left operand that its own kernel makes, and which of its threads make them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from crossfuse.hardware import Device
from crossfuse.lower.hopper.features.feature import Feature
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.rows.chunks import RowsByChunks
from crossfuse.lower.hopper.rows.emit import RowsByWarpgroups, RowsByWarps, WholeRows
from crossfuse.lower.hopper.rows.head import RowsBesideHead
from crossfuse.lower.hopper.rows.helping import RowsWithHelp
from crossfuse.lower.hopper.rows.plan import plan_head
from crossfuse.planner.kernels.memory import BEFORE_ROWS

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import KernelPlan


@dataclass(frozen=True)
class Rows(WholeRows):
    """Whole rows, of which it is not settled yet who makes them."""

    asked_by: ClassVar = "rows"

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int]) -> Feature:
        """Of the first phase: chunk by chunk, or as whole rows."""
        phase = phases[0]
        rows = phase.program.rows
        assert rows is not None
        if phase.chunks is not None:
            maps = phase.chunks.source, phase.chunks.factors
            return RowsByChunks(phase.chunks, maps, rows.is_placed, rows.fast)
        states = 4 * rows.state_places * phase.consumers
        return cls(rows.by_warpgroups, states, rows.is_placed, rows.fast)

    def settled(self, plan: KernelPlan, device: Device) -> KernelPlan:
        """Have rows made by warps beside the loads, or by warpgroups that multiply them then.

        A CTA of one tile need not wait for others: its warpgroups make the rows of the tile
        themselves if they have waited long, see `helping`. For a second tile they would not be free
        while they wait.
        """
        # Rows that are made meanwhile, their stores and their flags would wait behind all others.
        first = min(plan.on_their_way, max(1, BEFORE_ROWS // plan.asked_for))
        known = {**vars(self), "first": first, "holds": first < plan.on_their_way}
        phase = plan.phases[0]
        alone = len(plan.phases) == 1 and phase.raises is None
        if not self.by_warpgroups:
            return self._replaced(plan, RowsByWarps(**known))
        if not alone or plan.clusters != phase.program.tiles:
            return self._replaced(plan, RowsByWarpgroups(**known))
        if first < plan.on_their_way and not plan.is_awaited_by_all:
            ctas = plan.clusters * plan.cluster_size
            head = plan_head(phase, ctas, plan.left.stages, plan.number)
            arena = plan.arena.with_region("own_rows_barrier", 8, 8)
            if head is not None and arena.size <= device.max_shared_bytes:
                made = RowsBesideHead(
                    **known, head=head, tensor_maps=(head.raw,), workspaces=(head.factors,)
                )
                return replace(self._replaced(plan, made), arena=arena)
        return self._replaced(plan, RowsWithHelp(**known))

    def _replaced(self, plan: KernelPlan, made: WholeRows) -> KernelPlan:
        features = tuple(made if each is self else each for each in plan.features)
        return replace(plan, features=features)
