"""Proof that each row of a function's result is made of the same row of what it is given.

Kernels of symbolic rows are planned for a batch of one: what goes along the batch, such as a
softmax or a transposition, does nothing there. So rows are followed through the function at a size
in which no symbol is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.relax.operators import refused


def check_row_wise(func: Any, given: Sequence[bool], rows: int) -> None:
    """Refuse a function that reads one row for another one.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Of static shapes, in s_tir form, unscheduled.
    given : Sequence[bool]
        Which of its inputs have rows.
    rows : int
        How many there are; rows are the leading extents of a tensor together.

    Raises
    ------
    WorkloadRefused
        Naming the block.
    """
    inputs = func.params[: len(given)]
    known, by_row = ir.sym.Analyzer(), {p for p, has in zip(inputs, given, strict=True) if has}
    blocks: list[Any] = []
    ir.walk(func.body.block.body, (ir.SBlock, blocks.append))
    for block in blocks:
        for each in block.iter_vars:
            known.bind(each.var, each.dom)
        stores: list[Any] = []
        ir.walk(block, (ir.BufferStore, stores.append))
        loads = [each for each in ir.buffer_loads(*_parts(block)) if each.source in by_row]
        for store in stores if loads else ():
            due = _row(store.buffer, store.indices, rows)
            for load in loads:
                found = _row(load.source, load.indices, rows)
                if due is None or found is None or not known.can_prove_equal(due, found):
                    raise refused(
                        f"block '{block.name_hint}'",
                        f"'{load.source.name}{list(load.indices)}' for "
                        f"'{store.buffer.name}{list(store.indices)}'",
                        "the same row of all that has rows, leading extents together",
                        "leave the model unfused, or give it one number of rows",
                    )
            by_row.add(store.buffer)


def _parts(block: Any) -> list[Any]:
    return [block.body] if block.init is None else [block.body, block.init]


def _row(buffer: Any, indices: Sequence[Any], rows: int) -> Any:
    """The number of a row; None of a tensor without as many."""
    place, count = ir.tirx.const(0, "int32"), 1
    for extent, index in zip(buffer.ty.shape, indices, strict=True):
        if count == rows:
            break
        place, count = place * int(extent) + index, count * int(extent)
    return place if count == rows else None
