"""A Relax model as one unscheduled function in the canonical form."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvm.ir import GenericConst, Var

from crossfuse.markers import unpadded_shapes
from crossfuse.relax.elementwise import Region, read_region
from crossfuse.relax.graph import Graph
from crossfuse.relax.match import Match, Weight, match_chain, read_model
from crossfuse.relax.operators import dtype_of, refused, shape_of
from crossfuse.relax.rebuild import Leaf
from crossfuse.workload.aligned import aligned
from crossfuse.workload.build import Form, Product, emit
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
        A, the weights of the first layer, the weight of the second, then further operands.
    M, K, N, L : int
        Extents: rows, input width, intermediate width, output width.
    gated : bool
        Whether the first layer has two products.
    dtype : str
        Of A, the weights and the intermediate.
    output_shape : tuple[int, ...]
        Of the model's output, [M, L] in row-major order.
    output_dtype : str
        Of the model's output.
    middle, epilogue : str
        The expressions between the products and after them, for people.
    form : Form | None
        What `func` was written of, if it is a chain.

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

    def padded(self, stored: Container[str] = ()) -> Outlined:
        """Pad the arguments where TMA cannot read their rows, see `crossfuse.workload.aligned`.

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
    def kind(self) -> str:
        """What functions of it are called."""
        return "gated_ffn" if self.gated else "gemm_chain"

    @property
    def summary(self) -> str:
        """One line: kind, extents, types and layouts."""
        extents = ",".join(f"{name}={getattr(self, name)}" for name in "MKNL")
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

    Accepted are two layers of matrix products by stored weights with any element-wise expressions
    between and after them: ``A @ B`` or ``A @ B_gate`` and ``A @ B_up``, then ``@ D``. Inputs [B,
    S, K] are collapsed to B*S rows. Weights keep their stored layout. Sums and expressions are in
    float32; the intermediate and the output are rounded to the model's types. Every other model is
    refused, naming the operator and the reason. The module is one before legalisation.
    """
    graph = read_model(mod)
    match = match_chain(graph)
    names = dict(zip(match.first, _first_names(match), strict=True))
    named = _names(graph, match, {**names, match.second: "gemm1", match.left: "A"})
    middle = read_region(graph, match.hidden, named, match.first, match.rows)
    epilogue = read_region(graph, graph.output, named, (match.second,), match.rows)
    weights = _weights(match)
    extras = _extras(match, middle, epilogue)
    out = dtype_of(graph.output)
    if out not in FLOAT_TYPES:
        raise refused("the output", out, ", ".join(FLOAT_TYPES), "cast the output outside")
    columns = shape_of(match.left, "A")[-1]
    left = Leaf(match.left, Operand("A", (match.rows, columns), dtype_of(match.left)))
    layouts = [weight.layout for weight in (*match.first_weights, match.second_weight)]
    products = [
        Product(name, leaf.operand, layout)
        for name, leaf, layout in zip([*names.values(), "gemm1"], weights, layouts, strict=True)
    ]
    form = Form(
        left=left.operand,
        first=tuple(products[:-1]),
        middle=middle.function,
        second=products[-1],
        epilogue=epilogue.function,
        extras=tuple(leaf.operand for leaf in extras),
        out=out,
    )
    arguments = tuple(_argument(graph, leaf) for leaf in (left, *weights, *extras))
    return _outlined(graph, match, form, arguments, (middle, epilogue))


def _outlined(
    graph: Graph,
    match: Match,
    form: Form,
    arguments: tuple[Argument, ...],
    regions: tuple[Region, Region],
) -> Outlined:
    shape = shape_of(graph.output, "the output")
    width = shape_of(match.hidden, "the intermediate")[-1]
    if math.prod(shape[:-1]) != match.rows:
        found, limit = f"the shape {list(shape)}", f"{match.rows} rows as in the input"
        raise refused("the output", found, limit, "reshape the output outside the graph")
    return Outlined(
        func=emit(form),
        arguments=arguments,
        M=match.rows,
        K=form.left.shape[1],
        N=width,
        L=shape[-1],
        gated=len(match.first) == 2,
        dtype=form.left.dtype,
        output_shape=shape,
        output_dtype=form.out,
        middle=regions[0].text,
        epilogue=regions[1].text,
        form=form,
    )


def _first_names(match: Match) -> tuple[str, ...]:
    return ("gemm0",) if len(match.first) == 1 else ("gemm0_gate", "gemm0_up")


def _names(graph: Graph, match: Match, fixed: dict[Any, str]) -> dict[Any, str]:
    """Distinct names for all that is read element-wise: fixed ones, else those of parameters."""
    taken = {*fixed.values(), *_WEIGHTS, "hidden", "out"}
    named = dict(fixed)
    for target, stops in ((match.hidden, match.first), (graph.output, (match.second,))):
        for value in graph.reach(target, stops)[1]:
            if value not in named:
                name = "constant" if isinstance(value, GenericConst) else str(value.name)
                candidates = (name, *(f"{name}_{i}" for i in range(1, len(taken) + 1)))
                named[value] = next(c for c in candidates if c not in taken)
                taken.add(named[value])
    return named


def _weights(match: Match) -> tuple[Leaf, ...]:
    names = ("B", "D") if len(match.first) == 1 else _WEIGHTS[1:]
    stored = (*match.first_weights, match.second_weight)
    return tuple(_weight_leaf(name, w) for name, w in zip(names, stored, strict=True))


def _weight_leaf(name: str, weight: Weight) -> Leaf:
    shape = shape_of(weight.value, name)
    return Leaf(weight.value, Operand(name, shape, dtype_of(weight.value)))


def _extras(match: Match, *regions: Region) -> tuple[Leaf, ...]:
    """Operands of the element-wise regions besides the products and A, each once."""
    given = (*match.first, match.second, match.left)
    found: dict[str, Leaf] = {}
    for region in regions:
        for leaf in region.leaves:
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
