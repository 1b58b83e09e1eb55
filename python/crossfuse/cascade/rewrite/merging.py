"""States of segments become one: blocks that reduce tuples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, left, new, right
from crossfuse.cascade.rewrite.arithmetic import written
from crossfuse.cascade.rewrite.refusal import refused
from crossfuse.cascade.rewrite.scripting import named


def check_merges(slots: Sequence[Slot]) -> None:
    """Refuse slots that are more than one number.

    Raises
    ------
    CascadeRefused
        Naming the slot.
    """
    for slot in slots:
        if slot.merge is None:
            raise refused(
                f"slot {slot.name}",
                f"a reduction by {slot.monoid.name}, which keeps where its numbers stood",
                "reductions of one number",
                "leave it out of the cascade",
            )


def merge(
    slots: Sequence[Slot],
    into: Mapping[str, Any],
    into_place: Sequence[Any],
    of: Mapping[str, Any],
    of_place: Sequence[Any],
    invariants: Mapping[sympy.Symbol, Any],
) -> None:
    """Statements of a block that reduces states; the block's iterators are written already.

    The form is one that `crossfuse.lower.lower_merges` reads: first the right state is bound, slot
    by slot, then what merging computes, and the stores come last.

    Parameters
    ----------
    slots : Sequence[Slot]
        The state.
    into, of : Mapping[str, tvm.tirx.Buffer]
        The merged state and those of segments, by slot.
    into_place, of_place : Sequence[tvm.ir.PrimExpr]
        Their indices.
    invariants : Mapping[sympy.Symbol, tvm.ir.PrimExpr]
        What else expressions of merging use.
    """
    with ir.script.init():
        for slot in slots:
            start = written(slot.init, invariants, _dtype(into[slot.name]))
            ir.script.buffer_store(into[slot.name], start, list(into_place))
    values = dict(invariants)
    for slot in slots:
        values[right(slot.name)] = _bound(f"{slot.name}_b", of[slot.name][tuple(of_place)])
        values[left(slot.name)] = into[slot.name][tuple(into_place)]
    for slot in slots:
        dtype = _dtype(into[slot.name])
        merged = _bound(f"{slot.name}_new", written(slot.merge, values, dtype))
        values[new(slot.name)] = values[guarded(slot.name)] = merged
        if slot.guard is not None and _is_used(guarded(slot.name), slots):
            values[guarded(slot.name)] = _bound(
                f"{slot.name}_guard", written(slot.guard, values, dtype)
            )
    for slot in slots:
        ir.script.buffer_store(into[slot.name], values[new(slot.name)], list(into_place))


def _is_used(symbol: sympy.Symbol, slots: Sequence[Slot]) -> bool:
    return any(each.merge is not None and symbol in each.merge.free_symbols for each in slots)


def _bound(name: str, value: Any) -> Any:
    return named(name, ir.script.bind(value))


def _dtype(buffer: Any) -> str:
    return str(buffer.ty.dtype)
