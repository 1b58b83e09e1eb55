"""A Relax model as one unscheduled function in the canonical form."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm.ir import GenericConst, Var

from crossfuse.markers import unpadded_shapes
from crossfuse.relax.elementwise import Leaf, Region, read_region
from crossfuse.relax.graph import Graph
from crossfuse.relax.match import Match, match_chain, match_layer, read_model
from crossfuse.relax.operators import dtype_of, refused, shape_of
from crossfuse.workload.build import Form, Layer, Product, aligned, emit
from crossfuse.workload.dtypes import FLOAT_TYPES, Operand

if TYPE_CHECKING:
    import numpy as np
    import tvm


_WEIGHTS = ("B", "B_gate", "B_up", "D")


@dataclass(frozen=True)
class Argument:
    """Where one input of the outlined function comes from.

    Attributes
    ----------
    name : str
        Of the function's buffer.
    source : str
        Name of the model's parameter, ``""`` for a constant of the graph.
    position : int
        Index among the parameters of the model's main function, -1 for a constant.
    shape : tuple[int, ...]
        Of the buffer; the model's, with leading extents collapsed, in the same row-major order.
    dtype : str
        Of the buffer and of the model's parameter.
    value : numpy.ndarray or None
        Of a constant.

    Examples
    --------
    >>> first = Argument("A", "x", 0, (32, 64), "bfloat16")  # [B*S, K] of a model's x [B, S, K]
    >>> first.value is None  # of a constant of the graph it is an array
    True
    """

    name: str
    source: str
    position: int
    shape: tuple[int, ...]
    dtype: str
    value: np.ndarray | None = None


@dataclass(frozen=True)
class Outlined:
    """A model as one function.

    Attributes
    ----------
    func : tvm.tirx.PrimFunc
        In the form that `crossfuse.workload.build.emit` describes; its parameters are the
        arguments in order, then the output [M, L].
    arguments : tuple[Argument, ...]
        A, the weights layer by layer, then further operands.
    M, K, N, L : int
        Extents: rows, input width, width of the first intermediate, output width.
    gated : bool
        Whether the first layer has two products.
    dtype : str
        Of A, the weights and the intermediate.
    output_shape : tuple[int, ...]
        Of the model's output, [M, L] in row-major order.
    output_dtype : str
        Of the model's output.
    middle, epilogue : str
        The expressions between the products, with semicolons between them, and after the last one,
        for people.
    form : Form | None
        What `func` was written of, if it is a chain.
    kind : str
        What functions of it are called.

    Examples
    --------
    >>> import torch
    >>> from crossfuse.relax import import_torch
    >>> from crossfuse.workload import chain_module
    >>> x = torch.zeros(2, 8, 32, dtype=torch.bfloat16)  # [B, S, K]
    >>> found = outline(import_torch(chain_module(32, 64), (x,)).mod)
    >>> found.M, found.K, found.N, found.L
    (16, 32, 64, 32)
    >>> [(each.name, each.shape) for each in found.arguments[:3]]
    [('A', (16, 32)), ('B', (64, 32)), ('D', (32, 64))]
    """

    func: tvm.tirx.PrimFunc
    arguments: tuple[Argument, ...]
    M: int
    K: int
    N: int
    L: int
    gated: bool
    dtype: str
    output_shape: tuple[int, ...]
    output_dtype: str
    middle: str
    epilogue: str
    form: Form | None = None
    kind: str = "gemm_chain"

    @property
    def weights(self) -> tuple[Argument, ...]:
        """Arguments that products multiply by, of a chain that has a form.

        Returns
        -------
        tuple[Argument, ...]
            In the order of the products; constants of the graph are left out.
        """
        count = len(self.form.products) if self.form is not None else 0
        return tuple(each for each in self.arguments[1 : 1 + count] if each.value is None)

    @property
    def made(self) -> tuple[int, ...]:
        """Extents of what the function stores.

        Returns
        -------
        tuple[int, ...]
            [M, L], or with an extent of 1 in between.
        """
        return tuple(int(each) for each in self.func.params[-1].ty.shape)

    def padded(self, stored: Container[str] = ()) -> Outlined:
        """Pad the arguments where TMA cannot read their rows, see `crossfuse.workload.build`.

        Parameters
        ----------
        stored : Container[str]
            Names of arguments that callers pass with zeros behind their rows, such as weights that
            were padded once; their extents are the padded ones then.

        Returns
        -------
        Outlined
            This one where there is nothing to pad.
        """
        func = self.form and aligned(self.form, stored)
        if func is None:
            return self
        pairs = zip(self.arguments, unpadded_shapes(func), strict=True)
        return replace(self, func=func, arguments=tuple(replace(a, shape=s) for a, s in pairs))

    @property
    def summary(self) -> str:
        """One line: kind, extents, types and layouts."""
        names = "MKN" if self.form is not None and self.form.second is None else "MKNL"
        extents = ",".join(f"{name}={getattr(self, name)}" for name in names)
        if self.form is not None and self.form.inner:
            widths = "x".join(map(str, (*self.form.columns, self.L)))
            extents = f"M={self.M},widths={widths}"
        operands = " ".join(f"{a.name}{list(a.shape)}" for a in self.arguments)
        return f"{self.kind}:{extents},dtype={self.dtype},out={self.output_dtype} from {operands}"

    def arrange(self, values: Sequence[Any]) -> list[Any]:
        """Order and reshape the model's arguments for the function.

        Parameters
        ----------
        values : Sequence
            One array for each parameter of the model's main function; anything with ``reshape``.

        Returns
        -------
        list
            The inputs of the function, without the output.
        """
        given = ((a, values[a.position] if a.value is None else a.value) for a in self.arguments)
        return [value.reshape(argument.shape) for argument, value in given]


def outline(mod: tvm.IRModule) -> Outlined:
    """Turn the main function of a model into one function in the canonical form.

    Accepted are two or more layers of matrix products by stored weights with any element-wise
    expressions between and after them: ``A @ B`` or ``A @ B_gate`` and ``A @ B_up``, then ``@ D``;
    every layer but the last may have two products of one operand. Inputs [B, S, K] are collapsed to
    B*S rows. Weights keep their stored layout. Sums and expressions are in float32; intermediates
    and the output are rounded to the model's types. Every other model is refused, naming the
    operator and the reason. The module is one before legalisation.
    """
    graph = read_model(mod)
    return _written(graph, match_chain(graph))


def outline_product(mod: tvm.IRModule) -> Outlined:
    """Turn a model of one product by a stored weight into one function, as `outline` does chains.

    N and L are both the columns of the product.
    """
    graph = read_model(mod, sums=True)
    return _written(graph, match_layer(graph, 1))


def outline_gated(mod: tvm.IRModule) -> Outlined:
    """Turn a model of what is made of two products of one operand into one function.

    As `outline_product` does one.
    """
    graph = read_model(mod, sums=True)
    return _written(graph, match_layer(graph, 2))


def _written(graph: Graph, match: Match) -> Outlined:
    names = dict(zip(match.products, _product_names(match), strict=True))
    named = _names(graph, match, {**names, match.left: "A"})
    regions = [
        read_region(graph, each.made, named, each.products, match.rows) for each in match.layers
    ]
    weights = tuple(
        Leaf(each.value, Operand(name, shape_of(each.value, name), dtype_of(each.value)))
        for name, each in zip(_weight_names(match), match.weights, strict=True)
    )
    scaled, leaves = match.scaled.read(graph, named, match.rows) if match.scaled else (None, ())
    extras = _extras(match, regions, leaves)
    out = dtype_of(graph.output)
    if out not in FLOAT_TYPES:
        raise refused("the output", out, ", ".join(FLOAT_TYPES), "cast the output outside")
    columns = shape_of(match.left, "A")[-1]
    left = Leaf(match.left, Operand("A", (match.rows, columns), dtype_of(match.left)))
    products = {
        product: Product(names[product], leaf.operand, weight.layout)
        for product, leaf, weight in zip(match.products, weights, match.weights, strict=True)
    }
    first, *inner = [[products[p] for p in each.products] for each in match.layers]
    *_, last = inner.pop() if inner else (None,)
    form = Form(
        left=left.operand,
        first=tuple(first),
        middle=regions[0].function if last else None,
        second=last,
        epilogue=regions[-1].function,
        extras=tuple(leaf.operand for leaf in extras),
        out=out,
        inner=tuple(
            Layer(tuple(each), region.function)
            for each, region in zip(inner, regions[1:-1], strict=True)
        ),
        scaled=scaled,
    )
    arguments = tuple(_argument(graph, leaf) for leaf in (left, *weights, *extras))
    return _outlined(graph, match, form, arguments, regions)


def _outlined(
    graph: Graph,
    match: Match,
    form: Form,
    arguments: tuple[Argument, ...],
    regions: Sequence[Region],
) -> Outlined:
    shape = shape_of(graph.output, "the output")
    width = shape_of(match.layers[0].made, "the intermediate")[-1]
    if math.prod(shape[:-1]) != match.rows:
        found, limit = f"the shape {list(shape)}", f"{match.rows} rows as in the input"
        raise refused("the output", found, limit, "reshape the output outside the graph")
    gated = len(match.layers[0].products) == 2
    single, double = ("gated_gemm", "gated_ffn") if gated else ("gemm", "gemm_chain")
    return Outlined(
        func=emit(form),
        arguments=arguments,
        M=match.rows,
        K=form.left.shape[1],
        N=width,
        L=shape[-1],
        gated=gated,
        dtype=form.left.dtype,
        output_shape=shape,
        output_dtype=form.out,
        middle="; ".join(each.text for each in regions[:-1]),
        epilogue=regions[-1].text,
        form=form,
        kind="layers" if form.inner else double if form.second else single,
    )


def _product_names(match: Match) -> list[str]:
    """Names of the products by their layers: ``gemm0``, or ``gemm0_gate`` and ``gemm0_up``."""
    ends = {1: ("",), 2: ("_gate", "_up")}
    numbered = enumerate(match.layers)
    return [f"gemm{n}{end}" for n, each in numbered for end in ends[len(each.products)]]


def _weight_names(match: Match) -> list[str]:
    """``B``, or ``B_gate`` and ``B_up``, then ``D``; of more layers ``B0``, ``B1`` and so on."""
    of_products = _product_names(match)
    if len(match.layers) > 2:
        return [each.replace("gemm", "B") for each in of_products]
    if len(match.layers) == 1:
        return [each.replace("gemm0", "B") for each in of_products]
    return [*(each.replace("gemm0", "B") for each in of_products[:-1]), "D"]


def _names(graph: Graph, match: Match, fixed: dict[Any, str]) -> dict[Any, str]:
    """Distinct names for all that is read element-wise: fixed ones, else those of parameters."""
    hidden = {f"hidden{number}" for number in range(1, len(match.layers) - 1)}
    taken = {*fixed.values(), *_WEIGHTS, *_weight_names(match), "hidden", *hidden, "out"}
    named = dict(fixed)
    made = [(layer.made, layer.products) for layer in match.layers]
    if match.scaled is not None:
        made.append((match.scaled.rows, ()))
    for target, stops in made:
        for value in graph.reach(target, stops)[1]:
            if value not in named:
                name = "constant" if isinstance(value, GenericConst) else str(value.name)
                candidates = (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1)))
                named[value] = next(c for c in candidates if c not in taken)
                taken.add(named[value])
    return named


def _extras(match: Match, regions: Sequence[Region], of_rows: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """Operands of the element-wise regions, and of rows, besides the products and A, each once."""
    given = (*match.products, match.left)
    found: dict[str, Leaf] = {}
    for leaves in (*(each.leaves for each in regions), of_rows):
        for leaf in leaves:
            if not any(leaf.value.same_as(value) for value in given):
                found[leaf.operand.name] = leaf
    return tuple(found.values())


def _argument(graph: Graph, leaf: Leaf) -> Argument:
    name, shape, dtype = leaf.operand.name, leaf.operand.shape, leaf.operand.dtype
    if isinstance(leaf.value, GenericConst):
        return Argument(name, "", -1, shape, dtype, leaf.value.value.numpy())
    assert isinstance(leaf.value, Var)
    position = next(i for i, param in enumerate(graph.params) if param.same_as(leaf.value))
    return Argument(name, leaf.value.name, position, shape, dtype)
