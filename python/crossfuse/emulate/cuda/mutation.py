"""Which mutants of a kernel's synchronisation the emulator names, and which it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossfuse.emulate.cuda.equivalent import TELLS_THE_SAME, is_of_groups, reason_of
from crossfuse.emulate.cuda.lines import find_statements
from crossfuse.emulate.cuda.mutants import VARIABLE, Mutant, Mutated, mutate
from crossfuse.emulate.cuda.run import Program, prepare
from crossfuse.errors import CheckFailed, refuse
from crossfuse.lower.image import KernelImage

#: Findings that are about results or about time, and name no cause.
UNNAMED = frozenset(
    ("unwritten-output", "order-dependent", "timeout", "crash", "barrier-statement", "stopped")
)
_LIMIT = 8


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Attributes
    ----------
    mutant : Mutant
        Which one.
    kinds : tuple[str, ...]
        Kinds of the findings, most telling first; empty if there are none.
    equivalent : str
        Why it is no fault, if it is none.
    """

    mutant: Mutant
    kinds: tuple[str, ...]
    equivalent: str = ""

    @property
    def named(self) -> bool:
        """Whether a finding tells what is wrong, and not only that something is."""
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
    """Run the mutants of a kernel.

    Parameters
    ----------
    image : KernelImage
        A right kernel.
    inputs : Mapping[str, np.ndarray]
        Its inputs.
    every, first : int
        Only each so-manieth mutant, from number `first` of them on.
    seeds : Sequence[int]
        Of orders of threads; the later ones where the first ones show nothing.
    timeout_s : float
        Seconds of one run.

    Returns
    -------
    list[Outcome]
        In the order of lines.

    Raises
    ------
    CheckFailed
        If the kernel itself is not right.
    """
    mutated = mutate(image)
    program = prepare(mutated.image, inputs)
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
    """What the right kernel does, to which mutants are compared that nothing was found in."""

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
        """What was noted of statements, by their lines in the right text."""
        useful = {each["first"]: bool(each["useful"]) for each in records if each["kind"] == kind}
        symbols, text = self.program.translation.symbols, self.mutated.image.cuda
        statements = find_statements(self.program.executable, useful, symbols, text)
        found: dict[int, bool] = {}
        for site, statement in statements.items():
            line = int(statement.split(":")[0].removeprefix("line ")) - self.mutated.shift
            found[line] = found.get(line, False) or useful[site]
        return found


def _guarantees(records: list[dict[str, Any]]) -> list[int]:
    """The sum of what releases have told, if the run came to its end."""
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
    kinds.pop("barrier-statement", None)
    return tuple(sorted(kinds, key=lambda kind: kind in UNNAMED))


@dataclass(frozen=True)
class Tally:
    """How many mutants were named.

    Attributes
    ----------
    named : Counter[str]
        Of those that are, how many by which kind of finding.
    equivalent : Counter[str]
        Of those that are no fault, how many for which reason.
    survivors : tuple[Outcome, ...]
        The others.
    """

    named: Counter[str]
    equivalent: Counter[str]
    survivors: tuple[Outcome, ...]

    @property
    def share(self) -> float:
        """Of those that are a fault, the part that is named."""
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
