"""Small whole powers as products, for ``LegalizeOps``.

A GPU computes a general power by a logarithm and an exponential, which is slower, and with the fast
math that TVM compiles with, the square of a negative number is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tvm import topi
from tvm.relax.transform.legalize_ops.binary import _binary

from crossfuse.relax.operators import scalar

#: Exponents from 2 to this one are multiplied out.
HIGHEST = 4

Value = TypeVar("Value")


def multiplied_out(base: Value, exponent: int, multiply: Callable[[Value, Value], Value]) -> Value:
    """A whole power as products.

    Parameters
    ----------
    base : Value
        An expression of any kind.
    exponent : int
        1 or more.
    multiply : Callable
        Makes a product of two such expressions.

    Returns
    -------
    Value
        The last product.
    """
    result = base
    for _ in range(1, exponent):
        result = multiply(result, base)
    return result


def _power(builder: Any, call: Any) -> Any:
    """The call of a function that computes ``relax.power``."""
    base, exponent = call.args[0], scalar(call.args[1])
    if exponent is None or exponent not in range(2, HIGHEST + 1):
        return _binary(topi.power)(builder, call)
    power = partial(multiplied_out, exponent=int(exponent), multiply=topi.multiply)
    return builder.call_te(power, base, primfunc_name_hint="power")


#: For ``relax.transform.LegalizeOps``.
POWERS = {"relax.power": _power}
