"""A folder of candidates that travels to a machine with a GPU, and comes back with records.

::

    bundle.json         what to measure and how
    libraries/          a library and a manifest of each candidate that is built
    builds.json         what did not compile, and why
    references/         float64 results, worked out where the folder is measured
    results.jsonl       a record of each measurement, as soon as it is there
    measure.py          measures the folder that it lies in
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import make_folder, read_text, write_atomically, write_json
from crossfuse.hardware import device
from crossfuse.measure.job import Job
from crossfuse.measure.timer import Measurer
from crossfuse.meta_schedule.build import Build, Conditions, Group, grouped, preparing
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.records import Record, append, read_records
from crossfuse.schema import Damaged, read

# Builds many candidates in several processes and measures them in one, by workload.

_LOOK = 0.5


def over(budget: float | None) -> Callable[[], bool]:
    """Begin a budget of seconds; tells whether they are over, of None never."""
    end = None if budget is None else time.monotonic() + budget
    return lambda: end is not None and time.monotonic() > end


def measure_all(
    candidates: Sequence[Candidate],
    folder: Path,
    how: Conditions,
    report: Callable[[Record], None],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Build and measure candidates; each record is reported as soon as it is there.

    Workloads are measured one after another, each as soon as all of its candidates are built and
    its reference is there. The next one's inputs are drawn meanwhile, by a second process. `stop`
    is asked before each measurement whether to leave the rest; what is being built is dropped then.
    Libraries lie in, or go to, `folder` (`crossfuse.meta_schedule.build.shared_object`), as do
    references.
    """
    groups = grouped(candidates)
    idle = deque(Measurer(how.measurer) for _ in range(2))
    pending: deque[tuple[Group, Measurer]] = deque()
    with ExitStack() as closing, preparing(groups, folder, how) as ready:
        for each in idle:
            closing.callback(each.close)
            each.start()
        for _ in groups:
            while idle and (group := _next(ready, stop, wait=not pending)):
                measurer = idle.popleft()
                measurer.prepare(how.request(group.candidates[0], folder))
                pending.append((group, measurer))
            if not pending:
                return
            group, measurer = pending.popleft()
            for candidate in group.candidates:
                if stop():
                    return
                report(record(candidate, group.builds[candidate.id], folder, how, measurer))
            idle.append(measurer)


def _next(ready: queue.SimpleQueue[Group], stop: Callable[[], bool], *, wait: bool) -> Group | None:
    """The next workload; None when stopped, or, without `wait`, where there is none yet."""
    while True:
        try:
            return ready.get(timeout=_LOOK if wait else 0.0)
        except queue.Empty:
            if not wait or stop():
                return None


def record(
    candidate: Candidate, build: Build, folder: Path, how: Conditions, measurer: Measurer
) -> Record:
    """Measure a candidate if it was built, and tell what came of it."""
    timing, attempts = None, 0
    if build.status == "ok":
        timing, attempts = measurer.measure(how.request(candidate, folder), how.timeout)
    return Record(candidate, build, how.job_of(candidate), timing, attempts, how.gpu)


FORMAT_VERSION = 1
_SCRIPT = '''"""Measure the candidates of this folder: python measure.py [--budget SECONDS]."""

import os
import sys
from pathlib import Path
from typing import Any

here = Path(__file__).resolve().parent
sys.exit(os.spawnlp(
    os.P_WAIT, sys.executable, sys.executable, "-m", "crossfuse", "bundle", "measure", str(here),
    *sys.argv[1:],
))
'''


@dataclass(frozen=True)
class Bundle:
    """Content of ``bundle.json``."""

    folder: Path
    candidates: tuple[Candidate, ...]
    #: Device that libraries are compiled for.
    target: str
    #: How to measure, see `crossfuse.meta_schedule.build.Conditions`.
    job: Job

    @property
    def results(self) -> Path:
        """The file of records."""
        return self.folder / "results.jsonl"

    def builds(self) -> dict[str, Build]:
        """Outcomes of builds where the bundle was made, by the candidate's id."""
        path = self.folder / "builds.json"
        if not path.exists():
            return {}
        try:
            found: dict[str, Build] = read(dict[str, Build], read_text(path))
        except Damaged as error:
            raise _refused(path, error.found, error.limit) from None
        return found

    def job_of(self, candidate: Candidate) -> Job:
        """How one candidate is measured."""
        return Conditions(job=self.job).job_of(candidate)

    def missing(self) -> tuple[Candidate, ...]:
        """Candidates without a record."""
        records = read_records(self.results).records
        there = {(each.candidate.id, each.job) for each in records}
        return tuple(each for each in self.candidates if (each.id, self.job_of(each)) not in there)


@dataclass(frozen=True)
class _Stored:
    """``bundle.json`` as it is stored, besides its version."""

    target: str
    job: Job
    candidates: tuple[Mapping[str, Any], ...]


def make_bundle(
    candidates: Sequence[Candidate],
    folder: Path,
    how: Conditions,
    *,
    build_there: bool = False,
    report: Callable[[Candidate, Build], None] = lambda candidate, build: None,
) -> Bundle:
    """Write a bundle; libraries that lie in the folder already are not built again.

    `how` says how to build here, and how to measure there. `build_there` leaves the compilation to
    the machine that measures. `report` gets each candidate that is built here, or fails to.
    """
    make_folder(folder)
    bundle = Bundle(folder, tuple(candidates), how.target, how.job)
    head = {"format_version": FORMAT_VERSION, "target": bundle.target, "job": asdict(bundle.job)}
    value = head | {"candidates": [each.to_json() for each in candidates]}
    write_json(folder / "bundle.json", value)
    write_atomically(folder / "measure.py", _SCRIPT.encode())
    builds = {} if build_there else _build_all(candidates, folder, how, report)
    write_json(folder / "builds.json", {key: asdict(each) for key, each in builds.items()})
    return bundle


def open_bundle(folder: Path) -> Bundle:
    """Read what `make_bundle` wrote; what is no bundle, or of another format, is refused."""
    path = folder / "bundle.json"
    try:
        stored = read(_Stored, read_text(path), version=FORMAT_VERSION)
    except Damaged as error:
        raise _refused(path, error.found, error.limit) from None
    found = [
        Candidate.from_json(each, f"{path}, candidate {index}")
        for index, each in enumerate(stored.candidates)
    ]
    return Bundle(folder, tuple(found), device(stored.target).name, stored.job)


def measure_bundle(
    bundle: Bundle,
    how: Conditions,
    report: Callable[[Record], None] = lambda record: None,
    budget: float | None = None,
) -> None:
    """Measure what has no record yet; each record is written at once, then reported.

    What is not built is built first. Target and job are the bundle's; `how` gives limits of time,
    and processes that compile. After `budget` seconds no further measurement begins.
    """
    stop = over(budget)
    how = replace(how, target=bundle.target, job=bundle.job)

    def keep(record: Record) -> None:
        append(bundle.results, record)
        report(record)

    tried = bundle.builds()
    wanted = []
    for each in bundle.missing():
        build = tried.get(each.id)
        if build is None or build.status == "ok":
            wanted.append(each)
        else:
            # What did not compile there does not compile here.
            keep(Record(each, build, bundle.job_of(each), None, 0, how.gpu))
    if wanted:
        measure_all(wanted, bundle.folder, how, keep, stop)


def _build_all(
    candidates: Sequence[Candidate],
    folder: Path,
    how: Conditions,
    report: Callable[[Candidate, Build], None],
) -> dict[str, Build]:
    groups = grouped(candidates)
    found: dict[str, Build] = {}
    with preparing(groups, folder, how, with_references=False) as ready:
        for _ in groups:
            group = ready.get()
            for each in group.candidates:
                found[each.id] = group.builds[each.id]
                report(each, found[each.id])
    return found


def _refused(path: Path, found: str, limit: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "bundle",
        str(path),
        found=found,
        limit=limit,
        instead="make the bundle again: crossfuse bundle make CANDIDATES --out FOLDER",
    )
