"""Measures behind an RPC tracker of TVM: on a server that has a GPU, checked here.

The server needs TVM with its CUDA runtime; libraries are uploaded. Every computation is launched on
its own, with the L2 cache flushed before it, so that times are longer than those of CUDA graphs and
comparable with each other. ``python -m crossfuse.meta_schedule.rpc HOST:PORT:KEY SECONDS`` is the
program of the process that measures there; the server ends a session after these seconds.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse.bench.problem import ArrayProblem, Problem
from crossfuse.bench.worker import Session
from crossfuse.errors import EnvironmentRefused, WorkloadRefused, refuse
from crossfuse.measure.job import Job, Request, Timing
from crossfuse.measure.timer import Serve, serve_lines
from crossfuse.measure.timing import COLD_BYTES
from crossfuse.planner.families import EAGER

#: How it is measured there, see `crossfuse.bench.job.PROTOCOLS`.
PROTOCOL = "stream"


@dataclass(frozen=True)
class Tracker:
    """An RPC tracker and the key of its servers."""

    host: str
    port: int
    #: The servers are registered under it.
    key: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.key}"

    def program(self, timeout: float) -> tuple[str, ...]:
        """Command of the process that measures there, for `Conditions.measurer`.

        The server ends a session after `timeout` seconds.
        """
        program = (sys.executable, "-m", "crossfuse.meta_schedule.rpc")
        return (*program, str(self), str(max(1, round(timeout))))


def read_tracker(text: str) -> Tracker:
    """Parse ``host:port:key``; anything else is refused."""
    host, _, rest = text.partition(":")
    port, _, key = rest.partition(":")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) < 6 else 0
    if not (host and key and 0 < number < 65536):
        raise refuse(
            EnvironmentRefused,
            "rpc",
            "tracker",
            found=repr(text),
            limit="host:port:key, with a port of 1 to 65535",
            instead="name the tracker that servers were started with, such as gpu-box:9190:h100",
        )
    return Tracker(host, number, key)


class RpcSession(Session):
    """A session whose candidates run on a server; the workload stays here.

    `timeout` is in seconds, after which the server ends what it runs. The device is ``"cuda"``, or
    ``"cpu"`` for libraries of the CPU.
    """

    def __init__(self, tracker: Tracker, timeout: int, device: str = "cuda") -> None:
        super().__init__("cpu")
        self._tracker, self._timeout, self._there = tracker, timeout, device

    def load(self) -> Serve:
        """Nothing to load: torch is not needed here."""
        return self.serve

    def measure(self, request: Request, problem: Problem) -> Timing:
        """Check a candidate against float64, time it, and check it again on a server.

        Where a check failed it is ``wrong``, without a time. The family ``eager``, which has no
        library that a server could load, is refused.
        """
        job, way = request.job, request.way
        if way is None:
            raise refuse(
                WorkloadRefused,
                "rpc",
                f"family {EAGER}",
                found="a candidate without a library",
                limit="kernels of ours, which a server loads",
                instead="measure PyTorch where it is installed, with --runner local",
            )
        assert job is not None
        assert isinstance(problem, ArrayProblem), f"{problem} is no chain; `crossfuse tune` says so"
        library = Path(way.source)
        remote = self._connect()
        remote.upload(str(library), library.name)
        module, device = remote.load_module(library.name), remote.device(self._there, 0)
        arguments = _place(problem, device)
        module["main"](*arguments)
        worst, message = problem.judge(arguments[-1].numpy())
        if message:
            return Timing("wrong", message)
        times = self._times(job, module, device, arguments)
        arguments[-1].copyfrom(_nothing(problem))
        module["main"](*arguments)
        after, late = problem.judge(arguments[-1].numpy())
        if late:
            return Timing("wrong", late, worst_before=worst)
        return Timing(
            "ok",
            f"on {self._tracker}",
            statistics.median(times),
            min(times),
            worst,
            after,
            copies=1,
            calls=1,
        )

    def _connect(self) -> Any:
        from tvm import rpc

        tracker = rpc.connect_tracker(self._tracker.host, self._tracker.port)
        return tracker.request(self._tracker.key, session_timeout=self._timeout)

    def _times(self, job: Job, module: Any, device: Any, arguments: list[Any]) -> list[float]:
        """Microseconds of computations that are launched one by one."""
        flush = COLD_BYTES if job.l2 == "cold" and self._there == "cuda" else 0
        timer = module.time_evaluator(
            "main", device, number=1, repeat=job.repeats, cache_flush_bytes=flush
        )
        return [float(each) * 1e6 for each in timer(*arguments).results]


def _place(problem: Any, device: Any) -> list[Any]:
    """Inputs, and an output that holds no result yet, on the server."""
    from tvm.runtime import tensor

    arrays = [*problem.inputs.values(), _nothing(problem)]
    return [tensor(each, device) for each in arrays]


def _nothing(problem: Any) -> Any:
    """An output of NaNs, or of the largest integer, which no kernel may leave behind."""
    import numpy as np

    like = problem.limits.unfused
    if like.dtype.kind in "iu":
        return np.full(like.shape, np.iinfo(like.dtype).max, like.dtype)
    return np.full(like.shape, np.nan).astype(like.dtype)


def main() -> None:
    """Serve until standard input ends."""
    serve_lines(RpcSession(read_tracker(sys.argv[1]), int(sys.argv[2])).load)


if __name__ == "__main__":
    main()
