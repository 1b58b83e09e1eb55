"""Functions with float64 in place of every floating-point type, as references.

Intermediate roundings of such a function do not happen then. Integers keep their types.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.emulate.widen import converted, rebuilt, retyped
from crossfuse.errors import WorkloadRefused, refuse
from crossfuse.lower.extract import only_function
from crossfuse.workload.dtypes import is_float

_WIDE = "float64"
_OPERATORS = ("Add", "Sub", "Mul", "Div", "Min", "Max", "EQ", "NE", "LT", "LE", "GT", "GE")
#: What has another meaning in another type, or in none of our types.
_FOREIGN = ("tirx.reinterpret", "tirx.call_extern", "tirx.call_pure_extern", "tirx.call_packed")


def in_float64(func: Any) -> Any:
    """An unscheduled function with float64 for every floating-point type; all else is unchanged.

    Functions that look at the bits of numbers, call foreign code, view a buffer as another one, or
    have floating-point scalar variables raise `WorkloadRefused`.
    """
    function = only_function(func)
    _check(function)
    images: dict[Any, Any] = {}

    def image(buffer: Any) -> Any:
        if not is_float(str(buffer.ty.dtype)):
            return buffer
        if buffer not in images:
            images[buffer] = ir.tirx.decl_buffer(list(buffer.ty.shape), _WIDE, buffer.name)
        return images[buffer]

    params = [image(each) for each in function.params]
    body = retyped(function.body, image, _converted, rebuilt(_type_of, _OPERATORS))
    return ir.PrimFunc(params, body, function.ret_type, function.attrs)


def _check(function: Any) -> None:
    """Refuse what has no counterpart in float64."""
    found: list[str] = []

    def visit_call(call: Any) -> None:
        name = call.op.name if isinstance(call.op, ir.Op) else str(call.op)
        if name in _FOREIGN or not isinstance(call.op, ir.Op):
            found.append(f"a call of {name}")

    def visit_block(block: Any) -> None:
        found.extend(f"a view, {each.buffer.name}" for each in block.match_buffers)

    def visit_variable(variable: Any) -> None:
        if not ir.is_buffer_var(variable) and is_float(str(variable.ty)):
            found.append(f"a variable of {variable.ty}, {variable.name}")

    ir.walk(
        function.body, (ir.Call, visit_call), (ir.SBlock, visit_block), (ir.Var, visit_variable)
    )
    if found:
        raise refuse(
            WorkloadRefused,
            "reference",
            "function",
            found=found[0],
            limit="loads and stores of buffers, arithmetic and TVM's own functions",
            instead="name the workload: a spec has a reference of its own",
        )


def _type_of(dtype: str) -> str:
    return _WIDE if is_float(dtype) else dtype


def _converted(value: Any, dtype: str) -> Any:
    return converted(value, _type_of(dtype))
