"""The pass that makes one kernel of two layers of matrix products, wherever that pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import relax
from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device, device
from crossfuse.planner.families import EAGER
from crossfuse.relax.chain_kernels import ChainKernels, PlannedChain
from crossfuse.relax.dataflow import Dataflow, clean, read_dataflow
from crossfuse.relax.groups import Group, find_groups
from crossfuse.relax.replace import Replacement, with_replacements


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
    """

    function: str
    products: tuple[str, ...]
    name: str
    family: str
    microseconds: float | None
    eager_microseconds: float | None
    text: str


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.FuseChains")
class FuseChains:
    """Replace two layers of matrix products by one scheduled function, where that is faster.

    A pass over modules before ``LegalizeOps``. Layers are found by dataflow: a product whose left
    operand is made, element by element, of one product or of two of the same matrix. Activations
    may be decomposed in any way; casts, reshapes that keep rows, biases, residuals and transposed
    weights belong to the chain. Each chain is planned (`crossfuse.plan`); of chains that overlap
    the one that saves most is taken. Everything else stays as it is.

    Parameters
    ----------
    target : str | Device
        What to plan for.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights, see `crossfuse.compile`.

    Attributes
    ----------
    outcomes : tuple[ChainOutcome, ...]
        What became of each pair of layers of the last module, in order.

    Examples
    --------
    >>> fuse = FuseChains("nvidia-h100")            # doctest: +SKIP
    >>> mod = fuse(mod)
    >>> [(each.name, each.family, each.text) for each in fuse.outcomes]
    """

    def __init__(
        self,
        target: str | Device = "nvidia-h100",
        *,
        always: bool = False,
        constant_weights: bool = False,
    ) -> None:
        self.target = device(target)
        self.always = always
        self.constant_weights = constant_weights
        self.outcomes: tuple[ChainOutcome, ...] = ()

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `FuseChains`."""
        made = clean(mod)
        outcomes: list[ChainOutcome] = []
        fused: dict[Any, Any] = {}
        kernels = ChainKernels(made, self.target, self.constant_weights)
        for name, function in made.functions_items():
            if isinstance(function, relax.Function):
                dataflow = read_dataflow(function)
                fused[name], found = self._fused(str(name.name_hint), dataflow, kernels)
                outcomes += found
        self.outcomes = tuple(outcomes)
        made = kernels.module
        for name, function in fused.items():
            made.update_func(name, function)
        return clean(made)

    def _fused(
        self, name: str, dataflow: Dataflow, kernels: ChainKernels
    ) -> tuple[Any, list[ChainOutcome]]:
        """A function with its chains replaced, and what became of each."""
        outcomes: dict[Var, ChainOutcome] = {}
        chains: list[PlannedChain] = []
        for group in find_groups(dataflow):
            blank = _blank(name, group)
            try:
                chains.append(kernels.planned(dataflow, group))
            except RefusedError as error:
                blank = replace(blank, text=str(error))
            outcomes[group.second] = blank
        taken: dict[Var, str] = {}
        replaced: dict[Var, Replacement] = {}
        for chain in sorted(chains, key=lambda each: -each.gain):
            found = self._judge(chain, taken, outcomes[chain.group.second])
            if not found.text:
                try:
                    call = replaced[chain.output] = kernels.kernel(chain)
                    name = str(call.function.name_hint)
                    found = replace(found, name=name, text=chain.outlined.summary)
                    taken |= dict.fromkeys((*chain.group.first, chain.group.second), name)
                except RefusedError as error:
                    found = replace(found, family="", text=str(error))
            outcomes[chain.group.second] = found
        return with_replacements(dataflow.function, replaced), list(outcomes.values())

    def _judge(
        self, chain: PlannedChain, taken: dict[Var, str], blank: ChainOutcome
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
        if chain.gain <= 0 and not self.always:
            text = f"not to fuse is estimated to be faster by {-chain.gain:.1f} us"
            return replace(judged, family=EAGER, text=text)
        return judged


def _blank(name: str, group: Group) -> ChainOutcome:
    products = tuple(str(each.name) for each in (*group.first, group.second))
    return ChainOutcome(name, products, "", "", None, None, "")
