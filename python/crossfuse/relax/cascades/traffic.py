"""Bytes that functions move between memory and the chip, counted before they are fused and after.

Before, each reduction and each output of a function is a sweep of its own: it reads what it is made
of once, with the element-wise blocks in front of it inlined, and writes its result. After, every
tensor is read and written once; outputs over the axis of a stream may read elements again. What
caches save is not known, and left out.
"""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.program import Program, buffers_of, read_program
from crossfuse.errors import RefusedError


def swept(func: Any) -> int:
    """Bytes that a plain function moves if each of its reductions is a loop nest of its own.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form; of one that cannot be read, the bytes of its parameters.
    """
    try:
        program = read_program(func)
    except RefusedError:
        return once(func)
    total = 0
    blocks = {id(each): each for each in program.made.values()}
    for block in blocks.values():
        made = buffers_of(block)
        if block.combine or any(each in program.outputs for each in made):
            total += sum(_bytes(each) for each in made) + _read(program, block)
    return total


def once(func: Any) -> int:
    """Bytes of all parameters of a function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Whose parameters are buffers.
    """
    return sum(_bytes(each) for each in func.params if ir.is_buffer_var(each))


def _read(program: Program, block: Any) -> int:
    """What a block reads: of each tensor no more than it has iterations."""
    turns = 1
    for extent in block.domain.values():
        turns *= int(extent)
    found: dict[Any, int] = {}
    for load in program.loads(block):
        if load.buffer not in program.made or not load.buffer.same_as(block.buffer):
            found[load.buffer] = min(_bytes(load.buffer), turns * _item(load.buffer))
    return sum(found.values())


def _bytes(buffer: Any) -> int:
    """Bytes of a tensor; 0 if its shape is not known."""
    extents = [ir.constant(each) for each in buffer.ty.shape]
    return prod(each or 0 for each in extents) * _item(buffer)


def _item(buffer: Any) -> int:
    return -(-int(ir.tvm.DataType(str(buffer.ty.dtype)).bits) // 8)
