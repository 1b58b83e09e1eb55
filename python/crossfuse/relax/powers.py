"""Small whole powers as products, for ``LegalizeOps``.

A GPU computes a general power by a logarithm and an exponential, which is slower, and with the fast
math that TVM compiles with, the square of a negative number is NaN.
"""

from __future__ import annotations

from typing import Any

from tvm import topi
from tvm.relax.transform.legalize_ops.binary import _binary

from crossfuse.relax.operators import scalar

#: Exponents from 2 to this one are multiplied out: no more than two products each.
HIGHEST = 4


def _power(builder: Any, call: Any) -> Any:
    """The call of a function that computes ``relax.power``."""
    base, exponent = call.args[0], scalar(call.args[1])
    if exponent is None or exponent not in range(2, HIGHEST + 1):
        return _binary(topi.power)(builder, call)
    return builder.call_te(_multiplied, base, int(exponent), primfunc_name_hint="power")


def _multiplied(base: Any, exponent: int) -> Any:
    square = topi.multiply(base, base)
    if exponent == HIGHEST:
        return topi.multiply(square, square)
    return square if exponent == 2 else topi.multiply(square, base)


#: For ``relax.transform.LegalizeOps``.
POWERS = {"relax.power": _power}
