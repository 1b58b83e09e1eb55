"""A process that measures, replaced whenever a candidate may have harmed it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from crossfuse.bench.job import Job, Timing
from crossfuse.measure.peer import NoAnswer, Peer
from crossfuse.meta_schedule.build import Build, Conditions
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.planner.families import EAGER
from crossfuse.schema import Damaged, typed

# Compiles candidates in several processes at once, and computes their references.

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
        return typed(Build, future.result())
    except NoAnswer as error:
        return Build(error.status, error.message)
    except CancelledError:
        return Build("cancelled")
    except Exception as error:
        return Build("failed", f"{type(error).__name__}: {error}")


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
            "job": asdict(job),
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
            if not timing.fault or (family == EAGER and timing.status == "wrong"):
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
            return typed(Timing, self._peer.ask(request, self._how.timeout))
        except NoAnswer as error:
            return Timing(error.status, error.message)
        except (Damaged, TypeError, KeyError) as error:
            return Timing("crashed", f"an answer that is none: {type(error).__name__}: {error}")
