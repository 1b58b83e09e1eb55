"""Which chains of a dataflow become kernels."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm.ir import Var

from crossfuse.errors import RefusedError
from crossfuse.planner.families import EAGER
from crossfuse.relax.chains.groups import Group, find_groups
from crossfuse.relax.chains.kernels import ChainKernels, PlannedChain
from crossfuse.relax.chains.replace import Replacement
from crossfuse.relax.dataflow import Dataflow


@dataclass(frozen=True)
class ChainOutcome:
    """What became of two layers.

    Attributes
    ----------
    function : str
        The Relax function that they are in.
    products : tuple[str, ...]
        Variables of the products, the last one last.
    name : str
        The kernel that computes them; empty where they were left alone.
    family : str
        Its family, see `crossfuse.planner.families`; ``"eager"`` where not to fuse is faster.
    microseconds, eager_microseconds : float | None
        Estimated times of the kernel and of not fusing; None where nothing was planned.
    text : str
        The chain that was found, or why there is none.

    Examples
    --------
    >>> left = ChainOutcome("main", ("lv", "lv2"), "", "eager", 9.5, 9.0, "not to fuse is faster")
    >>> left.microseconds - left.eager_microseconds
    0.5
    """

    function: str
    products: tuple[str, ...]
    name: str
    family: str
    microseconds: float | None
    eager_microseconds: float | None
    text: str


def told(outcomes: Sequence[ChainOutcome]) -> str:
    """What became of chains, one line for each pair of layers.

    Parameters
    ----------
    outcomes : Sequence[ChainOutcome]
        Of a graph or a model.

    Returns
    -------
    str
        With estimated times of kernels, and reasons of the others; never empty.
    """
    return "\n".join(map(_line, outcomes)) or "no two layers of matrix products"


def _line(outcome: ChainOutcome) -> str:
    products = ", ".join(outcome.products)
    if not outcome.name:
        return f"{products}: left, {outcome.text}"
    ours, eager = outcome.microseconds, outcome.eager_microseconds
    return f"{products}: {outcome.name}, about {ours:.1f} of {eager:.1f} us; {outcome.text}"


@dataclass(frozen=True)
class ChosenChains:
    """Chains of a function that are to be kernels, and what became of all.

    Attributes
    ----------
    replacements : Mapping[Var, Replacement]
        Calls by the variables that they make.
    outcomes : tuple[ChainOutcome, ...]
        Of each pair of layers, in order.
    """

    replacements: Mapping[Var, Replacement]
    outcomes: tuple[ChainOutcome, ...]


def choose_chains(
    name: str,
    dataflow: Dataflow,
    kernels: ChainKernels,
    always: bool = False,
    known: Container[Any] | None = None,
) -> ChosenChains:
    """Plan all chains of a function, and schedule those that pay and do not overlap.

    Parameters
    ----------
    name : str
        Of the function.
    dataflow : Dataflow
        Its bindings.
    kernels : ChainKernels
        Plans and schedules, and keeps the functions.
    always : bool
        Whether those are taken too that are estimated to be slower than not to fuse them.
    known : Container[Var] | None
        Variables that chains may begin and end with; None allows all.

    Returns
    -------
    ChosenChains
        Of chains that share a product the one that saves most is taken.
    """
    outcomes: dict[Var, ChainOutcome] = {}
    chains: list[PlannedChain] = []
    for group in find_groups(dataflow):
        blank = _blank(name, group)
        try:
            chains.append(kernels.planned(dataflow, group, known))
        except RefusedError as error:
            blank = replace(blank, text=str(error))
        outcomes[group.second] = blank
    taken: dict[Var, str] = {}
    replaced: dict[Var, Replacement] = {}
    for chain in sorted(chains, key=lambda each: -each.gain):
        found = _judged(chain, taken, outcomes[chain.group.second], always)
        if not found.text:
            found = _scheduled(chain, kernels, found, replaced)
        if found.name:
            taken |= dict.fromkeys((*chain.group.first, chain.group.second), found.name)
        outcomes[chain.group.second] = found
    return ChosenChains(replaced, tuple(outcomes.values()))


def _judged(
    chain: PlannedChain, taken: Mapping[Var, str], blank: ChainOutcome, always: bool
) -> ChainOutcome:
    """The outcome of a chain that is left alone; without text if it is to be fused."""
    judged = replace(
        blank,
        family=chain.ours.family,
        microseconds=chain.ours.microseconds,
        eager_microseconds=chain.eager,
    )
    products = (*chain.group.first, chain.group.second)
    other = next((taken[each] for each in products if each in taken), "")
    if other:
        return replace(judged, text=f"a product of it is in {other}, which saves more")
    if chain.gain <= 0 and not always:
        text = f"not to fuse is estimated to be faster by {-chain.gain:.1f} us"
        return replace(judged, family=EAGER, text=text)
    return judged


def _scheduled(
    chain: PlannedChain,
    kernels: ChainKernels,
    found: ChainOutcome,
    replaced: dict[Var, Replacement],
) -> ChainOutcome:
    try:
        call = kernels.kernel(chain)
    except RefusedError as error:
        return replace(found, family="", text=str(error))
    replaced[chain.output] = call
    return replace(found, name=str(call.function.name_hint), text=chain.outlined.summary)


def _blank(name: str, group: Group) -> ChainOutcome:
    products = tuple(str(each.name) for each in (*group.first, group.second))
    return ChainOutcome(name, products, "", "", None, None, "")
