"""What a pass made of a graph of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.torch.kernels import KeptKernel
from crossfuse.torch.rewrite import Call, rewrite

if TYPE_CHECKING:
    from crossfuse.relax.chains.replace import Replacement


@dataclass(frozen=True)
class Step:
    """Groups that became kernels, in a form that another process can repeat.

    Attributes
    ----------
    kernels : tuple[KeptKernel, ...]
        The kernels.
    calls : tuple[Call, ...]
        What takes the place of which nodes.
    """

    kernels: tuple[KeptKernel, ...] = ()
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Fused:
    """What became of a graph.

    Attributes
    ----------
    outcomes : tuple[ChainOutcome, ...]
        Of each group that was found.
    step : Step
        What was replaced.
    untranslated : tuple[str, ...]
        Operators that TVM does not know.
    """

    outcomes: tuple[ChainOutcome, ...] = ()
    step: Step = Step()
    untranslated: tuple[str, ...] = ()


def replaced(
    module: fx.GraphModule,
    nodes: Mapping[Any, fx.Node],
    replacements: Mapping[Any, Replacement],
    kernels: Mapping[Any, KeptKernel],
) -> Step:
    """Replace groups in place.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of aten operators.
    nodes : Mapping[Var, fx.Node]
        Its nodes by the variables of its translation.
    replacements : Mapping[Var, Replacement]
        By the variables that they make.
    kernels : Mapping[GlobalVar, KeptKernel]
        By function.

    Returns
    -------
    Step
        What was done.
    """
    calls = tuple(
        Call(
            nodes[variable].name,
            tuple(nodes[each].name for each in found.inputs),
            tuple(tuple(map(int, each)) for each in found.shapes),
            kernels[found.function].key,
        )
        for variable, found in replacements.items()
    )
    rewrite(module, calls)
    return Step(tuple(kernels.values()), calls)
