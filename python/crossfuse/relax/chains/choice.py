"""Which chains of a function become kernels."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm.ir import Var

from crossfuse.errors import PlanRefused, RefusedError, contained
from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.groups import Group, find_groups
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.chains.planned import PlannedChain, PlannedRows
from crossfuse.relax.graph import Graph
from crossfuse.relax.replace import Replacement


@dataclass(frozen=True)
class ChosenChains:
    """Chains of a function that become kernels, and the outcomes of all."""

    #: Calls by the variables that they make.
    replacements: Mapping[Var, Replacement]
    #: One for each pair of layers, in order.
    outcomes: tuple[ChainOutcome, ...]


def choose_chains(
    name: str,
    graph: Graph,
    kernels: ChainKernels,
    always: bool = False,
    known: Container[Any] | None = None,
    find: Callable[[Graph], Iterable[Group]] = find_groups,
) -> ChosenChains:
    """Plan all chains of a function, and schedule those that pay and do not overlap.

    Of chains that share a product the one that saves most is taken. `always` takes those too whose
    estimate says that not to fuse is faster. Chains begin and end with variables in `known`; None
    allows all. `find` gives the groups that may be chains.
    """
    outcomes: dict[Var, ChainOutcome] = {}
    chains: list[PlannedChain | PlannedRows] = []
    for group in find(graph):
        blank = _blank(name, group)
        try:
            with contained(PlanRefused, "fuse-chains", "a chain of products"):
                chains.append(kernels.planned(graph, group, known))
        except RefusedError as error:
            blank = replace(blank, text=str(error))
        outcomes[group.second] = blank
    taken: dict[Var, str] = {}
    replaced: dict[Var, Replacement] = {}
    for chain in sorted(chains, key=lambda each: -each.gain):
        found = _judged(chain, taken, outcomes[chain.group.second], always)
        if not found.text:
            found = _scheduled(chain, kernels, found, replaced, always)
        if found.name:
            taken |= dict.fromkeys((*chain.group.first, chain.group.second), found.name)
        outcomes[chain.group.second] = found
    return ChosenChains(replaced, tuple(outcomes.values()))


def _judged(
    chain: PlannedChain | PlannedRows,
    taken: Mapping[Var, str],
    blank: ChainOutcome,
    always: bool,
) -> ChainOutcome:
    """The outcome of a chain before scheduling; `text` is empty if it is to be fused."""
    ours, eager = chain.times
    judged = replace(
        blank,
        family=chain.ours.family,
        microseconds=ours,
        eager_microseconds=eager,
        measured=chain.words,
    )
    products = (*chain.group.first, chain.group.second)
    other = next((taken[each] for each in products if each in taken), "")
    if other:
        return replace(judged, text=f"a product of it is in {other}, which saves more")
    text = chain.left(always)
    return replace(judged, family=EAGER, text=text) if text else judged


def _scheduled(
    chain: PlannedChain | PlannedRows,
    kernels: ChainKernels,
    found: ChainOutcome,
    replaced: dict[Var, Replacement],
    always: bool,
) -> ChainOutcome:
    try:
        with contained(PlanRefused, "fuse-chains", "a chain of products"):
            call = kernels.kernel(chain, always)
    except RefusedError as error:
        return replace(found, family="", text=str(error))
    replaced[chain.output] = call
    name = str(call.function.name_hint)
    return replace(found, name=name, text=chain.summary, bins=call.bins)


def _blank(name: str, group: Group) -> ChainOutcome:
    products = tuple(str(each.name) for each in (*group.first, group.second))
    return ChainOutcome(name, products, "", "", None, None, "")
