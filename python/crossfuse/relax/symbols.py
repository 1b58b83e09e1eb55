"""Symbolic extents of a group of operators: what they are, and the group at given sizes of them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Call, Var

from crossfuse import _tvm as ir
from crossfuse.relax.operators import RESHAPES, is_tensor, operator, refused

#: TVM's attribute of functions: upper bounds of symbols by their names.
UPPER_BOUND = "tir_var_upper_bound"
_INSTEAD = "export the model with the extents it is to run at"


def symbols_of(function: Any) -> tuple[Var, ...]:
    """Symbols in the shapes of a Relax function's tensors, sorted by name."""
    every = (
        *relax.analysis.defined_symbolic_vars(function),
        *relax.analysis.free_symbolic_vars(function),
    )
    return tuple(sorted(every, key=lambda each: str(each.name)))


def extents_of(value: Any) -> tuple[Any, ...]:
    """Extents of a tensor, symbolic or not; refuses one whose extents TVM does not know."""
    extents = getattr(value.ty.shape, "values", None)
    if extents is None:
        name = getattr(value, "name", "a constant")
        found = f"the dynamic shape {text_of(value.ty.shape)}"
        raise refused(str(name), found, "extents that follow from those of the inputs", _INSTEAD)
    return tuple(extents)


def is_symbolic(value: Any) -> bool:
    """Whether extents of a tensor are symbolic."""
    return any(not isinstance(each, tirx.IntImm) for each in extents_of(value))


def same_extents(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two shapes are the same for all values of the symbols."""
    known = ir.sym.Analyzer()
    return len(left) == len(right) and all(
        known.can_prove_equal(_expression(a), _expression(b))
        for a, b in zip(left, right, strict=True)
    )


def rows_of(value: Any) -> Any:
    """Number of rows of a tensor: the product of all extents but the last."""
    return ir.sym.Analyzer().simplify(product(extents_of(value)[:-1]))


def product(extents: Sequence[Any]) -> Any:
    """Product of extents, symbolic or not."""
    return reduce(mul, map(_expression, extents), _expression(1))


def _expression(extent: Any) -> Any:
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent


def check_symbols(function: Any, rows: Any) -> None:
    """Refuse a group in which symbols are more than a number of rows.

    Refused are symbols that `rows`, the number of rows of the result, does not depend on, shapes
    that do not follow from the inputs, and operators that compute with symbols.
    """
    inside = set(ir.variables(rows))
    other = next((each for each in symbols_of(function) if each not in inside), None)
    if other is not None:
        found = f"the symbolic extent {other.name}, which is no part of the {text_of(rows)} rows"
        raise refused("main", found, "symbolic rows alone", _INSTEAD)
    for block in function.body.blocks:
        for binding in block.bindings:
            extents_of(binding.var)
            _check_numbers(binding.value)


def _check_numbers(call: Any) -> None:
    """Refuse an operator whose result depends on symbols in more than its shape."""
    if not isinstance(call, Call) or operator(call) in RESHAPES:
        return
    for each in call.args:
        if not is_tensor(each) and any(True for _ in ir.variables(each)):
            found, limit = (
                f"the argument {text_of(each)}",
                "operators of which symbols are extents alone",
            )
            raise refused(operator(call), found, limit, "pass the number as a tensor")


def check_rows(value: Any, shape: Sequence[int], rows: Any) -> None:
    """Refuse a tensor in which symbols are more than rows in the first extents.

    `value` is an input or the result of the group, `shape` its extents in the function of a bin,
    the first of which counts rows if the tensor has any.
    """
    due = product((rows, *shape[1:]) if is_symbolic(value) else shape)
    if not same_extents([product(extents_of(value))], [due]):
        found = f"the dynamic shape {text_of(value.ty.shape)}"
        limit = f"{text_of(rows)} rows, and columns that are numbers"
        raise refused(str(getattr(value, "name", "a constant")), found, limit, _INSTEAD)


def with_extents(function: Any) -> tuple[Any, tuple[Any, ...]]:
    """A group as a function that may stand alone, and its arguments besides tensors.

    An input of ``[batch * length, K]`` alone does not determine batch and length, so such symbols
    are passed as a shape, one parameter more.
    """
    free = sorted(relax.analysis.free_symbolic_vars(function), key=lambda each: str(each.name))
    if not free:
        return function, ()
    params = [*function.params, relax.Var("extents", relax.ShapeType(free))]
    # The type of the result as it is inside: without the parameter, it had no extents outside.
    made = relax.Function(params, function.body, function.body.body.ty)
    return made, (relax.ShapeExpr(free),)


def most_rows(rows: Any, attributes: Mapping[str, Any] | None) -> int | None:
    """Upper bound of rows, if the function's attributes bound all symbols in it; else None."""
    bounds = (attributes or {}).get(UPPER_BOUND) or {}
    known = {str(name): int(bound) for name, bound in bounds.items()}
    symbols = dict.fromkeys(ir.variables(rows))
    if any(str(each.name) not in known for each in symbols):
        return None
    return value_at(rows, {each: known[str(each.name)] for each in symbols})


def cut(bins: Sequence[int], most: int | None) -> list[int]:
    """Bins of rows without those that no call needs if there are at most `most` rows."""
    ordered = sorted(set(bins))
    if most is None or most > ordered[-1]:
        return ordered
    return [*(each for each in ordered if each < most), max(1, most)]


def sizes_for(rows: Any, most: int) -> dict[Var, int]:
    """Sizes of symbols that give `most` rows, or as many below as they can; empty if none do."""
    (*others, last) = sorted(dict.fromkeys(ir.variables(rows)), key=lambda each: str(each.name))
    fixed = dict.fromkeys(others, 1)
    sizes = range(1, most + 1)
    count = bisect_right(sizes, most, key=lambda size: value_at(rows, {**fixed, last: size}))
    return {**fixed, last: count} if count else {}


def value_at(rows: Any, sizes: Mapping[Var, int]) -> int:
    """Value of an expression at given sizes of its symbols."""
    image = ir.substitute(rows, lambda var: _expression(sizes[var]) if var in sizes else var)
    return int(ir.sym.Analyzer().simplify(image))


def at_sizes(function: Any, sizes: Mapping[Var, int]) -> tvm.IRModule:
    """A group at given sizes of its symbols, as a module of its own."""
    whole, _ = with_extents(function)
    bound = whole.bind_symbolic_vars(dict(sizes))
    params = bound.params[: len(function.params)]
    mod = tvm.IRModule({"main": relax.Function(params, bound.body, bound.ret_ty)})
    return relax.transform.Normalize()(mod)


def text_of(expression: Any) -> str:
    """An expression of symbols for messages, without TVM's integer types."""
    return re.sub(r"T\.int64\((\d+)\)", r"\1", str(expression))
