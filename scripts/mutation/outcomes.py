"""Runs the mutants of a kernel's synchronisation, and tells which of them the emulator catches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from crossfuse.emulate.cuda.ranks import prepare_ranks
from crossfuse.emulate.cuda.run import Program, prepare
from crossfuse.emulate.cuda.translate import find_statements
from crossfuse.errors import CheckFailed, refuse
from crossfuse.lower.image import KernelImage
from mutation.equivalent import TELLS_THE_SAME, is_of_groups, reason_of
from mutation.mutants import VARIABLE, Mutant, Mutated, mutate

#: Findings that are about results or about time, and name no cause.
UNNAMED = frozenset(
    ("unwritten-output", "order-dependent", "timeout", "crash", "barrier-statement", "stopped")
)
_LIMIT = 8
#: Calls of kernels over several GPUs: memory of one is used again by the second one behind it.
_CALLS = 4


@dataclass(frozen=True)
class Outcome:
    """Result of running a mutant."""

    mutant: Mutant
    #: Kinds of the findings, those that name a cause first; empty without findings.
    kinds: tuple[str, ...]
    #: Why it is no fault; empty if it is one.
    equivalent: str = ""

    @property
    def named(self) -> bool:
        """Whether a finding names what is wrong, rather than only that something is."""
        return _is_named(self.kinds)


def outcomes(
    image: KernelImage,
    inputs: Mapping[str, np.ndarray],
    *,
    every: int = 1,
    first: int = 0,
    seeds: Sequence[int] = range(6),
    timeout_s: float = 20.0,
) -> list[Outcome]:
    """Run mutants of a right kernel, in the order of lines.

    `every` takes one mutant in so many, beginning with number `first`. `seeds` are of orders of
    threads; the later ones run only where the earlier show nothing. `timeout_s` is that of one run.
    A kernel that is not right itself raises `CheckFailed`.
    """
    mutated = mutate(image)
    across = any(each.ranks for each in image.buffers)
    make = partial(prepare_ranks, calls=_CALLS) if across else prepare
    program = make(mutated.image, inputs)
    if kinds := _run(program, 0, seeds[0], timeout_s):
        raise refuse(
            CheckFailed,
            "mutation",
            image.name,
            found=f"{', '.join(kinds)} in the kernel itself",
            limit="no finding",
            instead="correct the kernel first: `emulate` says what is wrong",
        )
    chosen = mutated.mutants[first::every]
    found = [(each, _kinds(program, each, seeds, timeout_s)) for each in chosen]
    right = _Right(program, mutated, timeout_s)
    return [
        Outcome(each, kinds, "" if _is_named(kinds) else right.reason_of(each))
        for each, kinds in found
    ]


def _is_named(kinds: Iterable[str]) -> bool:
    return any(kind not in UNNAMED for kind in kinds)


class _Right:
    """Behaviour of the right kernel, for comparison with mutants in which nothing was found."""

    def __init__(self, program: Program, mutated: Mutated, timeout_s: float) -> None:
        self.program, self.mutated, self.timeout_s = program, mutated, timeout_s
        records = self._notes(0)
        self.guarantees = _guarantees(records)
        self.uses, self.news = self._by_line(records, "use"), self._by_line(records, "news")

    def reason_of(self, mutant: Mutant) -> str:
        """Why a mutant is no fault; empty if no rule says so."""
        reason = reason_of(self.mutated.lines, self.uses, mutant, self.news)
        if not reason and is_of_groups(mutant):
            same = _guarantees(self._notes(mutant.number)) == self.guarantees
            reason = TELLS_THE_SAME if same else ""
        return reason

    def _notes(self, number: int) -> list[dict[str, Any]]:
        noted = {VARIABLE: str(number), "CROSSFUSE_USES": "1"}
        return self.program.run(0, 2, _LIMIT, self.timeout_s, noted)[0]

    def _by_line(self, records: list[dict[str, Any]], kind: str) -> dict[int, bool]:
        """Notes on statements, by their lines in the right text."""
        useful = {each["first"]: bool(each["useful"]) for each in records if each["kind"] == kind}
        symbols, text = self.program.translation.symbols, self.mutated.image.cuda
        statements = find_statements(self.program.executable, useful, symbols, text)
        found: dict[int, bool] = {}
        for site, statement in statements.items():
            line = int(statement.split(":")[0].removeprefix("line ")) - self.mutated.shift
            found[line] = found.get(line, False) or useful[site]
        return found


def _guarantees(records: list[dict[str, Any]]) -> list[int]:
    """The checksum of what releases guaranteed; empty if the run did not finish."""
    return [each["sum"] for each in records if each["kind"] == "guarantees"]


def _kinds(
    program: Program, mutant: Mutant, seeds: Sequence[int], timeout_s: float
) -> tuple[str, ...]:
    kinds: tuple[str, ...] = ()
    for seed in seeds:
        kinds = _run(program, mutant.number, seed, timeout_s)
        if _is_named(kinds):
            break
    return kinds


def _run(program: Program, number: int, seed: int, timeout_s: float) -> tuple[str, ...]:
    records, _ = program.run(seed, 2, _LIMIT, timeout_s, {VARIABLE: str(number)})
    kinds = dict.fromkeys(str(each["kind"]) for each in records)
    kinds.pop("stopped", None)
    kinds.pop("at-once", None)
    kinds.pop("barrier-statement", None)
    return tuple(sorted(kinds, key=lambda kind: kind in UNNAMED))


@dataclass(frozen=True)
class Tally:
    """Counts of mutants by outcome."""

    #: Faults that were named, by kind of finding.
    named: Counter[str]
    #: Mutants that are no fault, by reason.
    equivalent: Counter[str]
    #: All others.
    survivors: tuple[Outcome, ...]

    @property
    def share(self) -> float:
        """The share of faults that are named."""
        named = sum(self.named.values())
        return named / max(1, named + len(self.survivors))


def tally(found: Iterable[Outcome]) -> Tally:
    """Count outcomes."""
    named: Counter[str] = Counter()
    equivalent: Counter[str] = Counter()
    survivors = []
    for each in found:
        if each.named:
            named[each.kinds[0]] += 1
        elif each.equivalent:
            equivalent[each.equivalent] += 1
        else:
            survivors.append(each)
    return Tally(named, equivalent, tuple(survivors))
