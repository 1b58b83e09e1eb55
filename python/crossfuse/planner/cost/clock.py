"""Adds the terms of an estimate up, phase by phase."""

from __future__ import annotations

from typing import Any

from crossfuse.planner.cost.loop import Streams, overlapped
from crossfuse.planner.counts import Share


class Clock:
    """Adds terms up.

    Attributes
    ----------
    terms, busy : dict[str, Any]
        See `crossfuse.planner.cost.terms.Estimate`.
    """

    def __init__(self) -> None:
        self.terms: dict[str, Any] = {}
        self.busy: dict[str, Any] = {}

    def add(self, name: str, time: Share) -> None:
        """Add microseconds to a term."""
        self.terms[name] = self.terms.get(name, 0.0) + time

    def stream(self, name: str, time: Share) -> None:
        """Add microseconds of a stream during which no other has anything to do."""
        self.add(name, time)
        self.busy[name] = self.busy.get(name, 0.0) + time

    def loop(self, found: Streams, between: Share) -> Share:
        """Add a phase's loop; `between` of its tiles their epilogues are in the way of wgmma.

        Each stream is told by what it adds to those before it, so that all of them are the whole.
        """
        before: Share = 0.0
        even = (found.hbm, found.l2, *found.even)
        for number, name in enumerate(("hbm", "l2", "ingest", "tensor"), 1):
            after = overlapped(*even[:number])
            self.add(name, after - before)
            before = after
        whole = overlapped(found.hbm, found.l2, found.ingest, found.tensor + between)
        self.add("waves", whole - before)
        alone = (found.hbm, found.l2, found.ingest, found.tensor)
        for name, time in zip(("hbm", "l2", "ingest", "tensor"), alone, strict=True):
            self.busy[name] = self.busy.get(name, 0.0) + time
        return whole
