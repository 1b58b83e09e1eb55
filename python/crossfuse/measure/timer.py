"""Times ways in a process of its own on a GPU, so that no way can harm this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec

from crossfuse.driver import find_gpus
from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.hardware import Device, device_of
from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.measure.way import Taken, Way

#: The program that holds the GPU. It is run and not imported: it knows the library ways to compute
#: a workload, which the benchmarks have.
PROGRAM = (sys.executable, "-m", "crossfuse.bench.ways")
#: Seconds for one kernel; and for what torch compiles first, which may try many kernels of its own.
SECONDS, COMPILING = 60.0, 900.0


class Timer:
    """A process that times ways one after another, replaced whenever one may have harmed it.

    `index` is that of the GPU in CUDA, `gpu` its name as the driver has it, and `target` its name
    as a target. Limits of one answer are in seconds, see `SECONDS`.
    """

    def __init__(
        self,
        index: int,
        gpu: str,
        target: str,
        program: tuple[str, ...] = PROGRAM,
        seconds: float = SECONDS,
        compiling: float = COMPILING,
    ) -> None:
        self.gpu, self.target = gpu, target
        self._peer = Peer((*program, str(index)))
        self._limits = seconds, compiling
        self._used = False

    def time(self, way: Way) -> Taken:
        """Time a way; whatever goes wrong is an answer without a time.

        After one that failed beside others it is tried once more by itself.
        """
        used = self._used
        found, again = self._attempt(way)
        return self._attempt(way)[0] if used and again else found

    def close(self) -> None:
        """Release the GPU and the process."""
        self._peer.close()

    def _attempt(self, way: Way) -> tuple[Taken, bool]:
        """Outcome of a way, and whether a way that was timed before may be to blame for it."""
        self._used = True
        try:
            limit = self._limits[0] if way.mode is None else self._limits[1]
            found = Taken(**self._peer.ask(asdict(way), limit))
        except NoAnswer as error:
            self._used = False
            return Taken(message=f"{error.status}: {error}"), error.status != "timeout"
        except TypeError as error:
            found = Taken(message=f"an answer that is none: {error}")
        if found.microseconds is None:
            # A kernel that faults leaves CUDA unusable in its process.
            self._peer.close()
            self._used = False
        return found, found.microseconds is None


def find_timer(index: int = 0) -> Timer:
    """The timer of a GPU by its CUDA index; refused without torch or a Hopper GPU."""
    gpus = find_gpus()
    fits = index < len(gpus) and gpus[index].capability == (9, 0)
    if fits and find_spec("torch") is not None:
        return Timer(index, gpus[index].name, device_of(gpus[index]).name)
    names = ", ".join(each.name for each in gpus) or "no CUDA device"
    raise refuse(
        EnvironmentRefused,
        "measure",
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
            raise refuse(
                EnvironmentRefused,
                "measure",
                f"target {target.name}",
                found=f"{timer.gpu}, which is {timer.target}",
                limit="kernels for the GPU that measures them",
                instead="leave the target out, or measure",
            )
        yield timer
    finally:
        timer.close()
