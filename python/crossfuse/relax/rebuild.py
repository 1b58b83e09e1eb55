"""Element-wise operators rebuilt over collapsed rows in float32, as one TIR function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, Var

from crossfuse.relax.graph import Graph
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
from crossfuse.workload.dtypes import FLOAT_TYPES, Operand

# Tensors of any rank viewed as matrices: all leading extents together are the rows.


def collapse(shape: tuple[int, ...], rows: int, where: str) -> tuple[int, ...]:
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


def same_matrix(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Whether two shapes differ at most in leading ones."""
    return _squeezed(left) == _squeezed(right)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 0 and shape[0] == 1:
        shape = shape[1:]
    return shape


def check_reshape(graph: Graph, value: Var, rows: int) -> None:
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
    before, after = (collapse(extents, rows, name) for extents in (source, shape))
    repeats = name == "relax.broadcast_to" and _broadcasts(before, after)
    if not repeats and not same_matrix(before, after):
        limit = "reshapes that regroup rows without touching columns"
        advice = "reshape outside the graph"
        raise refused(name, f"{list(source)} to {list(shape)}", limit, advice)


def _broadcasts(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    pairs = zip(reversed(before), reversed(after), strict=False)
    return len(before) <= len(after) and all(b in (1, a) for b, a in pairs)


@dataclass(frozen=True)
class Leaf:
    """A tensor that an element-wise region reads."""

    #: Var or GenericConst of the model's graph.
    value: Any
    #: Its name, collapsed shape and type in the rebuilt function.
    operand: Operand


def rebuild(
    graph: Graph,
    inner: list[Var],
    leaves: tuple[Leaf, ...],
    rows: int,
    shape: tuple[int, ...],
) -> tirx.PrimFunc:
    """Fuse element-wise operators to one function, in float32 but for truth values and integers.

    `inner` are bound variables, the last of which is the result; it is broadcast to `shape`. The
    leaves are the function's parameters, followed by the output. There is one block for each step.
    Refused are operators whose result changes its shape when leading extents are collapsed.
    """
    return _Rebuild(graph, rows, leaves).function(inner, shape)


class _Rebuild:
    """Emits the operators of a region over collapsed rows in float32."""

    def __init__(self, graph: Graph, rows: int, leaves: tuple[Leaf, ...]) -> None:
        self.graph, self.rows, self.leaves = graph, rows, leaves
        self.builder = relax.BlockBuilder()
        self.image: dict[Any, Any] = {}

    def function(self, inner: list[Var], shape: tuple[int, ...]) -> tirx.PrimFunc:
        """Fuse the operators `inner` to one function; `shape` is that of the last one."""
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
        return _fused(self.builder.get(), params)

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
        """Emit a product."""
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
        due = collapse(shape_of(value, name), self.rows, name)
        if not same_matrix(shape_of(result, name), due):
            found = f"the shape {list(shape_of(value, name))} from collapsed rows"
            raise refused(name, found, "operators that keep rows", "reshape outside the graph")
        return result


def _fused(mod: tvm.IRModule, params: list[Var]) -> tirx.PrimFunc:
    """Legalise the operators of the function ``region`` and fuse them to one function."""
    region = mod.get_global_var("region")
    builder = relax.BlockBuilder(mod)
    outer = [relax.Var(param.name, param.ty) for param in params]
    with builder.function("main", outer):
        with builder.dataflow():
            result = builder.emit_output(Call(region, outer))
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(dict(LEGAL)), relax.transform.FuseTIR()]
    try:
        fused = tvm.transform.Sequential(passes)(builder.get())
    except tvm.error.InternalError as error:
        found = f"operators that TVM does not join: {str(error).splitlines()[-1]}"
        limit = "element-wise operators of tensors and numbers"
        raise refused("between products", found, limit, "leave the model unfused") from error
    return next(f for f in fused.functions.values() if isinstance(f, tirx.PrimFunc))
