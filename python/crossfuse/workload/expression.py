"""Element-wise functions of one variable, written as text: ``x*sigmoid(1.702*x)``.

The text is parsed with `ast` and interpreted over any algebra that has Python's arithmetic
operators, so numpy arrays and TIR expressions share one definition of every activation.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from crossfuse.errors import RefusedError, WorkloadRefused, refuse
from crossfuse.workload.dtypes import FLOAT_TYPES, closest

RULE = "workload-act"
#: Cycles in which a scheduler of an SM issues a function of a warp's float32 numbers, as CUDA 13.0
#: compiles it for sm_90a: one for each instruction, eight for each of the special function unit,
#: which has 4 lanes. Other arithmetic takes a few, and is not counted.
CYCLES = {"exp": 9, "tanh": 31, "sigmoid": 18, "erf": 31, "sqrt": 8, "divide": 8}
ARITY = {"exp": 1, "tanh": 1, "sigmoid": 1, "erf": 1, "sqrt": 1, "abs": 1, "max": 2, "min": 2}
LONGEST = 200
HIGHEST_POWER = 8
MOST_OPERATIONS = 200

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Exact in float64; used only to fold subtrees without x.
_SCALAR: dict[str, Callable[..., float]] = {
    "exp": math.exp,
    "tanh": math.tanh,
    "sigmoid": lambda v: 1.0 / (1.0 + math.exp(-v)),
    "erf": math.erf,
    "sqrt": math.sqrt,
    "abs": abs,
    "max": max,
    "min": min,
}
NAMED = {
    "identity": "x",
    "relu": "max(x,0)",
    "squared_relu": "max(x,0)*max(x,0)",
    "silu": "x*sigmoid(x)",
    "quick_gelu": "x*sigmoid(1.702*x)",
    "gelu": "0.5*x*(1+erf(x*0.7071067811865476))",
    "gelu_tanh": "0.5*x*(1+tanh(0.7978845608028654*(x+0.044715*x*x*x)))",
    "sigmoid": "sigmoid(x)",
    "tanh": "tanh(x)",
}


@dataclass(frozen=True)
class Algebra:
    """The kind of values that an expression is evaluated over."""

    #: Makes an element from a number.
    constant: Callable[[float], Any]
    #: The functions of `ARITY` on elements.
    functions: Mapping[str, Callable[..., Any]]


def canonical(text: str) -> str:
    """The one spelling that equal activations share.

    That is a name of `NAMED` if there is one, else the expression without blanks. Text that is no
    expression in x over numbers, ``+ - * / **`` and the functions of `ARITY` raises
    `WorkloadRefused`.
    """
    if text in NAMED:
        return text
    compact = _text(_parse(text.strip()))
    return _name_of().get(compact, compact)


def evaluate(text: str, x: Any, algebra: Algebra) -> Any:
    """Evaluate an activation, a name of `NAMED` or an expression, at an element of an algebra.

    Refuses text as `canonical` does.
    """
    return _lift(_fold(_parse(NAMED.get(text, text).strip()), x, algebra), algebra)


def function_cycles(text: str) -> int:
    """Cycles of a scheduler for the functions of a warp's elements, see `CYCLES`."""
    values = _values(_parse(NAMED.get(text, text).strip()))
    return sum({ast.unparse(each): _cycles(each) for each in values}.values())


def _cycles(node: ast.expr) -> int:
    """Cycles of one operation, of which constants take none."""
    of: ast.expr = node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        name, of = "divide", node.right
    else:
        return 0
    varies = any(isinstance(each, ast.Name) for each in _values(of))
    return CYCLES.get(name, 0) if varies else 0


def _lift(value: Any, algebra: Algebra) -> Any:
    return algebra.constant(value) if isinstance(value, float) else value


def _fold(node: ast.expr, x: Any, algebra: Algebra) -> Any:
    """Value of a node: a float where x does not occur, an element of the algebra elsewhere."""
    if isinstance(node, ast.Name):
        return x
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp):
        value = _fold(node.operand, x, algebra)
        return -value if isinstance(value, float) else algebra.constant(-1.0) * value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = _fold(node.left, x, algebra)
        power = base
        for _ in range(1, node.right.value):  # type: ignore[attr-defined]
            power = power * base
        return power
    if isinstance(node, ast.BinOp):
        left, right = (_fold(side, x, algebra) for side in (node.left, node.right))
        if isinstance(left, float) and isinstance(right, float):
            return _OPERATORS[type(node.op)](left, right)
        return _OPERATORS[type(node.op)](_lift(left, algebra), _lift(right, algebra))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    values = [_fold(argument, x, algebra) for argument in node.args]
    if all(isinstance(value, float) for value in values):
        return float(_SCALAR[node.func.id](*values))
    return algebra.functions[node.func.id](*(_lift(value, algebra) for value in values))


class _Symbol:
    """Stands for x while the constant parts of an expression are checked."""

    def _same(self, *_: Any) -> _Symbol:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __rtruediv__ = _same

    def __truediv__(self, other: Any) -> _Symbol:
        if isinstance(other, float) and other == 0.0:
            raise ZeroDivisionError
        return self


_CHECK = Algebra(constant=lambda value: value, functions={n: _Symbol()._same for n in ARITY})


@lru_cache(maxsize=256)
def _parse(text: str) -> ast.expr:
    """Parse and check; numbers become floats, exponents stay integers."""
    if len(text) > LONGEST:
        raise _refused(text[:40] + "...", f"{len(text)} characters", f"at most {LONGEST}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text, "no expression", _LANGUAGE, _advice(text)) from None
    tree = _checked(tree, text)
    if not any(isinstance(node, ast.Name) for node in _values(tree)):
        raise _refused(text, "an expression without x", "a function of x")
    operations = _operations(tree)
    if operations > MOST_OPERATIONS:
        raise _refused(text, f"{operations} operations", f"at most {MOST_OPERATIONS}")
    _check_constants(tree, text)
    return tree


def _check_constants(tree: ast.expr, text: str) -> None:
    try:
        value = _fold(tree, _Symbol(), _CHECK)
        assert isinstance(value, _Symbol)
        parts = [n for n in _values(tree) if not any(isinstance(v, ast.Name) for v in _values(n))]
        numbers = [float(_fold(part, None, _CHECK)) for part in parts]
    except (ArithmeticError, ValueError) as error:
        division = isinstance(error, ZeroDivisionError)
        found = "a division by zero" if division else "a function outside its domain or range"
        raise _refused(text, found, "constant parts that are finite") from None
    for number in numbers:
        if not abs(number) <= FLOAT_TYPES["float32"].largest:
            raise _refused(text, f"the constant {number:g}", "finite in float32")


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return node.args if isinstance(node, ast.Call) else []


def _values(node: ast.expr) -> list[ast.expr]:
    """The node and all operands below it, without the names of functions."""
    return [node, *(value for operand in _operands(node) for value in _values(operand))]


def _operations(node: ast.expr) -> int:
    """Number of operations of an evaluation; a power repeats its base."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.right.value * (_operations(node.left) + 1)  # type: ignore[attr-defined]
    operands = _operands(node)
    return sum(_operations(operand) for operand in operands) + bool(operands)


def _checked(node: ast.expr, text: str) -> ast.expr:
    """Copy the tree, refusing whatever is outside the language."""
    if isinstance(node, ast.Name) and node.id == "x":
        return node
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if isinstance(node.value, int) and node.value.bit_length() > 200:
            raise _refused(text, "a number of more than 60 digits", "finite in float32")
        return ast.Constant(float(node.value))  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ast.UnaryOp(ast.USub(), _checked(node.operand, text))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return ast.BinOp(_checked(node.left, text), ast.Pow(), _exponent(node.right, text))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return ast.BinOp(_checked(node.left, text), node.op, _checked(node.right, text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _checked_call(node, node.func, text)
    # The segment, because unparsing recurses several frames per level of nesting.
    found = ast.get_source_segment(text, node) or text
    advice = _advice(found) if isinstance(node, ast.Name) else _REWRITE
    raise _refused(text, repr(found), _LANGUAGE, advice)


def _checked_call(node: ast.Call, function: ast.Name, text: str) -> ast.expr:
    arity = ARITY.get(function.id)
    if arity is None:
        advice = closest(function.id, ARITY, _REWRITE)
        limit = "the functions " + ", ".join(ARITY)
        raise _refused(text, f"the function {function.id!r}", limit, advice)
    if len(node.args) != arity:
        found = f"{function.id} with {len(node.args)} arguments"
        raise _refused(text, found, f"{arity} for {function.id}")
    return ast.Call(function, [_checked(argument, text) for argument in node.args], [])


def _exponent(node: ast.expr, text: str) -> ast.expr:
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and 1 <= node.value <= HIGHEST_POWER
    ):
        return node
    found = f"the exponent {ast.get_source_segment(text, node)}"
    raise _refused(text, found, f"an integer from 1 to {HIGHEST_POWER}")


_LANGUAGE = "x, numbers, + - * / **, and the functions " + ", ".join(ARITY)
_REWRITE = "rewrite it with these"


def _advice(word: str) -> str:
    return closest(word, NAMED, "use these, or one of the names " + ", ".join(NAMED))


def _refused(text: str, found: str, limit: str, instead: str = _REWRITE) -> RefusedError:
    return refuse(WorkloadRefused, RULE, f"act={text}", found=found, limit=limit, instead=instead)


def _text(tree: ast.expr) -> str:
    return ast.unparse(tree).replace(" ", "")


@lru_cache(maxsize=1)
def _name_of() -> dict[str, str]:
    return {_text(_parse(text)): name for name, text in NAMED.items()}
