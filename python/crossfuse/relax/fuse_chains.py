"""The pass that makes one kernel of two layers of matrix products, wherever that pays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.calls import checked
from crossfuse.hardware import Device, device
from crossfuse.relax.calls import is_rest
from crossfuse.relax.chains.experts import Experts
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.kinds import Chains, GroupKind, MadeChains, MadeRows
from crossfuse.relax.chains.products import GatedFewRows
from crossfuse.relax.choice import choose
from crossfuse.relax.graph import Node, clean, emit_copies, read_graph, with_bindings, with_body
from crossfuse.relax.operators import refused
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.relax.replace import with_replacements
from crossfuse.relax.slices import with_slices
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.runtime.model_artefact import PAD_WEIGHTS

# Weights with rows padded once, outside of the model, instead of in each call.

_MAIN = "main"
_PAD = "relax.nn.pad"
#: Operators that make padded copies of weights.
_MAKERS = (_PAD, "relax.reshape")


def padding_once(mod: Any, weights: Sequence[Any]) -> Any:
    """Move the padding of weights to a function of its own, ``pad_weights``.

    The weights are the last parameters of ``main``. Called with all of them, ``pad_weights`` makes
    what ``main`` then takes in their place: those that it reads itself, then the copies. A module
    without copies is returned as it is.
    """
    moved = _moved(mod[_MAIN], weights) if weights else []
    copies = [each.var for each in moved if each.operator == _PAD]
    if not copies:
        return mod
    made = clean(_with_main(mod, _taking(mod[_MAIN], copies)))
    main = made[_MAIN]
    graph = read_graph(main)
    inputs = len(main.params) - len(weights) - len(copies)
    pairs = zip(main.params[inputs:], (*weights, *copies), strict=True)
    kept = {
        given: source for given, source in pairs if given in graph.readers or given in graph.results
    }
    made = _with_main(made, with_body(main, main.body, [*main.params[:inputs], *kept]))
    made[PAD_WEIGHTS] = _alone(weights, moved, [*kept.values()])
    return made


def weights_of(mod: Any, names: Collection[str]) -> tuple[Any, ...]:
    """Parameters of ``main`` of the given names, in order."""
    return tuple(each for each in mod[_MAIN].params if str(each.name) in names) if names else ()


def _moved(function: Any, weights: Collection[Any]) -> list[Node]:
    known, found = set(weights), []
    for node in read_graph(function).nodes:
        if node.operator in _MAKERS and node.value.args[0] in known:
            found.append(node)
            known.add(node.var)
    return found


def _taking(function: Any, copies: Sequence[Any]) -> Any:
    """A function that takes copies as parameters instead of making them."""
    given = {each: relax.Var(str(each.name), each.ty) for each in copies}
    return with_bindings(
        function,
        lambda block: [
            relax.VarBinding(each.var, given[each.var]) if each.var in given else each
            for each in block.bindings
        ],
        [*function.params, *given.values()],
    )


def _alone(weights: Sequence[Any], moved: Sequence[Node], results: Sequence[Any]) -> Any:
    """The function ``pad_weights``, which makes the copies."""
    image: dict[Any, Any] = {each: relax.Var(str(each.name), each.ty) for each in weights}
    builder = relax.BlockBuilder()
    with builder.function(PAD_WEIGHTS, [*image.values()]):
        with builder.dataflow():
            emit_copies(builder, moved, image)
            made = builder.emit_output(relax.Tuple([image[each] for each in results]))
        builder.emit_func_output(made)
    return builder.get()[PAD_WEIGHTS]


def _with_main(mod: Any, function: Any) -> Any:
    made = mod.clone()
    made.update_func(made.get_global_var(_MAIN), function)
    return made


# The pass.


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
    where that saves more. Two products of the same rows, at most eight, which meet element by
    element as gate and up do, are one kernel where the layer behind them is none with them, and so
    are products of tokens by the weights of chosen experts, with what is made of them. Everything
    else stays as it is.

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
        its rows; of gate and up of few rows; then of each product of symbolic rows that more than
        element-wise operators make.

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
        made = clean(with_slices(clean(mod)))
        made, self.outcomes = self._fused(made, Chains(), MadeChains(), GatedFewRows(), Experts())
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
