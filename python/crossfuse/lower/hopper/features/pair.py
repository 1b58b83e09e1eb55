"""The two products of a tile, which a pair of CTAs makes, one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.coordinates import at
from crossfuse.lower.hopper.epilogue.store import publish_elements
from crossfuse.lower.hopper.features.feature import ConsumerPart, Ending, Feature, TileSums
from crossfuse.lower.hopper.features.split_sum import EXCHANGED, SplitReduction
from crossfuse.lower.hopper.plan.memory import Piece
from crossfuse.lower.hopper.plan.phase import PhasePlan
from crossfuse.lower.hopper.statements import branches, let, run, when
from crossfuse.planner.kernels.memory import ALIGNMENT, BARRIER

if TYPE_CHECKING:
    from crossfuse.lower.hopper.body import Body
    from crossfuse.lower.hopper.plan.operands import Operand


class Pairing(SplitReduction):
    """Push-and-multiply of the two products of a tile, which a pair of CTAs makes.

    As in a split reduction, but what is received of both CTAs stays separate for the epilogue::

        before                 push                      after
        CTA 0: gate0 gate1     CTA 0 <-- gate0, up0      CTA 0: silu(gate0) * up0
        CTA 1: up0   up1       CTA 1 <-- gate1, up1      CTA 1: silu(gate1) * up1

    The receive buffer has a place of its own: right tiles of the next phase are loaded meanwhile.
    So a CTA sends as soon as it has multiplied.
    """

    region = "paired"

    def __init__(self, sums: TileSums) -> None:
        super().__init__(sums)
        self.writer = sums.writer

    @property
    def received(self) -> Any:
        """Address of the barrier that both halves complete."""
        return self.body.barrier("pair_barrier")

    def _announce(self) -> None:
        """Nothing to wait for: nothing else lies in the buffer."""

    def end(self, values: Mapping[Any, Any], leave: Callable[[], None] | None) -> None:
        """Exchange halves, make and store this CTA's half, and raise the flag of the tile."""
        super().end(values, leave)
        if self.writer is not None:
            origin = self.plan.program.store.tile.origin
            row, column = (let("first", at(each, dict(values))) for each in origin)
            # What each thread stored is to be read by TMA.
            run(ir.script.ptx.fence.proxy.async_.global_())
            publish_elements(self.writer, self.where, self.warpgroup, (row, column), self.warmup)

    def _add(self, unit: Any, total: Any, received: Any) -> tuple[Any, ...]:
        """Both products of a unit, not added."""
        for slot, target in enumerate((total, received)):
            self._load(slot, unit, target)
        return total, received


class _Part(ConsumerPart):
    feature: Pair

    def ending(self, sums: TileSums) -> Ending | None:
        """The exchange of halves."""
        return Pairing(sums) if sums.number == self.feature.number else None

    def tile(self, number: int, places: dict[Any, Any]) -> None:
        """Announce the bytes that both CTAs will send; some may have arrived before."""
        if number == self.feature.number:
            with when(ir.script.And(self.warpgroup == 0, self.body.where.thread == 0)):
                mbarrier.expect(self.body.barrier("pair_barrier"), self.feature.size)


@dataclass(frozen=True)
class Pair(Feature):
    """Two CTAs make a product each of a tile, and exchange halves of them."""

    asked_by: ClassVar = "pairs"
    part: ClassVar = _Part
    #: Completes when both CTAs have sent their halves.
    barriers = ("pair_barrier",)
    #: The phase that they make.
    number: int
    #: Bytes of what both send to each of them.
    size: int
    behind_tiles: tuple[Piece, ...]

    @classmethod
    def of(cls, phases: tuple[PhasePlan, ...], numbers: list[int]) -> Pair:
        """Only one phase is made by pairs."""
        (number,) = numbers
        size = phases[number].exchanged_bytes
        # A place of its own: right tiles of the next phase are loaded while halves are sent.
        return cls(number, size, (Piece("paired", size, ALIGNMENT), Piece("pair_barrier", BARRIER)))

    def events_of(self, number: int) -> tuple[str, ...]:
        """Those of the exchange."""
        return EXCHANGED if number == self.number else ()

    def load_rights(
        self, body: Body, phase: PhasePlan, load: Callable[[tuple[Operand, ...]], None]
    ) -> bool:
        """Each CTA loads the right tiles of its own product."""
        if phase is not body.plan.phases[self.number]:
            return False
        exchange = phase.program.exchange
        assert exchange is not None
        with branches(body.where.places[exchange.place.var] == 0) as (one, other):
            with one:
                load(phase.rights)
            with other:
                load(phase.others)
        return True
