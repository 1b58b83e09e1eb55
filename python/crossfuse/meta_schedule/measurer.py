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
    cannot harm the next one. If others were measured there before, it may have been one of those
    that did harm, so it is measured once more in a process of its own.

    Parameters
    ----------
    references : pathlib.Path
        Where float64 references are, or are kept once they are worked out.
    how : Conditions
        How: limits of time, and the program.
    """

    def __init__(self, references: Path, how: Conditions) -> None:
        self._references, self._how = references, how
        self._peer = Peer(how.measurer)
        self._spec = ""
        self._used = 0
        #: Preparations of which the answer is still to come.
        self._preparing = 0

    def start(self) -> None:
        """Start the process ahead of its first request."""
        with suppress(NoAnswer):
            self._peer.start()

    def prepare(self, spec: str) -> None:
        """Let the process draw inputs and load the reference of a workload; does not wait.

        Parameters
        ----------
        spec : str
            The workload of the measurements to come.
        """
        self._spec, self._used = spec, 0
        request = {"do": "prepare", "spec": spec, "folder": str(self._references)}
        # That it does not start, the measurement will find too.
        with suppress(NoAnswer):
            self._peer.send(request)
            self._preparing += 1

    def measure(self, job: Job, library: Path, family: str = "") -> tuple[Timing, int]:
        """Measure a candidate of the workload that was prepared.

        Parameters
        ----------
        job : Job
            How.
        library : pathlib.Path
            Where it is built.
        family : str
            See `crossfuse.meta_schedule.candidate.FAMILIES`; ``eager`` has no library.

        Returns
        -------
        Timing
            What was measured, or what went wrong.
        int
            How many times it was tried.
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
        """Kill the process."""
        self._peer.close()

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
