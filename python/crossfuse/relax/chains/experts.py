"""Products of tokens by the weights of the experts that a router chose, in few tokens.

Written without a kernel of its own, each pair of a token and an expert copies this expert's
weights, and multiplies the copy: three times the traffic of reading them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

from tvm.ir import Var

from crossfuse import _tvm as ir
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.experts import best_kernels
from crossfuse.planner.plan import Plan, in_order, plan_of_kernel
from crossfuse.relax.chains.expert_match import Match, read_match
from crossfuse.relax.chains.groups import Group, after_product
from crossfuse.relax.chains.kinds import Chains
from crossfuse.relax.chains.products import GatedGroup
from crossfuse.relax.elementwise import Leaf, read_region
from crossfuse.relax.graph import Graph, clean, read_graph
from crossfuse.relax.operators import PRODUCT, RESHAPES, dtype_of, refused, scalar, shape_of
from crossfuse.relax.outline import Argument, Outlined
from crossfuse.schedule.rules.experts import read_experts, schedule_experts
from crossfuse.schedule.rules.skinny import SkinnyTiles
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.experts import ExpertProduct, ExpertsForm, emit_experts

_MATRIX = 2
#: How often the graph's own kernels pass the chosen weights: read, written, and read again; and
#: their number, beside that of what follows.
_PASSES, _KERNELS = 3, 3


class ExpertsGroup(GatedGroup):
    """The product of a match, with what is made of it."""

    def outputs(self, graph: Graph) -> Iterator[tuple[Var, tuple[Var, ...]]]:
        """See `Group.outputs`; the product as a matrix of pairs may be the result, too."""
        yield from super().outputs(graph)
        if graph.operator(self.meeting) in RESHAPES:
            yield self.meeting, ()


class Experts(Chains):
    """Products by weights that indices choose, with what is made of them."""

    name = "experts"

    def find(self, graph: Graph) -> Iterator[Group]:
        """See `GroupKind`."""
        for variable in graph.makers:
            if graph.operator(variable) == PRODUCT and (found := read_match(graph, variable)):
                yield _group(graph, found)

    def outlined(self, static: Any) -> Outlined:
        """See `GroupKind`."""
        return outline_experts(static)

    def ranked(self, func: Any, target: Device) -> Sequence[Plan]:
        """See `GroupKind`; against copies of the chosen weights, and products by these."""
        shape = read_experts(ir.Schedule(func)).shape
        wide = shape.wide
        of = matrix_chain(1, (wide.k, wide.n), gated=wide.products > 1)
        found = [plan_of_kernel(of, each, target) for each in best_kernels(shape, target)[:FEW]]
        if not found:
            limit = "weights of 16 bits in tiles of 16 columns, and a reduction in steps of 32"
            raise refused("main", shape.text, limit, "leave it to a library")
        rates = rates_of(target)
        copies = _PASSES * sum(wide.weight_bytes) / rates.measured.hbm_read
        kernels = _KERNELS * rates.fitted.eager_kernel
        terms = {"copies": copies, "kernels": kernels}
        apart = replace(found[0], family=EAGER, tiles={}, runners=(), kernels=(), terms=terms)
        apart = replace(apart, microseconds=copies + kernels, bound="copies")
        return in_order([*found, apart], fused=False)

    def scheduled(self, func: Any, plan: Any, constant: bool) -> Any:
        """See `GroupKind`."""
        return schedule_experts(func, tiles=SkinnyTiles(**plan.tiles))


def _group(graph: Graph, found: Match) -> Group:
    """The group of a match; its result is what the first operator makes that needs all parts."""
    meeting = _meeting(graph, found.made)
    stops = found.given
    inside = set(graph.reach(meeting, stops)[0])
    views = set(graph.reach(found.product, stops)[0]) - {found.product}
    if found.factor is not None or found.bias is not None:
        views |= {each for each in inside if found.product not in graph.reach(each, stops)[0]}
    before = tuple(each for each in graph.makers if each in inside)
    after = tuple(after_product(graph, meeting, before))
    return ExpertsGroup(((found.product,),), before, frozenset(views), after, meeting)


def _meeting(graph: Graph, made: Sequence[Var]) -> Var:
    """The first value that is made of all of some, element by element; the only one itself."""
    if len(made) == 1:
        return made[0]
    made_of: dict[Any, frozenset[Var]] = {each: frozenset({each}) for each in made}
    for value in graph.makers:
        if value not in made_of and graph.is_elementwise(value):
            sources = [made_of.get(each, frozenset()) for each in graph.arguments(value)]
            made_of[value] = frozenset().union(*sources)
            if len(made_of[value]) == len(made):
                return value
    return made[-1]


# How they are written.


def outline_experts(mod: Any) -> Outlined:
    """Turn a model of products by chosen weights into one function, see `Experts`."""
    graph = read_graph(clean(mod, "main")["main"])
    products = [each.var for each in graph.nodes if each.operator == PRODUCT]
    found = read_match(graph, products[0]) if len(products) == 1 else None
    if found is None:
        limit = "one product of rows by weights that indices choose along their first axis"
        raise refused("main", f"{len(products)} products", limit, "leave it to a library")
    rows = found.pairs // found.summed
    names = ("gemm0",) if len(found.made) == 1 else ("gemm0_gate", "gemm0_up")
    products_of = dict(zip(found.made, names, strict=True))
    leaves = graph.reach(graph.output, found.made)[1]
    others = [each for each in leaves if each not in products_of and scalar(each) is None]
    named = {**products_of, **{each: f"given{at}" for at, each in enumerate(others)}}
    region = read_region(graph, graph.output, named, found.made, rows)
    extras = [each for each in region.leaves if each.value not in products_of]
    form = _form(found, names, region, extras, dtype_of(graph.output))
    values = chain(found.given, (each.value for each in extras))
    arguments = tuple(
        _argument(graph, value, operand)
        for value, operand in zip(values, form.operands, strict=True)
    )
    depth = form.left.shape[1]
    return Outlined(
        func=emit_experts(form),
        arguments=arguments,
        M=rows,
        K=depth,
        N=form.columns,
        L=form.columns,
        gated=len(names) > 1,
        dtype=form.left.dtype,
        output_shape=shape_of(graph.output, "the output"),
        output_dtype=form.out,
        middle="",
        epilogue=region.text,
        kind="experts",
    )


def _form(
    found: Match, names: Sequence[str], region: Any, extras: Sequence[Leaf], out: str
) -> ExpertsForm:
    weights = shape_of(found.weight, "the weights")
    columns, depth = weights[1:] if found.k_major else (weights[2], weights[1])
    pairs = found.pairs
    return ExpertsForm(
        left=Operand("A", (pairs // found.repeats, depth), dtype_of(found.left)),
        weight=Operand("B", weights, dtype_of(found.weight)),
        places=Operand("places", _rows(found.places), dtype_of(found.places)),
        products=tuple(
            ExpertProduct(name, *begin) for name, begin in zip(names, found.begins, strict=True)
        ),
        columns=columns // len(names),
        epilogue=region.function,
        extras=tuple(each.operand for each in extras),
        out=out,
        pairs=pairs,
        repeats=found.repeats,
        summed=found.summed,
        factor=_operand("factor", found.factor),
        normalised=found.normalised,
        bounded=found.bounded,
        k_major=found.k_major,
        bias=_operand("bias", found.bias),
    )


def _operand(name: str, value: Any) -> Operand | None:
    return None if value is None else Operand(name, _rows(value), dtype_of(value))


def _rows(value: Any) -> tuple[int, int]:
    """A matrix's extents, or all elements of another tensor as one row."""
    shape = shape_of(value, "an operand")
    return (shape[0], shape[1]) if len(shape) == _MATRIX else (1, prod(shape))


def _argument(graph: Graph, value: Any, operand: Operand) -> Argument:
    if not isinstance(value, Var):
        return Argument(operand.name, "", -1, operand.shape, operand.dtype, value.value.numpy())
    position = list(graph.params).index(value)
    return Argument(operand.name, str(value.name), position, operand.shape, operand.dtype)
