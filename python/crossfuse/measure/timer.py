"""Times ways in a supervised process of its own on a GPU, so that none can harm this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec

from crossfuse.errors import EnvironmentRefused, Rule
from crossfuse.hardware import Device, device_of, find_gpus
from crossfuse.measure.job import Request, Taken, Timing, Way
from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.schema import Damaged, typed

_refused = Rule(EnvironmentRefused, "measure")

# What hangs or faults in a worker costs its process, and has no time.

#: The program that measures. It is run and not imported: it knows all ways to compute a workload,
#: which the benchmarks have.
WORKER = (sys.executable, "-m", "crossfuse.bench.worker")
#: Seconds in which a float64 reference is worked out.
REFERENCE_SECONDS = 600.0


class Measurer:
    """A process that measures one job after another, replaced whenever one may have harmed it.

    A job that hangs, dies, fails or computes something wrong costs its process, so that it cannot
    harm the next one. If others were measured there before, one of those may have done the harm, so
    it is measured once more in a process of its own. `command` starts the process, `preparing` is
    the limit of a preparation in seconds.
    """

    def __init__(
        self, command: Sequence[str] = WORKER, preparing: float = REFERENCE_SECONDS
    ) -> None:
        self._peer = Peer(command)
        self._limit = preparing
        self._prepared: Request | None = None
        #: Whether the process has measured something.
        self._used = False
        #: Preparations of which the answer is still to come.
        self._preparing = 0

    def start(self) -> None:
        """Start the process before its first request, so that imports are done by then."""
        with suppress(NoAnswer):
            self._peer.start()

    def prepare(self, request: Request) -> None:
        """Let the process prepare jobs of a workload in the meantime, as far as needs no GPU."""
        self._prepared, self._used = replace(request, measure=False), False
        # That it does not start, the measurement will find too.
        with suppress(NoAnswer):
            self._peer.send(asdict(self._prepared))
            self._preparing += 1

    def measure(self, request: Request, timeout: float) -> tuple[Timing, int]:
        """Measure a job, of the prepared workload if there is one; returns also how often.

        `timeout` is in seconds, for each measurement, until the process and its children are
        killed. Where there is no answer the timing says ``timeout`` or ``crashed``.
        """
        attempts, earlier = 0, ""
        while True:
            alone = not self._used
            start = time.perf_counter()
            timing = self._attempt(request, timeout)
            message = f"{timing.message}; {earlier}" if earlier else timing.message
            seconds = round(time.perf_counter() - start, 3)
            timing = replace(timing, message=message, seconds=seconds)
            attempts += 1
            # A baseline that is less accurate than the rule has a time, and does no harm.
            if not timing.fault or timing.microseconds is not None:
                return timing, attempts
            earlier = f"beside others it was {timing.status} at first: {timing.message}"
            # A kernel that faults leaves CUDA unusable in its process.
            self._peer.close()
            self._preparing, self._used = 0, False
            if alone or timing.status == "timeout":
                return timing, attempts

    def close(self) -> None:
        """Kill the process, for good: a measurement under way ends without another one."""
        self._peer.retire()

    def _attempt(self, request: Request, timeout: float) -> Timing:
        if self._prepared is not None and not self._preparing and not self._peer.running:
            self.prepare(self._prepared)
        self._used = True
        try:
            while self._preparing:
                self._preparing -= 1
                self._peer.receive(self._limit)
            return typed(Timing, self._peer.ask(asdict(request), timeout))
        except NoAnswer as error:
            return Timing(error.status, error.message)
        except Damaged as error:
            return Timing("crashed", f"an answer that is none: {type(error).__name__}: {error}")


# Ways of one choice, timed together.

#: Seconds for one kernel; and for what torch compiles first, which may try many kernels of its own.
SECONDS, COMPILING = 60.0, 900.0


class Timer:
    """Times ways one after another on a GPU, see `crossfuse.measure.timer.Measurer`.

    `index` is that of the GPU in CUDA, `gpu` its name as the driver has it, and `target` its name
    as a target. Limits of one answer are in seconds, see `SECONDS`.
    """

    def __init__(
        self,
        index: int,
        gpu: str,
        target: str,
        program: tuple[str, ...] = WORKER,
        seconds: float = SECONDS,
        compiling: float = COMPILING,
    ) -> None:
        self.gpu, self.target = gpu, target
        self._measurer = Measurer((*program, str(index)))
        self._limits = seconds, compiling

    def time(self, way: Way) -> Taken:
        """Time a way; whatever goes wrong is an answer without a time."""
        limit = self._limits[0] if way.mode is None else self._limits[1]
        found, _ = self._measurer.measure(Request(way=way), limit)
        if found.microseconds is not None:
            return Taken(found.microseconds, found.minimum)
        killed = found.status in ("crashed", "timeout")
        return Taken(message=f"{found.status}: {found.message}" if killed else found.message)

    def close(self) -> None:
        """Release the GPU and the process."""
        self._measurer.close()


def find_timer(index: int = 0) -> Timer:
    """The timer of a GPU by its CUDA index; refused without torch or a Hopper GPU."""
    gpus = find_gpus()
    fits = index < len(gpus) and gpus[index].capability == (9, 0)
    if fits and find_spec("torch") is not None:
        return Timer(index, gpus[index].name, device_of(gpus[index]).name)
    names = ", ".join(each.name for each in gpus) or "no CUDA device"
    raise _refused(
        "this machine",
        found="no torch" if fits else names,
        limit="torch and a GPU of compute capability 9.0",
        instead="leave measure out: the planner's estimates choose then",
    )


@contextmanager
def timing(target: Device, index: int = 0) -> Iterator[Timer]:
    """The timer of a GPU as a context; refused where the GPU is not the target of the kernels."""
    timer = find_timer(index)
    try:
        if timer.target != target.name:
            raise _refused(
                f"target {target.name}",
                found=f"{timer.gpu}, which is {timer.target}",
                limit="kernels for the GPU that measures them",
                instead="leave the target out, or measure",
            )
        yield timer
    finally:
        timer.close()
