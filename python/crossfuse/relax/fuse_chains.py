"""The pass that makes one kernel of two layers of matrix products, wherever that pays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.hardware import Device, device
from crossfuse.relax.calls import is_rest
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.kinds import Chains, GroupKind, MadeChains, MadeRows
from crossfuse.relax.choice import choose
from crossfuse.relax.graph import clean, read_graph
from crossfuse.relax.operators import refused
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.relax.pad_weights import padding_once, weights_of
from crossfuse.relax.replace import with_replacements
from crossfuse.runtime.dispatch_table import BINS


@ir.tvm.ir.transform.module_pass(opt_level=0, name="crossfuse.FuseChains")
@checked
class FuseChains:
    """Replace two layers of matrix products by one scheduled function, where that is faster.

    A pass over modules before ``LegalizeOps``. Layers are found by dataflow: a product whose left
    operand is made, element by element, of one product or of two of the same matrix. Activations
    may be decomposed in any way; casts, reshapes that keep rows, biases, residuals and transposed
    weights belong to the chain. Each chain is planned (`crossfuse.plan`); of chains that overlap
    the one that saves most is taken. Of symbolic rows a product is taken too whose rows a norm, a
    softmax or a quantiser makes, which nothing else reads; of static rows `FuseCascades` takes
    these. A norm in front of two layers, which nothing else reads, becomes a part of their kernel
    where that saves more. Everything else stays as it is.

    Parameters
    ----------
    target : str | Device | None
        What to plan for.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    constant_weights : bool
        Whether no kernel that may still be running writes the weights, see `crossfuse.compile`.
    bins : Sequence[int]
        Rows of a call, at most, that kernels are made for where the number of rows is symbolic; a
        call takes the smallest that holds its rows. More rows, and bins that fusing does not pay
        in, are computed by the operators of the model. The function's attribute
        ``tir_var_upper_bound`` leaves out bins that no call needs. Without any bin, chains of
        symbolic rows stay as they are.
    weights : Collection[str]
        Parameters of ``main``, the last ones, that are the same in each call. Where kernels need
        longer rows of them, for TMA, the module gets a function ``pad_weights``: called once with
        all of them it makes what ``main`` then takes in their place. Rows of other parameters are
        copied by the kernels in each call, those of constants by this pass. With
        `constant_weights` too, what ``pad_weights`` launched has to end before ``main`` begins.

    Raises
    ------
    WorkloadRefused
        For bins that are no positive numbers.

    Attributes
    ----------
    outcomes : tuple[ChainOutcome, ...]
        What became of each pair of layers of the last module, in order, and of each with what makes
        its rows; then of each product of symbolic rows that more than element-wise operators make.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.relax import import_torch
    >>> from crossfuse.workload import chain_module
    >>> x = torch.zeros(128, 32, dtype=torch.bfloat16)
    >>> fuse = FuseChains("nvidia-h100")
    >>> mod = fuse(import_torch(chain_module(32, 512), (x,)).mod)
    >>> [(each.name, each.family) for each in fuse.outcomes]
    [('crossfuse_gemm_chain', 'registers')]
    """

    def __init__(
        self,
        target: str | Device | None = None,
        *,
        always: bool = False,
        constant_weights: bool = False,
        bins: Sequence[int] = BINS,
        weights: Collection[str] = (),
    ) -> None:
        self.target = device(target)
        self.always = always
        self.constant_weights = constant_weights
        self.bins = _checked(bins)
        self.weights = frozenset(weights)
        self.outcomes: tuple[ChainOutcome, ...] = ()

    def transform_module(self, mod: Any, _context: Any) -> Any:
        """See `FuseChains`.

        Parameters
        ----------
        mod : tvm.IRModule
            The module; it stays as it is.

        Returns
        -------
        tvm.IRModule
            With calls of the kernels.
        """
        made, self.outcomes = self._fused(clean(mod), Chains(), MadeChains())
        if self.bins:
            made, outcomes = self._fused(made, MadeRows())
            self.outcomes += outcomes
        return padding_once(made, weights_of(made, self.weights))

    def _fused(self, mod: Any, *kinds: GroupKind) -> tuple[Any, tuple[ChainOutcome, ...]]:
        """A module with kernels of some kinds of groups, and what became of its groups."""
        outcomes: list[ChainOutcome] = []
        fused: dict[Any, Any] = {}
        weights = weights_of(mod, self.weights)
        kernels = ChainKernels(
            mod, self.target, self.constant_weights, bins=self.bins, weights=weights, kinds=kinds
        )
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function) and not is_rest(function):
                graph = read_graph(function)
                chosen = choose(str(name.name_hint), graph, kernels, self.always)
                fused[name] = with_replacements(function, graph, chosen.replacements)
                outcomes += chosen.outcomes
        made = kernels.module
        for name, function in fused.items():
            made.update_func(name, function)
        return clean(made), tuple(outcomes)


def _checked(bins: Sequence[int]) -> tuple[int, ...]:
    if bins and min(bins) < 1:
        limit, instead = "positive numbers of rows", f"name some, such as {BINS}"
        raise refused("bins", repr(tuple(bins)), limit, instead)
    return tuple(sorted(set(bins)))
