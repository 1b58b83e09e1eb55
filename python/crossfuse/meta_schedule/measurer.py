"""A process that measures, replaced whenever a candidate may have harmed it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from crossfuse.bench.job import Job, Timing
from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.meta_schedule.conditions import Conditions
from crossfuse.meta_schedule.preparing import REFERENCE_SECONDS


class Measurer:
    """A process that measures the candidates of one workload after another.

    A candidate that hangs, dies, fails or computes something wrong costs its process, so that it
    cannot harm the next one. If others were measured there before, one of those may have done the
    harm, so it is measured once more in a process of its own. Float64 references are read from
    `references`, or written there once they are computed.
    """

    def __init__(self, references: Path, how: Conditions) -> None:
        self._references, self._how = references, how
        self._peer = Peer(how.measurer)
        self._spec = ""
        self._used = 0
        #: Preparations of which the answer is still to come.
        self._preparing = 0

    def start(self) -> None:
        """Start the process before its first request, so that imports are done by then."""
        with suppress(NoAnswer):
            self._peer.start()

    def prepare(self, spec: str) -> None:
        """Let the process draw inputs and load the reference of a workload, without waiting."""
        self._spec, self._used = spec, 0
        request = {"do": "prepare", "spec": spec, "folder": str(self._references)}
        # That it does not start, the measurement will find too.
        with suppress(NoAnswer):
            self._peer.send(request)
            self._preparing += 1

    def measure(self, job: Job, library: Path, family: str = "") -> tuple[Timing, int]:
        """Measure a candidate of the prepared workload; returns also how often it was tried.

        The family ``eager`` has no library, see `crossfuse.meta_schedule.candidate.FAMILIES`.
        """
        attempts, earlier = 0, ""
        request = {
            "do": "measure",
            "family": family,
            "library": str(library),
            "job": job.to_json(),
        }
        while True:
            alone = self._used == 0
            start = time.perf_counter()
            timing = self._attempt(request)
            timing = replace(timing, seconds=round(time.perf_counter() - start, 3))
            attempts += 1
            self._used += 1
            if earlier:
                timing = replace(timing, message=f"{timing.message}; {earlier}")
            if not timing.fault or (family == "eager" and timing.status == "wrong"):
                return timing, attempts
            earlier = f"beside others it was {timing.status} at first: {timing.message}"
            self._peer.close()
            self._preparing = 0
            self.prepare(self._spec)
            if alone or timing.status == "timeout":
                return timing, attempts

    def close(self) -> None:
        """Kill the process, for good: a measurement under way ends without another one."""
        self._peer.retire()

    def _attempt(self, request: dict[str, Any]) -> Timing:
        try:
            while self._preparing:
                self._preparing -= 1
                message = self._peer.receive(REFERENCE_SECONDS)["message"]
                if message and not self._preparing:
                    return Timing("failed", f"while it was prepared: {message}")
            return Timing.from_json(self._peer.ask(request, self._how.timeout))
        except NoAnswer as error:
            return Timing(error.status, error.message)
        except (TypeError, KeyError) as error:
            return Timing("crashed", f"an answer that is none: {type(error).__name__}: {error}")
