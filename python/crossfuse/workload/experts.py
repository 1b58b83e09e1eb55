"""Unscheduled functions of mixtures of experts: products by weights that an index chooses.

A router gives each token a few experts, and a pair of both is a row of products by the weights of
this expert alone. Of few tokens nothing else is worth to be multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx

from crossfuse.workload.build import Elementwise
from crossfuse.workload.dtypes import Operand

#: Names of the blocks beside products and what is made of them.
EXPERT, ROWS, CHOSEN, TOTAL, MIXED = "expert", "rows", "chosen", "total", "mixed"


@dataclass(frozen=True)
class ExpertProduct:
    """Columns of the weights of all experts that rows are multiplied by."""

    #: Of the block, and of the float32 buffer that it writes.
    name: str
    #: The first of the weights' rows, which are columns of the product, and from one to the next:
    #: 2 where gate and up alternate.
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class ExpertsForm:
    """Products of rows by the weights of the experts that places name."""

    #: Rows, [pairs // repeats, K]: each is multiplied by the weights of `repeats` experts.
    left: Operand
    #: Of all experts, [experts, columns of all products, K], or [experts, K, columns].
    weight: Operand
    #: The experts of each row, [rows, width]: those of a row's pairs are its first ones, as sorted
    #: scores have them. Negative ones count from the last expert; none is checked.
    places: Operand
    #: One, or gate and up.
    products: tuple[ExpertProduct, ...]
    #: Of each product, N.
    columns: int
    #: Makes the output from the products, as that of `crossfuse.workload.build.Form`.
    epilogue: Elementwise
    #: What it reads besides.
    extras: tuple[Operand, ...]
    #: Type of the output, [pairs // summed, 1, N].
    out: str
    #: Rows of the products, one for each token and expert of it.
    pairs: int
    #: Experts of a row of the left operand.
    repeats: int = 1
    #: Neighbouring pairs whose products are added up, the experts of a token; 1 for none.
    summed: int = 1
    #: What each pair's product is multiplied by before that, [rows, width] as the places.
    factor: Operand | None = None
    #: Whether factors are divided by the sum of those that are added up together.
    normalised: bool = False
    #: Whether places beyond the experts are those of the first or the last one.
    bounded: bool = False
    #: Whether weights have neighbours of the reduction side by side.
    k_major: bool = True
    #: What is added to the products of each expert, [experts, columns of all products].
    bias: Operand | None = None

    @property
    def joined(self) -> bool:
        """Whether columns of two products lie side by side in memory, hence are loaded as one."""
        return not self.k_major and any(each.step > 1 for each in self.products)

    @property
    def stored(self) -> tuple[ExpertProduct, ...]:
        """The products as they are multiplied."""
        return (ExpertProduct("gemm0"),) if self.joined else self.products

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Inputs of the function in order."""
        others = tuple(each for each in (self.factor, self.bias) if each is not None)
        return (self.left, self.weight, self.places, *others, *self.extras)


def emit_experts(form: ExpertsForm) -> tirx.PrimFunc:
    """Write products of rows by the weights of experts, as one unscheduled function.

    Blocks in order, each under its own loops: ``expert``, the place of each pair's, from 0;
    ``rows`` if rows are repeated, which copies each to the pairs of its token; for each product
    ``chosen``, the weights of each pair's expert as they are stored, [pairs, N, K] or
    [pairs, K, N], and the product, float32 [pairs, 1, N]; where pairs are added up ``mixed``,
    float32 [pairs // summed, 1, N], and ``total``, the sum of their factors, if these are
    normalised; ``out``, of the same extents. The second one counts rows of the same expert, of
    which there is one. Columns of products that alternate in weights stored as [experts, K, N] are
    those of one product, which ``out`` takes apart: they are loaded side by side. Copies are for
    schedules to leave out. Parameters are the form's operands, then the output.
    """
    tensors: dict[str, Any] = {
        o.name: te.placeholder(o.shape, o.dtype, o.name) for o in form.operands
    }
    parameters = list(tensors.values())
    left, weight, places = (tensors[e.name] for e in (form.left, form.weight, form.places))
    depth, experts = form.left.shape[1], form.weight.shape[0]
    rows = left
    if form.repeats > 1:
        shape = (form.pairs, depth)
        rows = te.compute(shape, lambda i, k: left(i // form.repeats, k), name=ROWS)

    def from_first(pair: Any) -> Any:
        # Weights of all experts may have more elements than 32 bits count.
        place = _of_pair(places, form, pair).astype("int64")
        if form.bounded:
            last, first = tirx.const(experts - 1, "int64"), tirx.const(0, "int64")
            return tirx.max(tirx.min(place, last), first)
        return tirx.Select(place < 0, place + experts, place)

    expert = te.compute((form.pairs,), from_first, name=EXPERT)
    bias = form.bias and tensors[form.bias.name]
    made = [_product(rows, weight, expert, each, form) for each in form.stored]
    for place, each in enumerate(form.products):
        value = _part(made[0], each) if form.joined else made[place]
        if bias is not None:
            value = _biased(value, bias, from_first, each)
        tensors[each.name] = value if form.summed == 1 else _mixed(value, tensors, form)
    given = {each.name for each in form.operands}

    def element(i: Any, row: Any, j: Any) -> Any:
        read = {n: t if n in given else _of_row(t, row) for n, t in tensors.items()}
        return form.epilogue(read, i, j).astype(form.out)

    output = te.compute((form.pairs // form.summed, 1, form.columns), element, name="out")
    return te.create_prim_func([*parameters, output])


def _of_row(product: Any, row: Any) -> Any:
    return lambda i, j: product(i, row, j)


def _part(product: Any, of: ExpertProduct) -> Any:
    return lambda pair, row, j: product(pair, row, j * of.step + of.first)


def _biased(product: Any, bias: Any, expert: Any, of: ExpertProduct) -> Any:
    # The expert is told anew: what a warp has in its registers is not there for what follows.
    def element(pair: Any, row: Any, j: Any) -> Any:
        added = bias(expert(pair), j * of.step + of.first)
        return product(pair, row, j) + added.astype("float32")

    return element


def _product(rows: Any, weight: Any, expert: Any, of: ExpertProduct, form: ExpertsForm) -> Any:
    """Copy the weights of each pair's expert as they are stored, and multiply rows by them."""
    depth, columns = form.left.shape[1], form.weight.shape[2] if form.joined else form.columns

    def stored(j: Any, k: Any) -> tuple[Any, Any]:
        return (j, k) if form.k_major else (k, j)

    def element(i: Any, *place: Any) -> Any:
        j, k = stored(*place)  # its own inverse
        return weight(expert(i), *stored(j * of.step + of.first, k))

    end = of.name.removeprefix("gemm0")
    chosen = te.compute((form.pairs, *stored(columns, depth)), element, name=f"{CHOSEN}{end}")
    k = te.reduce_axis((0, depth), "k")

    def term(i: Any, _row: Any, j: Any) -> Any:
        value = rows(i, k).astype("float32") * chosen(i, *stored(j, k)).astype("float32")
        return te.sum(value, axis=k)

    return te.compute((form.pairs, 1, columns), term, name=of.name)


def _of_pair(tensor: Any, form: ExpertsForm, pair: Any) -> Any:
    """What a tensor of the first columns of each row has for a pair."""
    count = form.pairs // int(tensor.shape[0])
    return tensor(pair // count, pair % count)


def _mixed(product: Any, tensors: Mapping[str, Any], form: ExpertsForm) -> Any:
    each = te.reduce_axis((0, form.summed), "each")
    factor = form.factor and tensors[form.factor.name]

    def weight(pair: Any) -> Any:
        return _of_pair(factor, form, pair).astype("float32")

    total = None
    if factor is not None and form.normalised:
        other = te.reduce_axis((0, form.summed), "each")

        def sum_of(i: Any) -> Any:
            return te.sum(weight(i * form.summed + other), axis=other)

        total = te.compute((form.pairs // form.summed,), sum_of, name=TOTAL)

    def element(i: Any, row: Any, j: Any) -> Any:
        pair = i * form.summed + each
        value = product(pair, row, j)
        if factor is not None:
            share = weight(pair)
            value = value * (share if total is None else share / total(i))
        return te.sum(value, axis=each)

    return te.compute((form.pairs // form.summed, 1, form.columns), element, name=MIXED)
