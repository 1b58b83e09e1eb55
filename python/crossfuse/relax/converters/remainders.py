"""Remainders and rounded quotients of floats, exact as torch's are.

TVM's are ``x - floor(x / y) * y`` and ``floor(x / y)``. A quotient that is rounded may be the next
whole number, as that of 1 by 0.1 in float32 is 10, and beyond 2^24 no remainder is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx
from tvm import relax

from crossfuse.relax.converters.arithmetic import WIDE, Floats
from crossfuse.relax.converters.operands import argument, operand, result_type, tvm_own

_OVERLOADS = ("Tensor", "Scalar")


def _of_floats(node: fx.Node, importer: Any, *, function: Callable[[Floats, Any, Any], Any]) -> Any:
    """A function of two floats, in float32 at least and rounded once; integers are TVM's."""
    dtype = result_type(node)
    if "float" not in dtype:
        return tvm_own(node, importer)
    wide = dtype if dtype in WIDE else "float32"
    x, y = (operand(each, importer, wide) for each in node.args[:2])
    made = function(Floats(importer, wide), x, y)
    return made if wide == dtype else importer.block_builder.emit(relax.op.astype(made, dtype))


def _crosses(floats: Floats, rest: Any, y: Any) -> Any:
    """Whether a remainder has another sign than the divisor, and is not 0."""
    op = relax.op
    other = floats(op.logical_xor, floats(op.less, rest, 0), floats(op.less, y, 0))
    return floats(op.logical_and, floats(op.greater, floats(op.abs, rest), 0), other)


def _remainder(floats: Floats, x: Any, y: Any) -> Any:
    """Of the sign of the divisor."""
    rest = floats(relax.op.mod, x, y)
    moved = floats(relax.op.add, rest, y)
    return floats(relax.op.where, _crosses(floats, rest, y), moved, rest)


def _floor_quotient(floats: Floats, x: Any, y: Any) -> Any:
    """The largest whole number that is no larger than the quotient; x / y where y is 0."""
    op = relax.op
    rest = floats(op.mod, x, y)
    whole = floats(op.divide, floats(op.subtract, x, rest), y)
    below = floats(op.subtract, whole, 1)
    whole = floats(op.where, _crosses(floats, rest, y), below, whole)
    # Whole but for a rounding; half a unit and more below the next one belongs to that.
    least = floats(op.floor, whole)
    far = floats(op.greater, floats(op.subtract, whole, least), 0.5)
    nearest = floats(op.where, far, floats(op.add, least, 1), least)
    return floats(op.where, floats(op.equal, y, 0), floats(op.divide, x, y), nearest)


_floored = partial(_of_floats, function=_floor_quotient)


def _divided(node: fx.Node, importer: Any) -> Any:
    floors = argument(node, 2, "rounding_mode") == "floor"
    return (_floored if floors else tvm_own)(node, importer)


#: By the name of the operator.
REMAINDERS = {
    **{f"remainder.{each}": partial(_of_floats, function=_remainder) for each in _OVERLOADS},
    "floor_divide.default": _floored,
    "div.Tensor_mode": _divided,
}
