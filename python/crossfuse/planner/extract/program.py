"""A function as blocks that read each other: what it takes, and the one thing that it makes."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_blocks
from crossfuse.planner.extract.reads import Program
from crossfuse.planner.extract.refusal import refused


def read_program(func: Any) -> Program:
    """Read a function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form, unscheduled.

    Returns
    -------
    Program
        Its blocks, by what they write.

    Raises
    ------
    PlanRefused
        Buffers that several blocks write or that are read before they are written, results that
        nothing reads, and any number of outputs but one; see `read_blocks`.
    """
    if not isinstance(func, ir.PrimFunc):
        found = f"a {type(func).__name__}"
        raise refused("function", found, "a PrimFunc in s_tir form", "pass one function of it")
    blocks: dict[Any, Block] = {}
    for block in read_blocks(func):
        if block.buffer in blocks:
            names = f"'{blocks[block.buffer].name}' and '{block.name}'"
            found, where = f"blocks {names} that write it", f"buffer '{block.buffer.name}'"
            raise refused(where, found, "one block for each buffer", "write it by one block")
        blocks[block.buffer] = block
    buffers = [each for each in func.params if ir.is_buffer_var(each)]
    inputs = {each: place for place, each in enumerate(buffers) if each not in blocks}
    outputs = [each for each in buffers if each in blocks]
    if len(outputs) != 1:
        names = ", ".join(f"'{each.name}'" for each in outputs)
        found = f"{len(outputs)} outputs" + (f" ({names})" if names else "")
        raise refused("function", found, "one output", "split the function, one for each output")
    _check_order(blocks, outputs[0])
    program = Program(blocks, inputs, outputs[0])
    program.take_apart()
    return program


def _check_order(blocks: dict[Any, Block], output: Any) -> None:
    used, written = set(), set()
    for buffer, block in blocks.items():
        for load in ir.buffer_loads(block.value):
            if load.source in blocks and load.source not in written:
                where, found = (
                    f"{block.where}, buffer '{load.source.name}'",
                    "a read before a write",
                )
                raise refused(where, found, "blocks in the order of their data", "order the blocks")
            used.add(load.source)
        written.add(buffer)
    if output in used:
        found = "an output that is read again"
        instead = "copy it to a buffer of its own"
        raise refused(f"buffer '{output.name}'", found, "an output that is only written", instead)
    idle = [
        block
        for buffer, block in blocks.items()
        if buffer not in used and not buffer.same_as(output)
    ]
    if idle:
        found = "a result that nothing reads"
        raise refused(idle[0].where, found, "blocks that the output needs", "take the block out")
