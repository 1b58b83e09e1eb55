"""Compiles candidates to libraries, many at once; whatever goes wrong is returned as text.

``python -m crossfuse.meta_schedule.build`` is the program of a process that compiles, and computes
float64 references; neither needs a GPU.
"""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from crossfuse._discovery import without_torch
from crossfuse.bench.job import OURS
from crossfuse.errors import RefusedError
from crossfuse.hardware import device
from crossfuse.measure.job import LIBRARY, Job, Request, Way
from crossfuse.measure.timer import REFERENCE_SECONDS, WORKER, NoAnswer, Peer, Serve, serve_lines
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.planner.families import EAGER
from crossfuse.schema import typed

#: Longest text of an error that is kept.
LONGEST = 4000


@dataclass(frozen=True)
class Build:
    """Outcome of a compilation."""

    #: ``ok``; ``refused`` where there is no such kernel; ``failed`` for any other exception,
    #: ``timeout`` and ``crashed`` where its process was killed or ended.
    status: str
    #: Why there is no library.
    message: str = ""
    #: Wall time.
    seconds: float = 0.0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shared_object(folder: Path, candidate: Candidate) -> Path:
    """Path of a candidate's library in a folder."""
    return folder / "libraries" / f"{candidate.id}.so"


def build_candidate(candidate: Candidate, folder: Path, target: str, timeout: float) -> Build:
    """Schedule, lower and compile a candidate, unless its library is there already.

    It never raises: a candidate that does not compile is an answer too. The timeout is in seconds,
    for nvcc.
    """
    start = time.perf_counter()
    try:
        if candidate.family != EAGER and not _is_built(shared_object(folder, candidate)):
            _build(candidate, folder, target, timeout)
        found = Build("ok")
    except RefusedError as error:
        found = Build("refused", str(error)[:LONGEST])
    except Exception as error:
        found = Build("failed", f"{type(error).__name__}: {error}"[:LONGEST])
    return Build(found.status, found.message, round(time.perf_counter() - start, 2))


def _is_built(path: Path) -> bool:
    """Whether library and manifest are both there: the manifest is written last."""
    return path.is_file() and path.with_suffix(".json").is_file()


def _build(candidate: Candidate, folder: Path, target: str, timeout: float) -> None:
    from crossfuse.lower.extract import lower
    from crossfuse.meta_schedule.candidate import schedule_candidate
    from crossfuse.runtime import build_library

    spec = device(target)
    lowered = lower(schedule_candidate(candidate, spec), spec, name="main")
    build_library(
        lowered.image,
        shared_object(folder, candidate),
        device=spec,
        metadata={"candidate": candidate.to_json()},
        timeout=timeout,
    )


# How candidates are built and measured.

#: Program of a process that compiles.
BUILDER = (sys.executable, "-m", "crossfuse.meta_schedule.build")


@dataclass(frozen=True)
class Conditions:
    """How candidates are built and measured; times are in seconds."""

    #: Device to compile for.
    target: str = "nvidia-h100"
    #: Cache, protocol, repeats and calls; its spec and variant do not matter.
    job: Job = field(default_factory=lambda: Job("", OURS))
    #: For one measurement.
    timeout: float = 30.0
    #: For one compilation.
    build_timeout: float = 300.0
    #: Processes that compile.
    builders: int = 1
    #: Name of the device, for the records.
    gpu: str = ""
    #: Program of the processes that compile.
    builder: tuple[str, ...] = BUILDER
    #: Program of the processes that measure, see `crossfuse.bench.worker`.
    measurer: tuple[str, ...] = WORKER

    def job_of(self, candidate: Candidate) -> Job:
        """The job of one candidate; kernels of ours have no time where they are wrong."""
        variant = "eager" if candidate.family == EAGER else OURS
        return replace(self.job, spec=candidate.spec, variant=variant)

    def request(self, candidate: Candidate, folder: Path) -> Request:
        """The request to measure one candidate, whose library lies in a folder."""
        job, library = self.job_of(candidate), shared_object(folder, candidate)
        way = None if candidate.family == EAGER else Way(LIBRARY, str(library))
        return Request(job, way, str(references(folder)))


def references(folder: Path) -> Path:
    """Folder of float64 references."""
    return folder / "references"


# Compiles candidates in several processes at once, and computes their references.

#: Each process has a core; its libraries are not to take those of the others.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: Seconds after nvcc's own limit in which a process may still answer.
_GRACE = 30.0


@dataclass
class Group:
    """Candidates of one workload."""

    spec: str
    candidates: list[Candidate]
    #: Outcomes of the builds, by the candidate's id.
    builds: dict[str, Build] = field(default_factory=dict)
    _waiting: int = 0


def grouped(candidates: Sequence[Candidate]) -> list[Group]:
    """Candidates by workload, in the order in which workloads come first."""
    groups: dict[str, Group] = {}
    for each in candidates:
        groups.setdefault(each.spec, Group(each.spec, [])).candidates.append(each)
    return list(groups.values())


@contextmanager
def preparing(
    groups: Sequence[Group], folder: Path, how: Conditions, *, with_references: bool = True
) -> Iterator[queue.SimpleQueue[Group]]:
    """Build the candidates of all workloads, the first ones first, and compute their references.

    The queue gets each workload as soon as all of it is there; what is not when the context ends is
    dropped. Libraries go to `folder`, see `crossfuse.meta_schedule.build.shared_object`.
    """
    references(folder).mkdir(parents=True, exist_ok=True)
    ready: queue.SimpleQueue[Group] = queue.SimpleQueue()
    pool = Builders(how)
    lock = Lock()

    def submit(group: Group, key: str, request: dict[str, Any], timeout: float) -> None:
        def done(future: Future[Any]) -> None:
            with lock:
                group.builds[key] = build_of(future)
                group._waiting -= 1
                if not group._waiting:
                    ready.put(group)

        pool.submit(request, timeout).add_done_callback(done)

    try:
        for group in groups:
            requests = [(each.id, build_request(each, folder, how)) for each in group.candidates]
            if with_references:
                place = str(references(folder))
                request = {"do": "reference", "spec": group.spec, "folder": place}
                submit_first = [("reference", (request, REFERENCE_SECONDS))]
                requests = [*submit_first, *requests]
            # Counted before the first can be done.
            group._waiting = len(requests)
            for key, (request, timeout) in requests:
                submit(group, key, request, timeout)
        yield ready
    finally:
        pool.close()


class Builders:
    """Processes that compile, each driven by a thread."""

    def __init__(self, how: Conditions) -> None:
        self._peers = [Peer(how.builder, _ONE_THREAD) for _ in range(how.builders)]
        self._idle: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        for peer in self._peers:
            self._idle.put(peer)
        self._threads = ThreadPoolExecutor(how.builders)

    def submit(self, request: dict[str, Any], timeout: float) -> Future[Any]:
        """Send a request of `build_request` to the first idle process; `build_of` reads the answer.

        The timeout is in seconds, for the answer.
        """
        return self._threads.submit(self._ask, request, timeout)

    def _ask(self, request: dict[str, Any], timeout: float) -> Any:
        peer = self._idle.get()
        try:
            return peer.ask(request, timeout)
        finally:
            self._idle.put(peer)

    def close(self) -> None:
        """Kill the processes; what is being built or waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for peer in self._peers:
            peer.retire()
        self._threads.shutdown()


def build_request(
    candidate: Candidate, folder: Path, how: Conditions
) -> tuple[dict[str, Any], float]:
    """The request for a candidate's library and its timeout in seconds, for `Builders.submit`."""
    request = {
        "do": "build",
        "candidate": candidate.to_json(),
        "folder": str(folder),
        "target": how.target,
        "timeout": how.build_timeout,
    }
    return request, how.build_timeout + _GRACE


def build_of(future: Future[Any]) -> Build:
    """Outcome of a compilation, also where its process was killed or died."""
    try:
        return typed(Build, future.result())
    except NoAnswer as error:
        return Build(error.status, error.message)
    except CancelledError:
        return Build("cancelled")
    except Exception as error:
        return Build("failed", f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve until standard input ends.

    Requests are ``{"do": "build", "candidate", "folder", "target", "timeout"}`` or ``{"do":
    "reference", "spec", "folder"}``, see `crossfuse.bench.worker.problem_of`.
    """
    serve_lines(_builder)


def _builder() -> Serve:
    # Beside the process that measures, which is not to wait for a core.
    os.nice(15)
    without_torch()
    import crossfuse._tvm  # noqa: F401
    from crossfuse.bench.worker import problem_of

    def reference(spec: str, folder: Path) -> Build:
        try:
            problem_of(spec, folder)
        except RefusedError as error:
            return Build("refused", str(error))
        return Build("ok")

    def serve(request: Mapping[str, Any]) -> Any:
        folder = Path(request["folder"])
        if request["do"] == "reference":
            return asdict(reference(request["spec"], folder))
        candidate = Candidate.from_json(request["candidate"], "request")
        return asdict(build_candidate(candidate, folder, request["target"], request["timeout"]))

    return serve


if __name__ == "__main__":
    main()
