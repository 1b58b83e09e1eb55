"""Everything between two matrix products as one float32 expression.

The operators are rebuilt over matrices of collapsed rows and in float32, legalised by TVM, and
inlined into one block whose expression is then read off. What the model rounds in between is not
rounded here: the expression starts from float32 sums and is rounded once, by whoever stores it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, s_tir, te, tirx
from tvm.ir import Call, GenericConst, TensorLoad, Var
from tvm.s_tir import SBlock
from tvm_ffi import structural_map, structural_walk

from crossfuse.relax.graph import Graph, fused_region
from crossfuse.relax.operators import (
    CAST,
    HIGHEST,
    LEGAL,
    RESHAPES,
    TRANSPOSE,
    dtype_of,
    is_tensor,
    multiplied_out,
    operator,
    refused,
    scalar,
    shape_of,
)
from crossfuse.workload.build import Elementwise
from crossfuse.workload.dtypes import FLOAT_TYPES, Operand, loses

_MOST_LOADS = 4096


@dataclass(frozen=True)
class Leaf:
    """A tensor that an element-wise region reads."""

    #: Var or GenericConst of the model's graph.
    value: Any
    #: Its name, collapsed shape and type in the rebuilt function.
    operand: Operand


@dataclass(frozen=True)
class Region:
    """Element-wise operators that make one value, as an expression of some leaves."""

    #: Makes the float32 expression at a place, from the tensors by the leaves' names.
    function: Elementwise
    #: All tensors that it reads, products included.
    leaves: tuple[Leaf, ...]
    #: The expression as a person would write it.
    text: str


def read_region(
    graph: Graph,
    target: Any,
    named: Mapping[Any, str],
    products: tuple[Var, ...],
    rows: int,
    stops: tuple[Var, ...] = (),
) -> Region:
    """Turn the operators that make a value into one expression.

    `target` is a matrix [rows, columns] once its leading extents are collapsed, `products` are
    leaves in float32, `stops` other leaves that operators make, `named` names all leaves but
    numbers. Refused are broadcasts over part of the
    rows, reshapes that mix rows and columns, operands of unsupported types, casts that lose more
    than the model's own types do, and expressions too large to repeat.
    """
    inner, found = graph.reach(target, (*products, *stops))
    leaves = tuple(
        _leaf(value, named[value], value in products, rows)
        for value in found
        if scalar(value) is None
    )
    if not inner:
        (leaf,) = leaves
        return Region(_load(leaf.operand.name), leaves, f"{leaf.operand.name}[i, j]")
    for value in inner:
        _check_reshape(graph, value, rows)
        _check_cast(graph, value, _own_types(graph, target, products))
    shape = _collapse(shape_of(target, graph.operator(target)), rows, "the result")
    function = _Rebuild(graph, rows, leaves).function(inner, shape)
    _check_size(function)
    block = _one_block(function)
    # The last parameter is the output.
    names = {p: leaf.operand.name for p, leaf in zip(function.params[:-1], leaves, strict=True)}
    _check_loads(
        block, {n for n, leaf in zip(names, leaves, strict=True) if leaf.value in products}
    )
    return Region(_Expression(block, names), leaves, _text(block))


def _own_types(graph: Graph, target: Any, products: tuple[Var, ...]) -> set[str]:
    """Types of a region's result, of its products and of what they multiply."""
    given = (each for product in products for each in graph.arguments(product))
    return {dtype_of(each) for each in (target, *products, *given)}


def _check_cast(graph: Graph, value: Any, own: set[str]) -> None:
    """Refuse a cast that would be missed: nothing is rounded before the result is stored."""
    if graph.operator(value) == CAST and loses(dtype_of(value), own):
        found = f"a cast to {dtype_of(value)} between values of {', '.join(sorted(own))}"
        limit = "types that lose no more than these, as only what is stored is rounded"
        raise refused(CAST, found, limit, "leave the model unfused, or round by arithmetic")


def _text(block: Any) -> str:
    """The expression as a person would write it: without types and casts."""
    text = str(block.body.value)
    for axis, letter in zip(block.iter_vars, "ij", strict=True):
        text = text.replace(axis.var.name, letter)
    text = re.sub(r"T\.int64\((\d+)\)", r"\1", text)
    text = re.sub(r"T\.float32\(([-+.e\d]+)\)", lambda m: f"{float(m[1]):.7g}", text)
    text = re.sub(r"T\.Cast\(\"float32\", (\w+\[[^]]*\])\)", r"\1", text)
    return text.replace("T.", "")


def _load(name: str) -> Elementwise:
    return lambda tensors, i, j: tensors[name](i, j)


@dataclass(frozen=True)
class _Expression:
    """The expression of a block, to be evaluated on other tensors and axes."""

    block: Any
    names: Mapping[Any, str]

    def __call__(self, tensors: Mapping[str, te.Tensor], i: Any, j: Any) -> Any:
        rows, columns = (axis.var for axis in self.block.iter_vars)

        def moved(index: Any) -> Any:
            return i if index.same_as(rows) else j if index.same_as(columns) else 0

        def load(node: Any) -> Any:
            return tensors[self.names[node.source]](*map(moved, node.indices))

        return structural_map(self.block.body.value, (TensorLoad, load))


def _leaf(value: Any, name: str, product: bool, rows: int) -> Leaf:
    dtype = "float32" if product else dtype_of(value)
    if dtype not in FLOAT_TYPES:
        limit = "element-wise operands of " + ", ".join(FLOAT_TYPES)
        raise refused(name, dtype, limit, "convert the operand to one of these")
    return Leaf(value, Operand(name, _collapse(shape_of(value, name), rows, name), dtype))


def _one_block(function: tirx.PrimFunc) -> Any:
    """Inline every block into the one that writes the output."""
    schedule = s_tir.Schedule(function)
    (last,) = schedule.get_output_blocks("root")
    kept = schedule.get(last).name_hint
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if schedule.get(block).name_hint != kept:
            schedule.compute_inline(block)
    return schedule.get(last)


def _check_size(function: tirx.PrimFunc) -> None:
    """Refuse an expression that inlining makes too large.

    Inlining repeats an expression wherever it is used, so its size is known only by counting.
    """
    loads: dict[Any, int] = {}
    blocks: list[Any] = []
    structural_walk(function, (SBlock, blocks.append))
    for block in blocks:
        if isinstance(block.body, tirx.BufferStore):
            found: list[Any] = []
            structural_walk(block.body.value, (TensorLoad, found.append))
            total = sum(loads.get(load.source, 1) for load in found)
            loads[block.body.buffer] = total
            if total > _MOST_LOADS:
                what = f"an expression that repeats its operands {total} times or more"
                limit = f"{_MOST_LOADS} repetitions"
                raise refused("main", what, limit, "leave the model unfused")


def _check_loads(block: Any, whole: set[Any]) -> None:
    """Refuse a product read elsewhere than at the written place, whatever the legaliser did."""
    axes = [axis.var for axis in block.iter_vars]
    loads: list[Any] = []
    structural_walk(block.body.value, (TensorLoad, loads.append))
    for load in loads:
        pairs = zip(load.indices, axes, strict=False)
        if load.source in whole and not all(index.same_as(axis) for index, axis in pairs):
            found, limit = "a product read at another place", "element-wise operators"
            raise refused(load.source.name, found, limit, "leave the model unfused")


# Tensors of any rank viewed as matrices: all leading extents together are the rows.


def _collapse(shape: tuple[int, ...], rows: int, where: str) -> tuple[int, ...]:
    """Join the leading extents to rows; drop them where the value is the same for all rows.

    The result is ``(rows, columns)`` or ``(columns,)``. Tensors with a value for some rows but not
    all are refused, under the name `where`.
    """
    *leading, columns = shape or (1,)
    if len(shape) > 1 and math.prod(leading) == rows:
        return (rows, columns)
    if math.prod(leading) == 1:
        return (columns,)
    limit = f"one value per column, or one for each of the {rows} rows"
    raise refused(where, f"the shape {list(shape)}", limit, "broadcast it to all rows beforehand")


def _same_matrix(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether two shapes differ at most in leading ones."""
    return _squeezed(left) == _squeezed(right)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 0 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _check_reshape(graph: Graph, value: Var, rows: int) -> None:
    """Refuse a reshape unless it only regroups rows, a broadcast unless it only repeats them.

    Operators other than reshapes and transpositions pass.
    """
    name = graph.operator(value)
    if name not in RESHAPES and name != TRANSPOSE:
        return
    shape, source = shape_of(value, name), shape_of(graph.makers[value].value.args[0], name)
    if name == TRANSPOSE:
        axes = graph.makers[value].value.attrs.axes
        if axes is None or [int(axis) for axis in axes] != list(range(len(shape))):
            found, limit = f"a transposition of {list(source)}", "rows that stay rows"
            raise refused(name, found, limit, "transpose outside the graph")
    before, after = (_collapse(extents, rows, name) for extents in (source, shape))
    repeats = name == "relax.broadcast_to" and _broadcasts(before, after)
    if not repeats and not _same_matrix(before, after):
        limit = "reshapes that regroup rows without touching columns"
        advice = "reshape outside the graph"
        raise refused(name, f"{list(source)} to {list(shape)}", limit, advice)


def _broadcasts(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    pairs = zip(reversed(before), reversed(after), strict=False)
    return len(before) <= len(after) and all(b in (1, a) for b, a in pairs)


class _Rebuild:
    """Fuses element-wise operators, in float32 but for truth values and integers.

    The leaves are the function's parameters, followed by the output. There is one block for each
    step. Refused are operators whose result changes its shape when leading extents are collapsed.
    """

    def __init__(self, graph: Graph, rows: int, leaves: tuple[Leaf, ...]) -> None:
        self.graph, self.rows, self.leaves = graph, rows, leaves
        self.builder = relax.BlockBuilder()
        self.image: dict[Any, Any] = {}

    def function(self, inner: list[Var], shape: tuple[int, ...]) -> tirx.PrimFunc:
        """Fuse variables to one function of the last of them, which is broadcast to `shape`."""
        operands = [leaf.operand for leaf in self.leaves]
        params = [relax.Var(o.name, relax.TensorType(o.shape, o.dtype)) for o in operands]
        with self.builder.function("region", params, attrs={"Primitive": 1}):
            with self.builder.dataflow():
                for leaf, param in zip(self.leaves, params, strict=True):
                    self.image[leaf.value] = self.widened(param)
                for value in inner:
                    self.image[value] = self.rebuilt(value)
                result = self.image[inner[-1]]
                # A result that does not depend on the row still fills all rows.
                if tuple(shape_of(result, "the result")) != shape or result in params:
                    result = self.builder.emit(relax.op.broadcast_to(result, shape))
                result = self.builder.emit_output(result)
            self.builder.emit_func_output(result)
        passes = [relax.transform.LegalizeOps(dict(LEGAL)), relax.transform.FuseTIR()]
        try:
            return fused_region(self.builder, "region", params, tvm.transform.Sequential(passes))
        except tvm.error.InternalError as error:
            found = f"operators that TVM does not join: {str(error).splitlines()[-1]}"
            limit = "element-wise operators of tensors and numbers"
            raise refused("between products", found, limit, "leave the model unfused") from error

    def widened(self, value: Any) -> Any:
        """Cast to float32, except truth values and integers."""
        if dtype_of(value) in FLOAT_TYPES and dtype_of(value) != "float32":
            return self.builder.emit(relax.op.astype(value, "float32"))
        return value

    def argument(self, value: Any) -> Any:
        """Image of a tensor argument; numbers, shapes and truth values stay as they are."""
        number = scalar(value) if is_tensor(value) else None
        if number is None:
            return self.image[value] if is_tensor(value) else value
        return relax.const(number, "float32" if dtype_of(value) in FLOAT_TYPES else dtype_of(value))

    def held(self, value: Any) -> Any:
        """A number as a tensor, because TVM's ``where`` makes no function of constants.

        TVM's ``full`` takes finite numbers only; a product takes any, so ones are multiplied by it.
        """
        if not isinstance(value, GenericConst):
            return value
        ones = self.builder.emit(
            relax.op.full((), relax.const(1, dtype_of(value)), dtype_of(value))
        )
        return self.product(ones, value)

    def product(self, one: Any, other: Any) -> Any:
        return self.builder.emit(relax.op.multiply(one, other))

    def rebuilt(self, value: Var) -> Any:
        """Emit one operator."""
        call = self.graph.makers[value].value
        name = operator(call)
        arguments = [self.argument(argument) for argument in call.args]
        if name == "relax.where":
            arguments = [self.held(argument) for argument in arguments]
        if name == CAST and dtype_of(value) in FLOAT_TYPES:
            plain = dtype_of(arguments[0]) in FLOAT_TYPES
            cast = relax.op.astype(arguments[0], "float32")
            return arguments[0] if plain else self.builder.emit(cast)
        if name in RESHAPES or name == TRANSPOSE:
            return arguments[0]
        exponent = scalar(call.args[1]) if name == "relax.power" else None
        if exponent is not None and exponent in range(2, HIGHEST + 1):
            return multiplied_out(arguments[0], int(exponent), self.product)
        clone = Call(call.op, arguments, call.attrs, call.ty_args)
        result = self.widened(self.builder.emit(clone))
        due = _collapse(shape_of(value, name), self.rows, name)
        if not _same_matrix(shape_of(result, name), due):
            found = f"the shape {list(shape_of(value, name))} from collapsed rows"
            raise refused(name, found, "operators that keep rows", "reshape outside the graph")
        return result
