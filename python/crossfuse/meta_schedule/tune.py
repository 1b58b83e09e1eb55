"""Candidates measured many at once: of a search, or of a folder that travels to a GPU and back.

::

    bundle.json         what to measure and how
    libraries/          a library and a manifest of each candidate that is built
    builds.json         what did not compile, and why
    references/         float64 results, worked out where the folder is measured
    results.jsonl       a record of each measurement, as soon as it is there
    measure.py          measures the folder that it lies in
"""

from __future__ import annotations

import json
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import make_folder, read_text, write_atomically, write_json
from crossfuse.hardware import device
from crossfuse.measure.job import Job
from crossfuse.measure.timer import Measurer
from crossfuse.meta_schedule.build import Build, Conditions, Group, grouped, preparing
from crossfuse.meta_schedule.candidate import Candidate, candidate_at, kernels_of
from crossfuse.meta_schedule.records import Found, Record, append, read_records, unknown
from crossfuse.planner.tune.cost_model import CostModel, require_xgboost
from crossfuse.planner.tune.strategy import Strategy, make_strategy
from crossfuse.schema import Damaged, parse, read
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec

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


# A search for the fastest kernel of one workload, which can be interrupted and continued.
#
# ::
#
#     tuning.json         what is tuned, for which device
#     records.jsonl       a record of each measurement, as soon as it is there
#     cost_model.json     what was learned of them (and cost_model.json.ubj)
#     bundle/             candidates that wait for a machine with a GPU
#     database_*.json     MetaSchedule's database


VERSION = 1


@dataclass
class Tuning:
    """A search and its folder."""

    spec: WorkloadSpec | CascadeSpec
    folder: Path
    #: How candidates are built and measured.
    how: Conditions
    #: Proposes candidates, knowing the records of the folder.
    search: Strategy
    #: Lines of the file of records that are not records.
    broken: tuple[str, ...] = ()
    #: Gets each record once it is written, such as `crossfuse.meta_schedule.records.Store.add`.
    store: Callable[[Record], object] = lambda record: None
    #: Records of this process, in order.
    added: list[Record] = field(default_factory=list)

    @property
    def records(self) -> Path:
        """The file of records."""
        return self.folder / "records.jsonl"

    @property
    def bundle(self) -> Path:
        """The folder of candidates that wait for a machine with a GPU."""
        return self.folder / "bundle"

    def candidates(self, count: int) -> list[Candidate]:
        """At most `count` kernels to measure next."""
        space = self.search.space
        return [candidate_at(space, str(self.spec), each) for each in self.search.propose(count)]

    def take(self, record: Record) -> None:
        """Store a record of this workload."""
        append(self.records, record)
        self.store(record)
        self.added.append(record)

    def learn(self, records: Sequence[Record]) -> None:
        """Let the search and its model learn from records.

        Those of other workloads, or of kernels that are not in the space, are ignored.
        """
        points, times = [], []
        for each in records:
            tiles = each.candidate
            point = self.search.space.find(tiles.family, tiles.tiles)
            if point is None or tiles.spec != str(self.spec):
                continue
            points.append(point)
            times.append(each.microseconds)
        self.search.learn(points, times)

    def run(
        self,
        trials: int,
        *,
        batch: int = 16,
        budget: float | None = None,
        report: Callable[[Record], None] = lambda record: None,
    ) -> None:
        """Measure kernels on this machine.

        Every record is written when it is there, so that an interrupt loses only what was under
        way. `batch` is the number of kernels between two proposals; after `budget` seconds no
        measurement is begun.
        """
        stop = over(budget)

        def keep(record: Record) -> None:
            self.take(record)
            report(record)

        left = trials
        try:
            while left > 0 and not stop():
                candidates = self.candidates(min(batch, left))
                if not candidates:
                    break
                before = len(self.added)
                measure_all(candidates, self.folder, self.how, keep, stop)
                self.learn(self.added[before:])
                left -= len(candidates)
        finally:
            self.save()

    def collect(self) -> int:
        """Take the records that came back in the bundle; returns how many are new."""
        found = read_records(self.bundle / "results.jsonl")
        self.broken += found.broken
        fresh = unknown(found.records, self.records)
        for each in fresh:
            self.take(each)
        self.learn(fresh)
        self.save()
        return len(fresh)

    def best(self) -> Record | None:
        """The fastest correct kernel of those that were timed as the newest one was."""
        timed = [
            each
            for each in read_records(self.records).records
            if each.microseconds is not None and each.candidate.spec == str(self.spec)
        ]
        found = [each for each in timed if _conditions(each) == _conditions(timed[-1])]
        return min(found, key=lambda each: each.microseconds or 0.0, default=None)

    def save(self) -> None:
        """Write what the cost model learned."""
        if self.search.model is not None:
            self.search.model.save(self.folder / "cost_model.json", write_atomically)


def _conditions(record: Record) -> tuple[str, str, str]:
    """What times are comparable in: another GPU, cache or protocol has times of its own."""
    return record.gpu, record.job.l2, record.job.protocol


def open_tuning(
    spec: WorkloadSpec | CascadeSpec,
    folder: Path,
    how: Conditions,
    *,
    strategy: str = "evolution",
    learn: bool = True,
    seed: int = 0,
) -> Tuning:
    """Begin a search, or go on with that of a folder, whatever the conditions of its records.

    `strategy` is one of `crossfuse.planner.tune.strategy.STRATEGIES`. With `learn`, measurements
    correct the estimate, which needs xgboost. For cascades they do not: the search goes by what it
    has measured, and by the estimate as it is. The same seed and measurements give the same search.
    A folder of another workload or device is refused and left unchanged; so is a workload without
    kernels, and learning without xgboost.
    """
    learn = learn and not isinstance(spec, CascadeSpec)
    if learn:
        # Not after the first hours.
        require_xgboost()
    space = kernels_of(spec, how.target)
    _check(folder, spec, how.target)
    model = CostModel(seed) if learn else None
    found = Tuning(spec, folder, how, make_strategy(strategy, space, model, seed))
    known: Found = read_records(found.records)
    found.broken = known.broken
    found.learn(known.records)
    return found


def _check(folder: Path, spec: WorkloadSpec | CascadeSpec, target: str) -> None:
    """Write what the folder is of, or compare with what it was."""
    path = folder / "tuning.json"
    wanted = {"version": VERSION, "workload": str(spec), "target": device(target).name}
    if not path.is_file():
        write_json(path, wanted)
        return
    try:
        there = parse(read_text(path))
    except Damaged as error:
        there = f"{error}"
    if there != wanted:
        raise refuse(
            ArtefactRefused,
            "tuning",
            str(path),
            found=json.dumps(there),
            limit=json.dumps(wanted),
            instead="name another folder; records in this one are kept",
        )
