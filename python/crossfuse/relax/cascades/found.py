"""What detection knows of a function as a cascade, and the kernel that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Derivation
from crossfuse.cascade.detect.program import Program, buffers_of, read_program
from crossfuse.cascade.site import Site
from crossfuse.errors import RefusedError
from crossfuse.planner.families import ROWS

#: Forms of kernels: tiles of products, threads that stream, rows made in their product's kernel.
TILES, THREADS, ROWS_FIRST = "tiles", "threads", ROWS


@dataclass(frozen=True, eq=False)
class Found:
    """What detection found in a function: a cascade that streams, or why there is none."""

    #: As it was given.
    func: Any
    #: Its only cascade, in a function narrowed to 32-bit indices; None if it has none, or several.
    site: Site | None = None
    #: How the cascade streams.
    derivation: Derivation | None = None
    #: Why it does not; empty if it does.
    reason: str = ""

    @property
    def stages(self) -> int:
        """How many reductions share the axis."""
        return len(self.site.stages) if self.site else 0

    @property
    def producers(self) -> frozenset[str]:
        """Names of blocks that make elements."""
        return frozenset(self.site.producers.values()) if self.site else frozenset()

    @property
    def is_product(self) -> bool:
        """Whether a stage has many results for a row, or no element belongs to one row alone."""
        if self.site is None:
            return False
        rows = [each for each in self.site.rows if int(self.site.extents[each]) > 1]
        reads = [self.site.reads[each] for each in self.site.cascade.elements]
        shared = bool(reads) and not any(mentions_all(each, rows) for each in reads)
        return shared or any(each.columns for each in self.site.stages.values())

    @property
    def is_plain(self) -> bool:
        """Whether it is one reduction that reads each element once, or two products in a row."""
        return bool(self.plain)

    @property
    def plain(self) -> str:
        """Why there is nothing to stream; empty if there is."""
        site = self.site
        if site is None or self.stages != 1 or site.cascade.rows:
            return ""
        if not site.producers:
            return "it has one reduction, which reads each element once as it is"
        return "it is a product of what another product makes" if self.is_product else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel that a cascade becomes."""

    #: `TILES`, `THREADS` or `ROWS_FIRST`.
    form: str
    #: Scheduled.
    func: Any
    #: Bytes that it moves, counted as described below.
    bytes: int
    #: The planner's estimates, where separate kernels could be faster; else empty.
    why: str = ""


def mentions_all(expression: Any, variables: list[Any]) -> bool:
    """Whether an expression uses all given variables."""
    used = list(ir.variables(expression))
    return all(any(each.same_as(var) for var in used) for each in variables)


# Bytes that functions move between memory and the chip, counted before fusing and after.
#
# Before, each reduction and each output of a function is a sweep of its own: it reads what it is
# made of once, with the element-wise blocks in front of it inlined, and writes its result. After,
# every tensor is read and written once; outputs over the axis of a stream may read elements again.
# What caches save is not known, hence left out.


def swept(func: Any) -> int:
    """Bytes that a plain function moves if each of its reductions is a loop nest of its own.

    It is in s_tir form; a function that cannot be read counts the bytes of its parameters.
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
    """Bytes of all buffers among a function's parameters."""
    return sum(_bytes(each) for each in func.params if ir.is_buffer_var(each))


def _read(program: Program, block: Any) -> int:
    """Bytes that a block reads: at most one element of a tensor per iteration."""
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
