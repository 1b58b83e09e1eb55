"""Family ``row_sums``: a stream of threads whose rows are added up, and a kernel that adds groups.

A CTA has a group of rows, one after another, and its threads the same columns of each: what rows
add stays in registers, their elements in shared memory. So a CTA has whole rows, and as many run as
the device holds at once: the tiles say how many an SM is to hold, and the compiler keeps to it.

::

    time = stream of rows + store of each group's sums + (relaunch and merge) of each sum
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, ClassVar

from crossfuse.cascade.rewrite.tiles import SummingTiles
from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import SM_THREADS, Device
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import ROW_SUMS
from crossfuse.planner.families.family import CascadeFamily, Rule, Steps, Taken, keep_rules
from crossfuse.planner.families.stream import (
    RESERVED,
    Waves,
    shared_bytes,
    steps,
    stream_bytes,
    with_outputs,
)

_THREADS = (64, 128, 256, 512, 1024)
_UNROLLS = (1, 2, 4)
#: CTAs that an SM is to hold.
_SIDES = (1, 2, 3, 4, 6, 8)
#: Bytes of a sum.
_SUM = 4
#: Bytes of a thread in flight at most, and registers of a thread with any.
_LOADED, _MOST = 128, 255
#: Registers for each number of the state, addresses among them.
_OF_SLOT = 4
#: Part of the multiprocessors that have rows, at least: with fewer others stand idle.
_BUSY = 0.75


class RowSums(CascadeFamily[SummingTiles, Work]):
    """Threads that take in rows one after another, and add up what these make of each column."""

    name: ClassVar[str] = ROW_SUMS
    text: ClassVar[str] = "a stream of threads whose rows are added up"
    form: ClassVar[str] = "Stream of threads, rows added up"
    rule: ClassVar[str] = "stream.schedule_summing"
    kind: ClassVar[Any] = SummingTiles
    streams: ClassVar[Any] = Work
    adds_rows: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]] = ("threads", "unroll", "ctas")
    second: ClassVar[tuple[str, ...]] = ("unroll",)
    state_places: ClassVar[Mapping[str, str]] = {"registers": "states in registers"}

    def candidates(self, device: Device) -> tuple[Steps, tuple[SummingTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        groups = {side: _groups(self.work.rows, side * device.sms) for side in _SIDES}
        tried = [
            SummingTiles(threads, unroll, side, groups[side])
            for threads, unroll, side in product(_THREADS, _UNROLLS, _SIDES)
        ]
        return keep_rules(tried, _rules(self.work, device))

    def time(self, tiles: SummingTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate both kernels, without a user's own terms."""
        work, measured = self.work, rates.measured
        side = -(-tiles.groups // device.sms)
        waves = Waves(side, work.rows, tiles.groups)
        found = with_outputs(work, tiles.stream, waves, device, rates)
        partial = _SUM * tiles.groups * work.length * self.shape.sums
        terms = {
            **found.terms,
            "store": partial / measured.hbm_write,
            "relaunch": rates.fitted.relaunch * self.shape.sums,
            "merge": partial / (rates.fitted.l2 * measured.l2_read),
        }
        return Estimate(terms, found.busy)

    def preference(self, time: float, tiles: SummingTiles) -> tuple[float, ...]:
        """Order tiles of equal times: many threads of an SM, which have few sums each."""
        return (-tiles.ctas * tiles.threads, tiles.unroll, -tiles.ctas)

    def moved(self, tiles: SummingTiles, device: Device) -> dict[str, int]:
        """Bytes that both kernels move by level."""
        found = stream_bytes(self.work, tiles.stream, device)
        partial = _SUM * tiles.groups * self.work.length * self.shape.sums
        return {**found, "l2": found["l2"] + 2 * partial}

    def place_of(self, tiles: SummingTiles) -> str:
        """Describe where states, elements and sums are stored."""
        return "states in registers, elements in shared memory"

    def taken(self, tiles: SummingTiles, device: Device) -> Taken:
        """Resources of the device that the kernel of the rows takes."""
        side = -(-tiles.groups // device.sms)
        return Taken(
            tiles.groups,
            1,
            tiles.threads,
            tiles.ctas,
            summing_registers(self.work, tiles),
            shared_bytes(self.work, tiles.stream),
            round(max(1.0, tiles.groups / (side * device.sms)), 2),
        )

    def computed(self, tiles: SummingTiles) -> dict[str, int]:
        """Instructions for each element."""
        return instructions(self.work)

    def kernels(self, tiles: SummingTiles) -> tuple[str, ...]:
        """Name the launched kernels."""
        return (self.name, *("merge" for _ in range(self.shape.sums)))


def _groups(rows: int, places: int) -> int:
    """The largest divisor of the rows that is at most the number of places."""
    return next(each for each in range(min(rows, places), 0, -1) if rows % each == 0)


def summing_registers(work: Work, tiles: SummingTiles) -> int:
    """Estimate the registers of a thread: sums, and elements as they are loaded.

    What is beside them was found by asking nvcc for two CTAs of an SM: an RMS norm's gradient with
    32 sums and two vectors of three streams fits 64 registers, a layer norm's with one does not.
    """
    sums = work.summed * steps(work, tiles.stream)
    return _OF_SLOT * work.slots + sums + tiles.unroll * work.swept


def _rules(work: Work, device: Device) -> tuple[Rule[SummingTiles], ...]:
    def shared_out(tiles: SummingTiles) -> bool:
        return work.length > tiles.threads * work.vector // 2

    def loads(tiles: SummingTiles) -> bool:
        few = tiles.unroll < 2 * steps(work, tiles.stream)
        return tiles.unroll == 1 or (few and tiles.unroll * work.fetched <= _LOADED)

    def busy(tiles: SummingTiles) -> bool:
        places = min(work.rows, tiles.ctas * device.sms)
        return tiles.groups >= _BUSY * places

    def fits(tiles: SummingTiles) -> bool:
        limit = min(_MOST, device.registers // (tiles.threads * tiles.ctas))
        shared = tiles.ctas * (shared_bytes(work, tiles.stream) + RESERVED)
        return (
            summing_registers(work, tiles) <= limit
            and tiles.threads * tiles.ctas <= SM_THREADS
            and shared <= device.max_shared_bytes + RESERVED
        )

    return (
        ("threads", "no thread is without elements", shared_out),
        ("flight", f"loads in flight: what there is, and {_LOADED} bytes a thread", loads),
        ("groups", "rows that divide evenly among the CTAs that an SM is to hold", busy),
        ("fits", "registers without spills, shared memory", fits),
    )
