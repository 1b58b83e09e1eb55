"""Indices before and after `FlattenBuffer`, worked out by NumPy for many values of what is in them.

Loops and threads take values of their ranges. What is no iterator, such as a call or a load, takes
small values, the same ones wherever it is written the same way. Where the conditions around an
access do not hold, its index may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from crossfuse import _tvm as ir
from crossfuse.lower.hidden import flatten_buffers

_SAMPLES = 512
#: Values of what is no iterator are below, taken at random or one after another.
_MOST = 24
_MOST_OF_ALL = 6


def _pick(condition: Any, one: Any, other: Any) -> Any:
    return np.where(condition, one, other)


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Div": lambda a, b: np.sign(a) * (np.abs(a) // b),  # constants, which are positive
    "Mod": np.fmod,
    "Min": np.minimum,
    "Max": np.maximum,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}


@dataclass
class Values:
    """What iterators and everything else are, in many cases at once."""

    ranges: dict[Any, tuple[int, int]]
    bound: dict[Any, Any]
    count: int
    #: None: all values of everything, if the count is large enough.
    random: np.random.Generator | None
    found: dict[Any, np.ndarray] = field(default_factory=dict)
    #: Cases of what was found.
    period: int = 1

    def of(self, node: Any) -> Any:
        """Value of an expression in all cases."""
        if isinstance(node, int):
            return node
        if isinstance(node, ir.tirx.IntImm):
            return int(node.value)
        if isinstance(node, ir.Var):
            return self.of(self.bound[node]) if node in self.bound else self._any(node, node)
        kind = type(node).__name__
        if kind in _BINARY:
            return _BINARY[kind](self.of(node.a), self.of(node.b))
        if kind == "Not":
            return np.logical_not(self.of(node.a))
        if kind == "Cast":
            return self.of(node.value)
        if kind == "Select":
            return _pick(*map(self.of, (node.condition, node.true_value, node.false_value)))
        if kind == "Ramp":
            return self.of(node.base) + 1j * self.of(node.stride)  # a pair
        if isinstance(node, ir.Call) and node.op.same_as(ir.Op.get(ir.IF_THEN_ELSE)):
            return _pick(*map(self.of, node.args))
        if isinstance(node, ir.TensorLoad):
            return self._any(("load", str(node.source.name)), None)
        return self._any(str(node), None)

    def _any(self, key: Any, var: Any) -> np.ndarray:
        if key not in self.found:
            others = (0, _MOST if self.random is not None else _MOST_OF_ALL)
            least, end = others if var is None else self.ranges.get(var, others)
            if self.random is not None:
                self.found[key] = self.random.integers(least, end, self.count)
            else:
                self.found[key] = least + np.arange(self.count) // self.period % (end - least)
                self.period *= end - least
                assert self.period <= self.count, "not all values were tried"
        return self.found[key]


@dataclass(frozen=True)
class Access:
    """A buffer, where it is accessed, and the conditions around that."""

    buffer: Any
    indices: tuple[Any, ...]
    conditions: tuple[Any, ...]


class _Function:
    """Accesses of a function in order, ranges of its iterators and values of its variables."""

    def __init__(self, func: Any) -> None:
        self.accesses: list[Access] = []
        self.ranges: dict[Any, tuple[int, int]] = {}
        self.bound: dict[Any, Any] = {}
        self._visit(func.body, ())

    def _visit(self, node: Any, conditions: tuple[Any, ...]) -> None:
        if isinstance(node, ir.SeqStmt):
            for each in node.seq:
                self._visit(each, conditions)
        elif isinstance(node, ir.IfThenElse):
            self._leaf(node.condition, conditions)
            self._visit(node.then_case, (*conditions, node.condition))
            if node.else_case is not None:
                self._visit(node.else_case, (*conditions, ir.tirx.Not(node.condition)))
        elif isinstance(node, ir.For):
            self._range(node.loop_var, node.min, node.extent)
            self._visit(node.body, conditions)
        elif isinstance(node, ir.AttrStmt):
            if node.attr_key == "thread_extent":
                self._range(node.node.var, 0, node.value)
            self._visit(node.body, conditions)
        elif getattr(node, "body", None) is not None:
            self._leaf(getattr(node, "condition", None), conditions)
            self._visit(node.body, conditions)
        else:
            if isinstance(node, ir.Bind):
                self.bound[node.var] = node.value
            self._leaf(node, conditions)

    def _range(self, var: Any, least: Any, extent: Any) -> None:
        bounds = ir.constant(least), ir.constant(extent)
        if None not in bounds:
            self.ranges[var] = (bounds[0], bounds[0] + bounds[1])

    def _leaf(self, node: Any, conditions: tuple[Any, ...]) -> None:
        def add(buffer: Any, indices: Any) -> None:
            self.accesses.append(Access(buffer, tuple(indices), conditions))

        if node is not None:
            ir.walk(node, (ir.TensorLoad, lambda each: add(each.source, each.indices)))
            ir.walk(node, (ir.BufferStore, lambda each: add(each.buffer, each.indices)))


def wrong_indices(func: Any, *, ours: bool = True, all_values: bool = False) -> Iterator[str]:
    """Flatten the buffers of a function, and compare.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Before `FlattenBuffer`; strides of its buffers are those of rows.
    ours : bool
        Whether `flatten_buffers` does it, and not TVM's `FlattenBuffer` alone.
    all_values : bool
        Whether iterators take all their values together, and up to two other things some.

    Yields
    ------
    str
        What is wrong after the pass: the index before, and the one after.
    """
    module = ir.IRModule({"main": func})
    for each in flatten_buffers() if ours else [ir.tirx.transform.FlattenBuffer()]:
        module = each(module)
    flat, whole = _Function(module["main"]), _Function(func)
    assert len(flat.accesses) == len(whole.accesses)
    ranges, bound = whole.ranges | flat.ranges, whole.bound | flat.bound
    extents = [end - least for least, end in ranges.values()]
    count = prod(extents) * _MOST_OF_ALL**2 if all_values else _SAMPLES
    done: set[str] = set()
    for one, other in zip(whole.accesses, flat.accesses, strict=True):
        (index,) = other.indices
        text = f"{one.buffer.name}{list(one.indices)} -> {index}"
        if text in done or str(list(one.indices)) == f"[{index}]":
            continue
        done.add(text)
        values = Values(ranges, bound, count, None if all_values else np.random.default_rng(0))
        differ = _row_major(values, one) != values.of(index)
        for each in one.conditions:
            differ = differ & np.asarray(values.of(each), bool)
        if np.any(differ):
            yield text


def _row_major(values: Values, access: Access) -> Any:
    place: Any = 0
    for index, extent in zip(access.indices, access.buffer.ty.shape, strict=True):
        place = place * int(extent) + values.of(index)
    return place + values.of(access.buffer.ty.elem_offset)
