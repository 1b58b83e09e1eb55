"""A search for the fastest kernel of one workload, which can be interrupted and continued.

::

    tuning.json         what is tuned, for which device
    records.jsonl       a record of each measurement, as soon as it is there
    cost_model.json     what was learned of them (and cost_model.json.ubj)
    bundle/             candidates that wait for a machine with a GPU
    database_*.json     MetaSchedule's database
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.files import read_text, write_atomically, write_json
from crossfuse.hardware import device
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.bundle import measure_all, over
from crossfuse.meta_schedule.candidate import Candidate, candidate_at, kernels_of
from crossfuse.meta_schedule.records import Found, Record, append, read_records, unknown
from crossfuse.planner.tune.cost_model import CostModel, require_xgboost
from crossfuse.planner.tune.strategy import Strategy, make_strategy
from crossfuse.schema import Damaged, parse
from crossfuse.workload.cascade_spec import CascadeSpec
from crossfuse.workload.spec import WorkloadSpec

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
