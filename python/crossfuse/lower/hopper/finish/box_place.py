"""Where the boxes of a warpgroup lie in shared memory until TMA has copied them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.memory import RingPlan
from crossfuse.lower.hopper.plan.store import StorePlan
from crossfuse.lower.hopper.statements import let, run, when
from crossfuse.lower.hopper.sync import mbarrier
from crossfuse.lower.hopper.sync.ring import Cursor, Release
from crossfuse.lower.hopper.warmup import Warmup


class BoxPlace(Protocol):
    """A warpgroup's boxes."""

    def open(self, batch: int, thread: Any) -> None:
        """Wait until boxes of a batch may be filled; all threads of the warpgroup call it."""

    def filling(self, warmup: Warmup) -> AbstractContextManager[Any]:
        """A context for statements that write boxes."""

    def address(self, offset: int, inside: Any = 0) -> Any:
        """Address of a byte in the box at an offset, see `StoreBox`."""

    def close(self, thread: Any, warmup: Warmup) -> None:
        """Hand the place back once all boxes have left, if somebody waits for that."""


@dataclass(frozen=True)
class OwnPlace:
    """A place that nothing else is in; the warm-up may fill it too.

    Attributes
    ----------
    store : StorePlan
        The boxes.
    region : Callable
        Function from a byte offset among all boxes to an address.
    pitch : int
        Bytes from the boxes of a warpgroup to those of the next.
    warpgroup : Any
        Index of the multiplying warpgroup.
    """

    store: StorePlan
    region: Callable[[Any], Any]
    pitch: int
    warpgroup: Any

    def open(self, batch: int, thread: Any) -> None:
        """Boxes that lay there before have left."""
        with when(thread == 0):
            run(ir.script.ptx.cp.async_.bulk.wait_group.read(self.store.pending(batch)))
        mbarrier.meet_warpgroup(self.warpgroup)

    def filling(self, warmup: Warmup) -> AbstractContextManager[Any]:
        """Any time."""
        return nullcontext()

    def address(self, offset: int, inside: Any = 0) -> Any:
        """Boxes lie one behind the other."""
        return self.region(self.warpgroup * self.pitch + (offset + inside))

    def close(self, thread: Any, warmup: Warmup) -> None:
        """Nobody waits for it."""


@dataclass
class PlaceInStages:
    """A warpgroup's rows of the left stages that it multiplied last.

    It multiplies all of its rows before it writes the first box, and no other warpgroup reads them.
    Stages that hold boxes are handed back when these have left: whoever loads the next left tiles
    waits, in a persistent kernel for flags anyway. In the warm-up tiles are on their way there.

    Attributes
    ----------
    store : StorePlan
        The boxes.
    ring : RingPlan
        Of left tiles.
    region : Callable
        Function from a byte offset in that ring to an address.
    warpgroup : Any
        Index of the multiplying warpgroup.
    cursor : Cursor
        Of the warpgroup, behind the stage that it multiplied last.
    release : Callable
        Writes how stages are handed back.
    """

    store: StorePlan
    ring: RingPlan
    region: Callable[[Any], Any]
    warpgroup: Any
    cursor: Cursor
    release: Callable[[], Release]
    _starts: list[Any] = field(default_factory=list)

    def open(self, batch: int, thread: Any) -> None:
        """The whole warpgroup has multiplied what lies there; pages begin with the last stage.

        Each batch has a place of its own, and the stages are those of this tile.
        """
        if batch > 0:
            return
        mbarrier.meet_warpgroup(self.warpgroup)
        share = self.warpgroup * self.store.page
        self._starts = [
            let("page", self.cursor.before(number + 1) * self.ring.pitch + share)
            for number in range(self.store.pages)
        ]

    def filling(self, warmup: Warmup) -> AbstractContextManager[Any]:
        """When the tiles there have been multiplied."""
        context: AbstractContextManager[Any] = warmup.skipped()
        return context

    def address(self, offset: int, inside: Any = 0) -> Any:
        """No box lies in two pages."""
        page, rest = divmod(offset, self.store.page)
        return self.region(self._starts[page] + (rest + inside))

    def close(self, thread: Any, warmup: Warmup) -> None:
        """Hand all stages with boxes back."""
        with warmup.skipped():
            with when(thread == 0):
                run(ir.script.ptx.cp.async_.bulk.wait_group.read(0))
            mbarrier.meet_warpgroup(self.warpgroup)
            release = self.release()
            for number in reversed(range(self.store.pages)):
                release(self.cursor.before(number + 1))
