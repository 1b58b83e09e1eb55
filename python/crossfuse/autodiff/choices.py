"""Choices between expressions: made, simplified, and taken out of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.program import refused
from crossfuse.blocks import access

#: How often an index may choose between others: every choice doubles what is gathered.
_MOST_CHOICES = 6


def is_choice(value: Any) -> bool:
    """Whether an expression computes one of two others."""
    return isinstance(value, ir.Call) and str(getattr(value.op, "name", "")) == ir.IF_THEN_ELSE


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """A choice that computes the side that it takes, and no other.

    TVM joins the conditions of a choice in a choice where both have the same other side, and may
    then compute all of them. So one that loads is kept behind one that says whether it may: the
    outer one, which knows loop variables alone, is turned round.
    """
    if _asks_data(yes) and not ir.buffer_loads(condition):
        condition, yes, no = ir.tirx.Not(condition), no, yes
    return ir.Call(ir.Op.get(ir.IF_THEN_ELSE), [condition, yes, no], ret_ty=yes.ty)


def _asks_data(value: Any) -> bool:
    """Whether a choice, or one that it leads to, has a condition that loads."""
    if not is_choice(value):
        return False
    condition, yes, no = value.args
    return bool(ir.buffer_loads(condition)) or _asks_data(yes) or _asks_data(no)


def number_like(value: float, like: Any) -> Any:
    """A number of another expression's type."""
    return ir.tirx.const(float(value), str(like.ty))


def zero_like(like: Any) -> Any:
    """The number 0 of another expression's type."""
    return number_like(0, like)


def is_number(value: Any, number: float) -> bool:
    """Whether an expression is a certain number."""
    return isinstance(value, ir.tirx.FloatImm) and float(value.value) == number


def linear(scale: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function that leaves 0 what it is, where a choice is not 0.

    So no number is multiplied by 0, which might be infinite where the other side is taken.
    """
    if is_choice(value):
        condition, yes, no = value.args
        if is_number(no, 0):
            made = linear(scale, yes)
            return choose(condition, made, zero_like(made))
        if is_number(yes, 0):
            made = linear(scale, no)
            return choose(condition, zero_like(made), made)
    return scale(value)


def under(conditions: Sequence[Any], value: Any) -> Any:
    """A value where conditions on loop variables hold, 0 elsewhere."""
    left = [each for each in conditions if ir.constant(each) != 1]
    if not left:
        return value
    if is_choice(value) and is_number(value.args[2], 0) and not ir.buffer_loads(value.args[0]):
        left, value = [*left, *ir.terms(value.args[0])], value.args[1]
    once = {ir.tvm_ffi.StructuralKey(each): each for each in left}
    return choose(ir.conjunction(once.values()), value, zero_like(value))


def simplest(value: Any, domain: access.Domain) -> Any:
    """A value whose indices, and conditions on loop variables, are in their simplest form."""

    def load(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.tirx.BufferLoad(node.source, list(access.simplified(node.indices, domain)))

    def choice(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return _settled(node, domain) if is_choice(node) else node

    return ir.mutate(value, (ir.TensorLoad, load), (ir.Call, choice))


def _settled(choice: Any, domain: access.Domain) -> Any:
    condition, yes, no = choice.args
    # What is loaded may be no number, of which TVM's rules know nothing.
    parts = [
        each if ir.buffer_loads(each) else access.simplified([each], domain)[0]
        for each in ir.terms(condition)
    ]
    if any(ir.constant(each) == 0 for each in parts):
        return no
    parts = [each for each in parts if ir.constant(each) != 1]
    return choose(ir.conjunction(parts), yes, no) if parts else yes


# Choices inside of indices: reflected and clamped edges.


def lifted(load: Any, where: str) -> Any:
    """A load whose indices choose between others as a choice between loads.

    ``X[max(i, 0)]`` becomes ``if_then_else(i >= 0, X[i], X[0])``, so that each load has indices
    that may be inverted. More than some choices in one another are refused.
    """
    return _lifted(load, where, 0)


def _lifted(load: Any, where: str, depth: int) -> Any:
    for at, index in enumerate(load.indices):
        choice = _first_choice(index)
        if choice is None:
            continue
        if depth >= _MOST_CHOICES:
            found, limit = f"an index that chooses: {load}", f"{_MOST_CHOICES} choices"
            raise refused(where, found, limit, "write the choices as separate blocks")
        condition, yes, no = _sides(choice)
        parts = [_at(load, at, _replaced(index, choice, each)) for each in (yes, no)]
        return choose(condition, *(_lifted(each, where, depth + 1) for each in parts))
    return load


def _first_choice(index: Any) -> Any:
    """The outermost choice of an index that is read first; None if there is none."""
    if isinstance(index, (ir.tirx.IntImm, ir.Var)):
        return None
    found = ir.nodes(index, ir.tirx.Select, ir.tirx.Max, ir.tirx.Min, ir.Call)
    found = [each for each in found if not isinstance(each, ir.Call) or is_choice(each)]
    # What is visited last has all others inside of it, or stands beside them.
    return found[-1] if found else None


def _sides(choice: Any) -> tuple[Any, Any, Any]:
    if isinstance(choice, ir.tirx.Select):
        return choice.condition, choice.true_value, choice.false_value
    if isinstance(choice, ir.tirx.Max):
        return ir.tirx.GE(choice.a, choice.b), choice.a, choice.b
    if isinstance(choice, ir.tirx.Min):
        return ir.tirx.LE(choice.a, choice.b), choice.a, choice.b
    return tuple(choice.args)


def _replaced(index: Any, choice: Any, side: Any) -> Any:
    """An index with one side in the place of a choice, wherever it stands."""
    if index.same_as(choice):
        return side

    def swap(node: Any, mutator: Any) -> Any:
        return side if ir.alike(node, choice) else mutator.default_mutate(node)

    return ir.mutate(index, (type(choice), swap))


def _at(load: Any, at: int, index: Any) -> Any:
    indices = list(load.indices)
    indices[at] = index
    return ir.tirx.BufferLoad(load.source, indices)
