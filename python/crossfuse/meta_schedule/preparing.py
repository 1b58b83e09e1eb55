"""Compiles candidates in several processes at once, and computes their references."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.conditions import Conditions

#: Seconds in which a float64 reference is worked out by a process with one thread.
REFERENCE_SECONDS = 600.0
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


def references(folder: Path) -> Path:
    """Folder of float64 references."""
    return folder / "references"


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
        return Build.from_json(future.result())
    except NoAnswer as error:
        return Build(error.status, error.message)
    except CancelledError:
        return Build("cancelled")
    except Exception as error:
        return Build("failed", f"{type(error).__name__}: {error}")
