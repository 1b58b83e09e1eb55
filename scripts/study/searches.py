"""Searches side by side that share one machine, and what was measured there, to compare them.

::

    records.jsonl       a record of each measurement, as soon as it is there
    proposals.jsonl     what each search wanted to know, in order, by the id of the candidate

A kernel that several searches propose is built and measured once, and all of them are told the same
time: searches differ by what they propose, and not by noise. What any of them proposes is built
ahead by many processes and measured by one at a time, in a process of each workload that lives as
long as the run. After a kill the searches are played again from the records.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_bytes
from crossfuse.measure.timer import Measurer
from crossfuse.meta_schedule.build import (
    Build,
    Builders,
    Conditions,
    build_of,
    build_request,
    references,
)
from crossfuse.meta_schedule.candidate import Candidate, candidate_at
from crossfuse.meta_schedule.records import Record, append, append_line, read_records
from crossfuse.meta_schedule.tune import record as measured
from crossfuse.planner.tune.strategy import Strategy
from crossfuse.schema import Damaged, read

_LOOK = 0.5


@dataclass(frozen=True)
class Proposal:
    """What a search wanted to know.

    Attributes
    ----------
    spec, strategy : str
        Workload and name of the strategy.
    seed : int
        Of the search.
    trial : int
        From 1.
    id : str
        Of the candidate.
    """

    spec: str
    strategy: str
    seed: int
    trial: int
    id: str

    @property
    def place(self) -> tuple[str, str, int, int]:
        """All but the candidate."""
        return self.spec, self.strategy, self.seed, self.trial


@dataclass
class Search:
    """One strategy on one workload from one seed.

    Attributes
    ----------
    spec, strategy, seed
        What it is.
    find : Strategy
        What proposes.
    left : int
        Trials that are still to be proposed.
    done : int
        Trials that it has learned of.
    points, candidates : list
        What was proposed last.
    missing : set[str]
        Ids of those of them that have no record yet.
    """

    spec: str
    strategy: str
    seed: int
    find: Strategy
    left: int
    done: int = 0
    points: list[int] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)

    def propose(self, batch: int) -> None:
        """Choose the next trials, as `candidates`.

        Whole batches are proposed, so that a search of more trials begins with the same ones.
        """
        self.points = self.find.propose(batch)[: self.left]
        self.left = self.left - len(self.points) if self.points else 0
        self.candidates = [candidate_at(self.find.space, self.spec, each) for each in self.points]

    def learn(self, microseconds: Sequence[float | None]) -> None:
        """Tell what became of the last proposals."""
        self.done += len(self.points)
        self.find.learn(self.points, microseconds)


class Study:
    """Searches that share one machine and what was measured there.

    Parameters
    ----------
    folder : pathlib.Path
        Where records are kept.
    scratch : pathlib.Path
        Where libraries and references lie.
    how : Conditions
        How to build and measure.
    batch : int
        Trials of a search between two proposals.
    report : Callable
        Called with each new record.
    """

    def __init__(
        self,
        folder: Path,
        scratch: Path,
        how: Conditions,
        batch: int = 8,
        report: Callable[[Record], None] = lambda record: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        references(scratch).mkdir(parents=True, exist_ok=True)
        self._scratch, self._how, self._batch, self._report = scratch, how, batch, report
        self._records, self._proposals = folder / "records.jsonl", folder / "proposals.jsonl"
        self._known = {
            each.candidate.id: each
            for each in read_records(self._records).records
            if (each.job, each.gpu) == (how.job_of(each.candidate), how.gpu)
        }
        self._told = {each.place: each.id for each in read_proposals(self._proposals)}
        self._built: queue.SimpleQueue[tuple[Candidate, Build]] = queue.SimpleQueue()
        self._pending: set[str] = set()
        self._measurers: dict[str, Measurer] = {}
        self._builders: Builders | None = None

    def run(self, searches: Sequence[Search], stop: Callable[[], bool] = lambda: False) -> None:
        """Measure until every search has had its trials, or it is time to stop."""
        self._builders = Builders(self._how)
        try:
            for spec in dict.fromkeys(each.spec for each in searches):
                eager = Candidate(spec, "eager")
                self._measurers[spec] = Measurer(self._how.measurer)
                self._measurers[spec].prepare(self._how.request(eager, self._scratch))
                self._build([eager])
            for each in searches:
                self._advance(each)
            while self._pending and not stop():
                try:
                    candidate, build = self._built.get(timeout=_LOOK)
                except queue.Empty:
                    continue
                self._take(candidate, build)
                for each in searches:
                    if candidate.id in each.missing:
                        each.missing.discard(candidate.id)
                        if not each.missing:
                            self._learn(each)
                            self._advance(each)
        finally:
            self._builders.close()
            for measurer in self._measurers.values():
                measurer.close()

    def _advance(self, search: Search) -> None:
        """Propose, up to the first trials that nobody knows."""
        while search.left and not search.missing:
            search.propose(self._batch)
            self._note(search)
            search.missing = {each.id for each in search.candidates} - self._known.keys()
            self._build([each for each in search.candidates if each.id in search.missing])
            if not search.missing:
                self._learn(search)

    def _learn(self, search: Search) -> None:
        search.learn([self._known[each.id].microseconds for each in search.candidates])

    def _build(self, candidates: Sequence[Candidate]) -> None:
        """Build what has no record and is not under way."""
        assert self._builders is not None
        for each in candidates:
            if each.id in self._known or each.id in self._pending:
                continue
            self._pending.add(each.id)
            future = self._builders.submit(*build_request(each, self._scratch, self._how))
            future.add_done_callback(partial(self._is_built, each))

    def _is_built(self, candidate: Candidate, future: Future[Any]) -> None:
        self._built.put((candidate, build_of(future)))

    def _take(self, candidate: Candidate, build: Build) -> None:
        """Measure a candidate, and keep what came of it."""
        measurer = self._measurers[candidate.spec]
        record = measured(candidate, build, self._scratch, self._how, measurer)
        append(self._records, record)
        self._known[candidate.id] = record
        self._pending.discard(candidate.id)
        self._report(record)

    def _note(self, search: Search) -> None:
        """Write proposals that are not written yet; others have to be the same again."""
        for trial, each in enumerate(search.candidates, search.done + 1):
            wanted = Proposal(search.spec, search.strategy, search.seed, trial, each.id)
            told = self._told.get(wanted.place)
            if told is None:
                append_line(self._proposals, asdict(wanted))
                self._told[wanted.place] = each.id
            elif told != each.id:
                raise _differs(self._proposals, wanted, told)


def read_proposals(path: Path) -> list[Proposal]:
    """Read what searches wanted to know.

    Parameters
    ----------
    path : pathlib.Path
        JSON lines; damaged ones are passed over, since their search is played again.

    Returns
    -------
    list[Proposal]
        In the order of the file; none where there is no file.
    """
    if not path.is_file():
        return []
    found = []
    for line in read_bytes(path).decode(errors="replace").splitlines():
        with suppress(Damaged):
            found.append(read(Proposal, line))
    return found


def _differs(path: Path, wanted: Proposal, told: str) -> RefusedError:
    where = f"{wanted.strategy}, seed {wanted.seed}, trial {wanted.trial} of {wanted.spec}"
    return refuse(
        ArtefactRefused,
        "study",
        f"{path}, {where}",
        found=f"candidate {wanted.id} now, {told} there",
        limit="the same proposals again, of the same batch, device and version",
        instead="name another folder, or go on as it was begun",
    )
