"""The pass that makes one kernel of two layers of matrix products, wherever that pays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.blocks.access import is_reduction
from crossfuse.calls import checked
from crossfuse.cascade.algebra import derive
from crossfuse.hardware import Device, device
from crossfuse.lower.refusal import refusals
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, ROWS
from crossfuse.relax.calls import is_rest, read_calls
from crossfuse.relax.chains.groups import find_made_rows
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.choice import choose
from crossfuse.relax.graph import Graph, clean, read_graph
from crossfuse.relax.merge import merged
from crossfuse.relax.operators import LEGAL, PRODUCT, refused
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.relax.pad_weights import padding_once, weights_of
from crossfuse.relax.passes import ATTENTION, WideArithmetic, check_row_wise, without_unit_extents
from crossfuse.relax.replace import with_replacements
from crossfuse.relax.symbols import at_sizes, is_symbolic, symbols_of, value_at
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.schedule.cascades import only_site, schedule_cascade_of

# Kernels of a product of symbolic rows, fused with the prologue that makes these rows.

#: The smallest size of a symbol where rows are followed; each symbol gets another power of two.
_LEAST = 16
_INSTEAD = "leave the model unfused, or give it one number of rows"


@dataclass(frozen=True)
class OutlinedRows(Outlined):
    """Rows and their product as one function.

    The extents are those of the product: M, K and L, which is N too.
    """

    @property
    def kind(self) -> str:
        """Name of the kind of function; kernels are named after it."""
        return "rows_gemm"


class RowsKernels(ChainKernels):
    """Kernels of products that make their rows; see `ChainKernels`."""

    find = staticmethod(find_made_rows)

    def outlined(self, static: Any) -> OutlinedRows:
        """See `ChainKernels.outlined`; refuses all but a cascade of rows before a product."""
        with refusals("rows before a product"):
            whole, inputs, params = _loops(static)
            func = _inlined(without_unit_extents(whole))
        arguments = tuple(map(partial(_argument, params), inputs, func.params))
        return _outlined(func, arguments, _depth(static["main"]))

    def check_rows(self, function: Any, rows: Any) -> None:
        """See `ChainKernels.check_rows`; also refuses what mixes rows.

        Unlike in chains, an operator that makes rows may run along the batch.
        """
        super().check_rows(function, rows)
        sizes = {each: _LEAST << at for at, each in enumerate(symbols_of(function))}
        with refusals("rows before a product"):
            func, inputs, params = _loops(at_sizes(function, sizes))
        given = [
            each in params and is_symbolic(function.params[params.index(each)]) for each in inputs
        ]
        check_row_wise(func, given, value_at(rows, sizes))

    def ranked(self, func: Any) -> Sequence[CascadePlan]:
        """See `ChainKernels.ranked`.

        Plans that cut rows into chunks are left out: their kernels need all rows, not fewer.
        """
        site = only_site(func)
        shape = cascade_shape(site, derive(site.cascade), "rows before a product")
        if shape.product is None:
            limit = (
                "a norm or a quantiser of rows, and one product of them and weights, of 2 bytes an "
                "element or 1"
            )
            raise refused("main", "reductions, and a product of another form", limit, _INSTEAD)
        plans = ranked_cascade(shape, self.target, only=(ROWS, EAGER))
        return [each for each in plans if not each.tiles.get("chunk")]

    def read_plan(self, text: str) -> CascadePlan:
        """See `ChainKernels.read_plan`."""
        return CascadePlan.from_json(text)

    def scheduled(self, func: Any, plan: Any) -> Any:
        """See `ChainKernels.scheduled`."""
        return schedule_cascade_of(func, ROWS, plan.tiles, constant_weights=self._constant)


def _loops(static: Any) -> tuple[Any, tuple[Any, ...], list[Var]]:
    """A module's function as one of loops, what that reads, and the parameters of the module's."""
    legalize = relax.transform.LegalizeOps({**ATTENTION, **LEGAL})
    passes = [WideArithmetic(), relax.transform.CanonicalizeBindings(), legalize]
    mod = ir.tvm.ir.transform.Sequential(passes)(static)
    graph = _calls(mod)
    func = ir.narrow(merged(graph, graph.nodes))
    return func, graph.inputs(graph.nodes), list(mod["main"].params)


def _inlined(func: Any) -> Any:
    """Inline so that one block follows the product, and no block only moves an input.

    So weights are read where they are, and the epilogue is one expression.
    """
    schedule = ir.Schedule(func)
    blocks: list[Any] = []
    ir.walk(func.body.block.body, (ir.SBlock, blocks.append))
    behind = max((at for at, each in enumerate(blocks) if _sums(each)), default=0)
    for at, each in enumerate(blocks):
        if not isinstance(each.body, ir.BufferStore) or _sums(each):
            continue
        value = each.body.value
        moves = isinstance(value, ir.TensorLoad) and value.source in func.params
        if (moves or at > behind) and each.body.buffer not in func.params:
            schedule.compute_inline(schedule.get_sblock(str(each.name_hint)))
    (made,) = schedule.mod.functions.values()
    return made


def _sums(block: Any) -> bool:
    return any(is_reduction(each) for each in block.iter_vars)


def _calls(mod: Any) -> Graph:
    """The calls of a function of one block; refuses one with a call that cannot be merged."""
    (block,) = mod["main"].body.blocks
    graph = read_calls(mod, block)
    odd = next((each for each in graph.nodes if each.reason), None)
    if odd is not None:
        raise refused(odd.name, odd.reason, "operators that become functions of loops", _INSTEAD)
    return graph


def _argument(params: Sequence[Var], value: Any, buffer: Any) -> Argument:
    """Where an input comes from, and the buffer of the function of loops that it becomes."""
    shape, dtype = tuple(int(each) for each in buffer.ty.shape), str(buffer.ty.dtype)
    if not isinstance(value, Var):
        return Argument("constant", "", -1, shape, dtype, value.value.numpy())
    return Argument(str(value.name), str(value.name), params.index(value), shape, dtype)


def _outlined(func: Any, arguments: tuple[Argument, ...], depth: int) -> OutlinedRows:
    output = func.params[-1].ty
    shape = tuple(int(each) for each in output.shape)
    if len(shape) != 2:
        found = f"a result of shape {list(shape)}, its rows in one extent"
        raise refused("main", found, "a matrix of rows", _INSTEAD)
    dtype, (rows, columns) = str(output.dtype), shape
    fields = (rows, depth, columns, columns, False, dtype, shape, dtype, "", "")
    return OutlinedRows(func, arguments, *fields)


def _depth(function: Any) -> int:
    """The extent that the product of a function sums over."""
    graph = read_graph(function)
    (product,) = (each.var for each in graph.nodes if each.operator == PRODUCT)
    return int(graph.arguments(product)[0].ty.shape.values[-1])


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
    these. Everything else stays as it is.

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
        What became of each pair of layers of the last module, in order; then of each product of
        symbolic rows that more than element-wise operators make.

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
        made, self.outcomes = self._fused(clean(mod), ChainKernels)
        if self.bins:
            made, outcomes = self._fused(made, RowsKernels)
            self.outcomes += outcomes
        return padding_once(made, weights_of(made, self.weights))

    def _fused(self, mod: Any, kind: type[ChainKernels]) -> tuple[Any, tuple[ChainOutcome, ...]]:
        """A module with kernels of one kind, and what became of its groups."""
        outcomes: list[ChainOutcome] = []
        fused: dict[Any, Any] = {}
        weights = weights_of(mod, self.weights)
        kernels = kind(mod, self.target, self.constant_weights, bins=self.bins, weights=weights)
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
