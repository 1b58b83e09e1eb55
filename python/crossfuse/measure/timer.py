"""Times ways in a process of its own on a GPU, so that no way can harm this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.hardware import Device, device_of, find_gpus
from crossfuse.measure.job import Request
from crossfuse.measure.measurer import WORKER, Measurer
from crossfuse.measure.way import Taken, Way

#: Seconds for one kernel; and for what torch compiles first, which may try many kernels of its own.
SECONDS, COMPILING = 60.0, 900.0


class Timer:
    """Times ways one after another on a GPU, see `crossfuse.measure.measurer.Measurer`.

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
