"""Reads a function as blocks to be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_flow
from crossfuse.errors import GradientRefused, Rule

refused = Rule(GradientRefused, "gradient")


@dataclass(frozen=True, eq=False)
class Program:
    """A function as its blocks, each of which writes one buffer."""

    blocks: tuple[Block, ...]
    #: Parameters that nothing writes.
    inputs: tuple[Any, ...]
    #: Parameters that blocks write.
    outputs: tuple[Any, ...]
    #: Type of loop variables.
    dtype: str

    def named(self, name: str) -> Any:
        """The buffer of a name, None if there is none."""
        buffers = [*self.inputs, *(each.buffer for each in self.blocks)]
        return next((each for each in buffers if str(each.name) == name), None)


def read_program(func: Any) -> Program:
    """Read a function in s_tir form; refused is what `crossfuse.blocks.read.read_flow` refuses."""
    flow = read_flow(func, refused)
    for each in func.params:
        if not ir.is_buffer_var(each):
            instead = "build the function for one value of it, or store it in a buffer"
            raise refused(f"parameter '{each.name}'", "a number", "buffers", instead)
    wide = any(str(var.ty) == "int64" for each in flow.blocks for var in each.domain)
    separate = tuple(part for each in flow.blocks for part in _with_stored_values(each))
    return Program(separate, flow.inputs, flow.outputs, "int64" if wide else "int32")


def is_selecting(block: Block) -> bool:
    """Whether derivatives of a reduction ask which of its values it took, or which are 0."""
    return block.combine in ("max", "min", "product")


def starts_neutral(block: Block) -> bool:
    """Whether a reduction starts from what changes none of its values."""
    start, dtype = float(block.initial.value), str(block.initial.ty)
    if block.combine in ("sum", "product"):
        return start == float(block.combine == "product")
    least, most = (float(each(dtype).value) for each in (ir.tirx.min_value, ir.tirx.max_value))
    return start <= least if block.combine == "max" else start >= most


def _with_stored_values(block: Block) -> Iterator[Block]:
    """A block, behind one for what it reduces where that is asked for more than once.

    A maximum is compared with the values it was taken of. Were these computed again, the last bit
    might differ, as compilers contract products and sums, and none would be the maximum.
    """
    if not is_selecting(block) or isinstance(block.value, ir.TensorLoad):
        yield block
        return
    variables = (*block.coordinates, *block.summed)
    terms = block.terms(f"{block.buffer.name}_values", variables)
    yield terms
    yield replace(block, value=ir.tirx.BufferLoad(terms.buffer, list(variables)))
