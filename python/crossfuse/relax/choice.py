"""Which groups of a graph become kernels: chains and cascades are judged alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from crossfuse.errors import RefusedError
from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.chains.planned import Planned
from crossfuse.relax.graph import Graph
from crossfuse.relax.replace import Replacement


@dataclass(frozen=True, eq=False)
class Candidate:
    """A group of bindings that one kernel might compute."""

    #: Names of its products or reductions, the last one last.
    names: tuple[str, ...]
    #: None if no kernel does.
    planned: Planned | None
    #: Why none does.
    reason: str = ""
    #: Variables that no two kernels compute.
    parts: tuple[Any, ...] = ()


class Kernels(Protocol):
    """What knows groups of one kind, and makes their kernels."""

    def candidates(self, graph: Graph) -> Iterable[Candidate]:
        """Find all groups of a graph, and plan those that are of this kind."""

    def kernel(self, planned: Any, always: bool) -> Replacement:
        """Schedule a group, and give the call of its kernel; refuses one without a kernel."""


@dataclass(frozen=True)
class Chosen:
    """Groups of a graph that become kernels, and the outcomes of all."""

    replacements: tuple[Replacement, ...]
    #: One for each candidate, in order.
    outcomes: tuple[ChainOutcome, ...]


def choose(function: str, graph: Graph, kernels: Kernels, always: bool = False) -> Chosen:
    """Plan all groups of a graph, and schedule those that pay and do not overlap.

    Of groups that share a part the one that saves most is taken. `always` takes those too whose
    estimate says that not to fuse is faster. `function` is the name that reports give.
    """
    outcomes = {
        each: ChainOutcome(function, each.names, "", "", None, None, each.reason)
        for each in kernels.candidates(graph)
    }
    taken: dict[Any, str] = {}
    replacements: list[Replacement] = []
    pairs = [(each, each.planned) for each in outcomes if each.planned is not None]
    for candidate, planned in sorted(pairs, key=lambda pair: -pair[1].gain):
        other = next((taken[each] for each in candidate.parts if each in taken), "")
        found = _judged(planned, other, outcomes[candidate], always)
        if not found.text:
            try:
                call = kernels.kernel(planned, always)
            except RefusedError as error:
                found = replace(found, family="", text=str(error))
            else:
                replacements.append(call)
                name = str(call.function.name_hint)
                taken |= dict.fromkeys(candidate.parts, name)
                found = replace(found, name=name, text=planned.summary, bins=call.bins)
        outcomes[candidate] = found
    return Chosen(tuple(replacements), tuple(outcomes.values()))


def _judged(planned: Planned, other: str, blank: ChainOutcome, always: bool) -> ChainOutcome:
    """The outcome of a planned group; `text` is empty if it is to be fused.

    `other` is a kernel that has a part of the group already.
    """
    ours, eager = planned.times
    judged = replace(
        blank,
        family=planned.family,
        microseconds=ours,
        eager_microseconds=eager,
        measured=planned.words,
    )
    if other:
        return replace(judged, text=f"a product of it is in {other}, which saves more")
    text = planned.left(always)
    return replace(judged, family=EAGER, text=text) if text else judged
