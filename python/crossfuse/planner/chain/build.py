"""Chains from workload specs, and of any length from extents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

from crossfuse.calls import checked
from crossfuse.errors import RefusedError
from crossfuse.planner.chain.spec import Chain, Dim, Product, Reduction, Tensor, refused
from crossfuse.workload.conv_chain import ConvChainSpec
from crossfuse.workload.dtypes import float_type
from crossfuse.workload.expression import function_cycles
from crossfuse.workload.spec import LayersSpec, WorkloadSpec, affine, further_operands

if TYPE_CHECKING:
    from crossfuse.blocks import chain as blocks

# Chains assembled from their products, with one scheme of names.
#
# Dims are m, k, n and l, and b before them for a batch; from three products on they are m, k, n0,
# n1 and so on. Tensors are A to E; from three products on A, B0, C0, B1, C1 and so on. Two weights
# are B_gate and B_up. What else a product that makes C reads is C_0, C_1 and so on.

#: Dims of a product by what they do in it, in the order in which they index its tensors.
PARTS = ("batch", "row", "column", "summed")


@dataclass(frozen=True)
class Operand:
    """An input of a product, before it has a name and dims."""

    #: Bytes of an element.
    item: int
    #: See `Tensor`.
    repeats: int = 1
    #: Whether each matrix of the batch has its own.
    batched: bool = False


@dataclass(frozen=True)
class Further:
    """A further input of a product, such as a bias."""

    #: Dims that index it, by their names in `PARTS`.
    parts: tuple[str, ...]
    #: See `Tensor`.
    item: int
    repeats: int = 1


@dataclass(frozen=True)
class Reduced:
    """A reduction of what a product makes, or of the first left operand; see `Reduction`."""

    name: str
    combine: str
    #: Dims that are reduced, by their names in `PARTS`.
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One product of a chain to assemble."""

    #: Columns of the result.
    width: int
    #: One, or gate and up.
    weights: tuple[Operand, ...]
    #: Bytes of an element of the result, as stored.
    item: int
    #: Inputs that are read besides, and reductions of the result.
    further: tuple[Further, ...] = ()
    reduced: tuple[Reduced, ...] = ()
    #: See `Product`.
    functions: int = 0


def assemble(
    rows: int,
    depth: int,
    left: Operand,
    layers: Sequence[Layer],
    *,
    batch: int = 0,
    reduced: Sequence[Reduced] = (),
) -> Chain:
    """Make a chain from its products; the comment above tells how all is named.

    `rows` are those of one matrix if there is a batch; `batch` of 0 makes no batch dim, else the
    left operand has it. `reduced` are reductions of the left operand, of its rows or of its depth.
    No layers are refused, and what `Chain` refuses.
    """
    count = len(layers)
    if not count:
        raise refused(
            "widths",
            "no product",
            "at least one product",
            "write the columns of every left operand and of the output",
        )
    names = ["k", *(("n", "l")[:count] if count < 3 else [f"n{each}" for each in range(count)])]
    lead = ("b",) if batch else ()
    dims = [*(Dim(each, batch) for each in lead), Dim("m", rows), Dim("k", depth)]
    dims += [Dim(name, each.width) for name, each in zip(names[1:], layers, strict=True)]
    tensors = [Tensor("A", (*lead, "m", "k"), left.item, "input", left.repeats)]
    reductions = [_reduction(each, "A", _dims("", "k")) for each in reduced]
    products: list[Product] = []
    for index, layer in enumerate(layers):
        role = "output" if index == count - 1 else "intermediate"
        summed, column = names[index : index + 2]
        right, result = _names(index, count)
        rights = tuple(_rights(right, layer, lead, (column, summed)))
        made = Tensor(result, (*lead, "m", column), layer.item, role)
        further = tuple(_further(result, layer, _dims(column, summed)))
        tensors += [*rights, made, *further]
        before = products[-1].output if products else "A"
        named = (tuple(each.name for each in group) for group in (rights, further))
        operands, besides = named
        products.append(Product(result, before, operands, summed, besides, layer.functions))
        reductions += [_reduction(each, result, _dims(column, summed)) for each in layer.reduced]
    return Chain(tuple(dims), tuple(tensors), tuple(products), tuple(reductions))


def _names(index: int, count: int) -> tuple[str, str]:
    """Names of the weights and of the result of a product."""
    if count < 3:
        return (("B", "C"), ("D", "E"))[index]
    return f"B{index}", f"C{index}"


def _rights(
    name: str, layer: Layer, lead: tuple[str, ...], dims: tuple[str, ...]
) -> Sequence[Tensor]:
    names = (name,) if len(layer.weights) < 2 else (f"{name}_gate", f"{name}_up")
    return [
        Tensor(
            each, (*(lead if weight.batched else ()), *dims), weight.item, "input", weight.repeats
        )
        for each, weight in zip(names, layer.weights, strict=True)
    ]


def _further(result: str, layer: Layer, dims: dict[str, str]) -> Sequence[Tensor]:
    found = []
    for index, each in enumerate(layer.further):
        indexed = tuple(dims[part] for part in PARTS if part in each.parts)
        found.append(Tensor(f"{result}_{index}", indexed, each.item, "input", each.repeats))
    return found


def _reduction(each: Reduced, tensor: str, dims: dict[str, str]) -> Reduction:
    indexed = tuple(dims[part] for part in PARTS if part in each.parts)
    return Reduction(each.name, tensor, each.combine, indexed)


def _dims(column: str, summed: str) -> dict[str, str]:
    """Names of the dims of a product by `PARTS`."""
    return dict(zip(PARTS, ("b", "m", column, summed), strict=True))


_NOTHING: Mapping[int, Sequence[Further]] = MappingProxyType({})


@checked
def chain_of(spec: WorkloadSpec | LayersSpec) -> Chain:
    """Make the chain of a workload.

    Parameters
    ----------
    spec : WorkloadSpec | LayersSpec
        A product, gate and up, a chain of two, a gated FFN, two convolutions, or a row of layers.
        The first convolution is the product of its windows, k1 * k1 * IC elements a row, and its
        weights.

    Returns
    -------
    Chain
        Over dims m, n, k, and l where there is a second product.

    Raises
    ------
    PlanRefused
        If products are reduced otherwise than by a sum.

    Examples
    --------
    >>> from crossfuse.workload import parse
    >>> chain = chain_of(parse("gemm_chain:M=128,K=768,N=3072,L=768"))
    >>> [(each.name, each.dims) for each in chain.tensors]
    [('A', ('m', 'k')), ('B', ('n', 'k')), ('C', ('m', 'n')), ('D', ('l', 'n')), ('E', ('m', 'l'))]
    """
    if isinstance(spec, LayersSpec):
        return _chain_of_layers(spec)
    if spec.combine != "sum":
        raise _no_sum(spec.combine)
    widths = [spec.K, spec.N, spec.L] if spec.L else [spec.K, spec.N]
    return matrix_chain(
        spec.M,
        widths,
        gated=spec.gated,
        item=float_type(spec.dtype).size,
        out=float_type(spec.out).size,
        repeats=spec.k1 * spec.k1 if isinstance(spec, ConvChainSpec) else 1,
        further=_operands_of_epilogue(spec),
        functions=[function_cycles(spec.act)],
    )


def chain_of_blocks(found: blocks.Chain) -> Chain:
    """Make the chain of a function whose blocks were read: `chain_of` of the spec that it is of."""
    layers = []
    for each in found.layers:
        if each.combine != "sum":
            raise _no_sum(each.combine)
        sizes = {"row": found.m, "column": each.columns}
        further = [
            Further(e.parts, e.item, max(prod(sizes[part] for part in e.parts) // e.elements, 1))
            for e in each.further
        ]
        weights = tuple(map(Operand, each.weights))
        layers.append(Layer(each.columns, weights, each.item, tuple(further), (), each.functions))
    return assemble(found.m, found.k, Operand(found.item, found.repeats), layers)


def _no_sum(combine: str) -> RefusedError:
    limit = "sums of products of a left and a right operand"
    return refused("combine", combine, limit, "leave it to kernels of threads")


def _chain_of_layers(spec: LayersSpec) -> Chain:
    item, last = float_type(spec.dtype).size, len(spec.widths) - 2
    further = {n: [Further(("column",), item)] * spec.bias for n in range(last + 1)}
    further[last] = [*further[last], *[Further(("row", "column"), item)] * spec.residual]
    out = float_type(spec.out).size
    functions = [function_cycles(spec.act)] * last
    return matrix_chain(
        spec.M, spec.widths, item=item, out=out, further=further, functions=functions
    )


def matrix_chain(
    rows: int,
    widths: Sequence[int],
    *,
    batch: int = 0,
    batched_weights: bool = False,
    gated: bool = False,
    item: int = 2,
    out: int = 0,
    repeats: int = 1,
    further: Mapping[int, Sequence[Further]] = _NOTHING,
    functions: Sequence[int] = (),
) -> Chain:
    """Make a chain of products of any length, named as `assemble` does.

    `widths` are the columns of the first left operand, then of each product's result; `batch` of 0
    makes no batch dim. `gated` gives the first product two weights. `item` and `out` are bytes of
    an element, `out` of one of the output where it differs (0 if not). `further` has the inputs
    that products read besides, by their index from 0, and `functions` the cycles of theirs, from
    the first product on (see `Product`). Refused are no product, batched weights
    without a batch, and an index of `further` without a product.
    """
    if len(widths) < 2:
        raise refused(
            "widths",
            f"{len(widths)} widths",
            "two for the first product, and one for each after it",
            "write the columns of every left operand and of the output",
        )
    if batched_weights and not batch:
        limit = "weights for each matrix of a batch"
        raise refused("batched_weights", "no batch dim", limit, "write batch=1, say")
    outside = [index for index in further if not 0 <= index < len(widths) - 1]
    if outside:
        limit = f"0 to {len(widths) - 2}, for one of the products"
        raise refused("further", f"product {outside[0]}", limit, "count products from 0")
    weight, last = Operand(item, batched=batched_weights), len(widths) - 2
    layers = [
        Layer(
            width,
            (weight, weight) if gated and not index else (weight,),
            (out or item) if index == last else item,
            tuple(further.get(index, ())),
            functions=functions[index] if index < len(functions) else 0,
        )
        for index, width in enumerate(widths[1:])
    ]
    return assemble(rows, widths[0], Operand(item, repeats), layers, batch=batch)


def _operands_of_epilogue(spec: WorkloadSpec) -> dict[int, list[Further]]:
    """Scales, biases and the residual of a workload by product, as its function takes them."""
    last = 1 if spec.L else 0
    found: dict[int, list[Further]] = {0: [], last: []}
    for product in spec.products:
        scale, bias = affine(spec, product)
        place = last if product == spec.products[-1] else 0
        names = {scale: (), bias: ("column",)}
        for operand in further_operands(spec):
            if operand.name in names:
                size = float_type(operand.dtype).size
                found[place].append(Further(names[operand.name], size))
    if spec.residual:
        *_, residual = further_operands(spec)
        found[last].append(Further(("row", "column"), float_type(residual.dtype).size))
    return found
