"""Kinds of groups that kernels of products compute: how each is found, written and planned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

from tvm import relax
from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import is_reduction
from crossfuse.cascade.algebra import derive
from crossfuse.hardware import Device
from crossfuse.lower.refusal import refusals
from crossfuse.measure.choice import FEW
from crossfuse.planner.cascade.plan import CascadePlan, ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.planner.families import EAGER, ROWS, ROWS_CHAIN
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.planner.plan import Plan
from crossfuse.relax.calls import read_calls
from crossfuse.relax.chains.groups import Group, find_chains, find_made_chains, find_made_rows
from crossfuse.relax.graph import Graph, read_graph
from crossfuse.relax.merge import merged
from crossfuse.relax.operators import LEGAL, PRODUCT, refused
from crossfuse.relax.outline import Argument, Outlined, outline
from crossfuse.relax.passes import ATTENTION, WideArithmetic, check_row_wise, without_unit_extents
from crossfuse.relax.symbols import at_sizes, check_symbols, is_symbolic, symbols_of, value_at
from crossfuse.schedule.planned import (
    only_site,
    rank_function,
    schedule_cascade_of,
    schedule_planned,
)


class GroupKind(ABC):
    """A kind of groups; whoever adds one adds an object of such a class."""

    #: What cached plans and kernels of it are filed under, with the function.
    name: ClassVar[str]
    #: What its plans are.
    plan: ClassVar[type[Plan] | type[CascadePlan]]

    @abstractmethod
    def find(self, graph: Graph) -> Iterator[Group]:
        """Find the groups of a graph that may be of this kind."""

    @abstractmethod
    def outlined(self, static: Any) -> Outlined:
        """A group of static shapes, a module of its own, as one function."""

    def check_rows(self, function: Any, rows: Any) -> None:
        """Refuse a group of symbolic rows in which symbols are more than a number of rows."""
        check_symbols(function, rows)

    def apart(self, graph: Graph, group: Group) -> float:
        """Kernels that a group takes the place of beside those of its products: shares of them."""
        return 0.0

    def joined(self, graph: Graph, found: Sequence[Any], target: Device) -> Iterator[Any]:
        """Groups that one kernel may compute together, of those that were planned; none."""
        yield from ()

    @abstractmethod
    def ranked(self, func: Any, target: Device) -> Sequence[Plan | CascadePlan]:
        """Plans of a function, best first; at least one is of a kernel of ours."""

    @abstractmethod
    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """The function scheduled as a plan says."""


class Chains(GroupKind):
    """Layers of products, each of which reads the one before it element by element."""

    name = "chain"
    plan = Plan

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        return find_chains(graph)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`."""
        return outline(static)

    def ranked(self, func: Any, target: Device) -> Sequence[Plan | CascadePlan]:
        """See `GroupKind`."""
        return rank_function(func, target, keep=FEW)

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return schedule_planned(func, plan, constant_weights=constant)


# Products whose rows a norm, a softmax or a quantiser makes, in the kernel that does it too.

#: The smallest size of a symbol where rows are followed; each symbol gets another power of two.
_LEAST = 16
_INSTEAD = "leave the model unfused, or give it one number of rows"


class MadeRows(GroupKind):
    """A product of symbolic rows, with the prologue that makes them.

    Of static rows `crossfuse.relax.FuseCascades` finds these.
    """

    name = "rows"
    plan = CascadePlan
    #: Family of its kernels, and what they are in words.
    family: ClassVar[str] = ROWS
    text: ClassVar[str] = "rows before a product"
    #: What other functions are, and what the function has to be.
    odd: ClassVar[str] = "reductions, and a product of another form"
    limit: ClassVar[str] = (
        "a norm or a quantiser of rows, and one product of them and weights, of 2 bytes an "
        "element or 1"
    )
    #: What its kernels are called.
    called: ClassVar[str] = "rows_gemm"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        return find_made_rows(graph)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`; refuses all but a cascade of rows before the products."""
        products = _products(static["main"])
        with refusals(self.text):
            whole, inputs, params = _loops(self.flat(static))
            func = _inlined(without_unit_extents(whole), len(products))
        arguments = tuple(map(partial(_argument, params), inputs, func.params))
        return _outlined(self.called, func, arguments, products)

    def flat(self, static: Any) -> Any:
        """The module with its rows in one extent; symbolic ones are planned so."""
        return static

    def check_rows(self, function: Any, rows: Any) -> None:
        """See `GroupKind`; also refuses what mixes rows.

        Unlike in chains, an operator that makes rows may run along the batch.
        """
        super().check_rows(function, rows)
        sizes = {each: _LEAST << at for at, each in enumerate(symbols_of(function))}
        with refusals(self.text):
            func, inputs, params = _loops(at_sizes(function, sizes))
        given = [
            each in params and is_symbolic(function.params[params.index(each)]) for each in inputs
        ]
        check_row_wise(func, given, value_at(rows, sizes))

    def ranked(self, func: Any, target: Device) -> Sequence[CascadePlan]:
        """See `GroupKind`.

        Plans that cut rows into chunks are left out: their kernels need all rows, not fewer.
        """
        site = only_site(func)
        shape = cascade_shape(site, derive(site.cascade), self.text)
        if not CASCADE_FAMILIES[self.family].matches(shape):
            raise refused("main", self.odd, self.limit, _INSTEAD)
        plans = ranked_cascade(shape, target, only=(self.family, EAGER))
        whole = [each for each in plans if not each.tiles.get("chunk")]
        if all(each.family == EAGER for each in whole):
            # Says which rule leaves no tiles.
            ranked_cascade(shape, target, only=(self.family,))
            raise refused("main", "rows that are made chunk by chunk alone", "whole rows", _INSTEAD)
        return whole

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return schedule_cascade_of(func, self.family, plan.tiles, constant_weights=constant)


class MadeChains(MadeRows):
    """A chain of two products with the norm in front of it, of static or symbolic rows."""

    name = "rows_chain"
    family = ROWS_CHAIN
    text = "rows before a chain of products"
    odd = "reductions, and products of another form"
    limit = "a norm or a quantiser of rows, and two layers of products behind it"
    called = "rows_chain"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        return find_made_chains(graph)

    def flat(self, static: Any) -> Any:
        """See `MadeRows.flat`; refuses what mixes rows."""
        main = static["main"]
        leading = [int(each) for each in main.ret_ty.shape.values[:-1]]
        if len(leading) < 2 or prod(leading[:-1]) == 1:
            return static
        func, inputs, params = _loops(static)
        has = [each in params and _extents(each)[:-1] == leading for each in inputs]
        check_row_wise(func, has, prod(leading))
        return _flattened(main, leading)


def _extents(value: Any) -> list[int]:
    return [int(each) for each in value.ty.shape.values]


def _flattened(main: Any, leading: list[int]) -> Any:
    """A module of a function with its rows, so many leading extents, in the last one of these.

    It computes the same rows, if each depends on the same row of what it is given alone.
    """
    rows = [*[1] * (len(leading) - 1), prod(leading)]

    def parameter(old: Var) -> Var:
        extents = _extents(old)
        if extents[:-1] != leading:
            return Var(old.name, old.ty)
        return Var(old.name, relax.TensorType([*rows, extents[-1]], str(old.ty.dtype)))

    def image(value: Any) -> Any:
        if isinstance(value, relax.ShapeExpr) and [*map(int, value.values)][:-1] == leading:
            return relax.ShapeExpr([*rows, value.values[-1]])
        return images.get(value, value)

    builder, params = relax.BlockBuilder(), [*map(parameter, main.params)]
    images: dict[Any, Any] = dict(zip(main.params, params, strict=True))
    with builder.function("main", params):
        with builder.dataflow():
            for each in (binding for block in main.body.blocks for binding in block.bindings):
                call = each.value
                given = [image(argument) for argument in call.args]
                made = relax.Call(call.op, given, call.attrs, call.ty_args)
                images[each.var] = builder.emit(made)
            result = builder.emit_output(images[main.body.body])
        builder.emit_func_output(result)
    return builder.get()


def _loops(static: Any) -> tuple[Any, tuple[Any, ...], list[Var]]:
    """A module's function as one of loops, what that reads, and the parameters of the module's."""
    legalize = relax.transform.LegalizeOps({**ATTENTION, **LEGAL})
    passes = [WideArithmetic(), relax.transform.CanonicalizeBindings(), legalize]
    mod = ir.tvm.ir.transform.Sequential(passes)(static)
    graph = _calls(mod)
    func = ir.narrow(merged(graph, graph.nodes))
    return func, graph.inputs(graph.nodes), list(mod["main"].params)


def _inlined(func: Any, products: int) -> Any:
    """Inline so that one block follows each product, and no block only moves an input.

    So weights are read where they are, and what follows a product is one expression. The last
    `products` sums are products; of several, no block only moves what they read.
    """
    if products > 1:
        func = _without(func, [each for each in _blocks(func) if _moves(each)])
    blocks = _blocks(func)
    sums = [at for at, each in enumerate(blocks) if _sums(each)]
    behind = (sums[-products:] or [0])[0]
    summed = {read.source for at in sums for read in blocks[at].reads}

    def is_inside(at: int, block: Any) -> bool:
        return at > behind and not _sums(block) and block.writes[0].source not in summed

    return _without(
        func,
        [
            each
            for at, each in enumerate(blocks)
            if is_inside(at, each) or (_moves(each) and each.body.value.source in func.params)
        ],
    )


def _blocks(func: Any) -> list[Any]:
    blocks: list[Any] = []
    ir.walk(func.body.block.body, (ir.SBlock, blocks.append))
    return blocks


def _moves(block: Any) -> bool:
    """Whether a block only copies a tensor, such as one that reshapes it."""
    body = block.body
    return isinstance(body, ir.BufferStore) and isinstance(body.value, ir.TensorLoad)


def _without(func: Any, blocks: Sequence[Any]) -> Any:
    """The function with the blocks inlined that store no parameter."""
    schedule = ir.Schedule(func)
    for each in blocks:
        if isinstance(each.body, ir.BufferStore) and each.body.buffer not in func.params:
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
    shape, dtype = tuple(int(each) for each in buffer.ty.shape), str(buffer.ty.dtype)
    if not isinstance(value, Var):
        return Argument("constant", "", -1, shape, dtype, value.value.numpy())
    return Argument(str(value.name), str(value.name), params.index(value), shape, dtype)


def _outlined(
    kind: str, func: Any, arguments: tuple[Argument, ...], products: list[Any]
) -> Outlined:
    """The function as an outlined one; its extents are those of the products."""
    output = func.params[-1].ty
    shape = tuple(int(each) for each in output.shape)
    if len(shape) != 2:
        found = f"a result of shape {list(shape)}, its rows in one extent"
        raise refused("main", found, "a matrix of rows", _INSTEAD)
    dtype, (rows, columns) = str(output.dtype), shape
    depth, width = products[0]
    return Outlined(
        func=func,
        arguments=arguments,
        M=rows,
        K=depth,
        N=width,
        L=columns,
        gated=len(products) > 2,
        dtype=dtype,
        output_shape=shape,
        output_dtype=dtype,
        middle="",
        epilogue="",
        kind=kind,
    )


def _products(function: Any) -> list[tuple[int, int]]:
    """Extents that the products of a function sum over, and their columns, in order."""
    graph = read_graph(function)
    every = (each.var for each in graph.nodes if each.operator == PRODUCT)
    return [
        (int(graph.arguments(each)[0].ty.shape.values[-1]), int(each.ty.shape.values[-1]))
        for each in every
    ]
