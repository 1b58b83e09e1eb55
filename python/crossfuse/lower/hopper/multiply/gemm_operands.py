"""Reads the operands of `gemm_async`: where they lie, and what wgmma is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.multiply.hold import hold
from crossfuse.lower.hopper.multiply.instruction import (
    CORE_MATRIX,
    K_BYTES,
    NO_SWIZZLE,
    PATTERN,
    SWIZZLE_128,
    described,
    words,
)
from crossfuse.lower.hopper.multiply.tile_layouts import ROWS, operand_layout, shared_layout
from crossfuse.lower.hopper.plan.kept import GROUP_REGISTERS
from crossfuse.lower.hopper.plan.operand import item_bytes
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES

_RULE = "gemm-async"
#: Bytes of a row of a core matrix.
_CHUNK = 16


@dataclass(frozen=True)
class Region:
    """A box of a buffer.

    Attributes
    ----------
    name : str
        What messages call it.
    buffer : Any
        The buffer.
    before : tuple
        Indices of the dimensions before the last two.
    origin : tuple[Any, Any]
        Of the box in the last two dimensions.
    shape : tuple[int, int]
        Its extents.
    """

    name: str
    buffer: Any
    before: tuple[Any, ...]
    origin: tuple[Any, Any]
    shape: tuple[int, int]

    @property
    def dtype(self) -> str:
        """Element type."""
        return str(self.buffer.dtype)

    @property
    def scope(self) -> str:
        """Storage scope."""
        return str(self.buffer.scope())

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"{self.name} '{self.buffer.name}'"

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the buffer."""
        return tuple(int(each) for each in self.buffer.shape)

    def has_layout(self, layout: Any) -> bool:
        """Whether the buffer lies as a layout says."""
        found = self.buffer.layout
        return found is not None and ir.same_layout(found, layout)

    def refuse(self, found: str, limit: str, instead: str) -> Exception:
        """Make the refusal of this operand."""
        return refuse(_RULE, self.where, found=found, limit=limit, instead=instead)


def read_region(name: str, region: Any) -> Region:
    """Read a region of a call.

    Raises
    ------
    LoweringRefused
        If it is no box of a matrix of constant extents.
    """
    buffer, ranges = region.source, list(region.region)
    extents = [ir.constant(each.extent) for each in ranges]
    matrix = len(ranges) >= 2 and None not in extents and all(n == 1 for n in extents[:-2])
    origin = tuple(each.min for each in ranges)
    rows, columns = ([0, *(each or 0 for each in extents)])[-2:]
    found = Region(name, buffer, origin[:-2], origin[-2:], (rows, columns))
    if not matrix:
        raise found.refuse(
            f"a region of extents {[each.extent for each in ranges]}",
            "two dimensions of constant extents, behind dimensions of one index each",
            "name one matrix, such as buffer[stage, 0:64, 0:64]",
        )
    return found


class Descriptors:
    """Descriptors of a matrix in shared memory, one for each wgmma.

    Parameters
    ----------
    region : Region
        The matrix: [rows, k], or [k, columns] if it is transposed.
    transposed : bool
        Whether the reduction is the outer dimension.

    Raises
    ------
    LoweringRefused
        If wgmma cannot take it as it lies.
    """

    def __init__(self, region: Region, *, transposed: bool = False) -> None:
        self.region = region
        self.transposed = transposed
        self.item = item_bytes(region.dtype)
        self.swizzle = self._swizzle()
        self.start = self._start()
        self.extent = region.shape[0 if transposed else 1]

    def _swizzle(self) -> int:
        region = self.region
        *_, rows, columns = region.extents
        span = columns * self.item
        for swizzle, unit in ((SWIZZLE_128, ROW_BYTES), (NO_SWIZZLE, _CHUNK)):
            if rows % 8 or span % unit or (self.transposed and swizzle == NO_SWIZZLE):
                continue
            layout = shared_layout(region.dtype, region.extents, swizzled=swizzle != NO_SWIZZLE)
            if region.has_layout(layout):
                return swizzle
        raise region.refuse(
            f"layout {region.buffer.layout} of {list(region.extents)}",
            "that of shared_layout: rows of 128 bytes with the 128-byte swizzle, or core matrices "
            "without a swizzle where the reduction is the inner dimension",
            "declare the buffer with crossfuse.lower.hopper.multiply.tile_layouts.shared_layout",
        )

    def _start(self) -> Any:
        """Bytes from the matrix that holds the region to its first element."""
        region, known = self.region, ir.sym.Analyzer()
        row, column = region.origin
        first, unit = ir.constant(column), ROW_BYTES if self.transposed else K_BYTES
        regular = known.can_prove_equal(ir.tirx.floormod(row, 8), 0)
        if first is None or first * self.item % unit or not regular:
            raise region.refuse(
                f"a region from {[row, column]}",
                f"rows from a multiple of 8 on, columns from a constant multiple of {unit} bytes "
                "on",
                "multiply other parts of the tile",
            )
        return known.simplify(row * self._row_bytes + self._across(first * self.item))

    @property
    def _row_bytes(self) -> int:
        return _CHUNK if self.swizzle == NO_SWIZZLE else ROW_BYTES

    def _across(self, offset: int) -> int:
        """Bytes to a column that is `offset` bytes behind the first one of its row."""
        *_, rows, _ = self.region.extents
        block, rest = divmod(offset, self._row_bytes)
        return block * rows * self._row_bytes + rest

    def open(self) -> Callable[[int], Any]:
        """Write the first descriptor; returns that of each wgmma along k."""
        region = self.region
        *_, rows, _ = region.extents
        address = region.buffer.ptr_to([*region.before, 0, 0])
        leading = rows * self._row_bytes if self.transposed or self.swizzle == NO_SWIZZLE else 16
        stride = CORE_MATRIX if self.swizzle == NO_SWIZZLE else PATTERN
        name = f"{region.buffer.name}_tile".replace(".", "_")
        first = described(name, address, leading, stride, self.swizzle)

        def descriptor(part: int) -> Any:
            return first.value + words(self.start + self._step(part))

        return descriptor

    def _step(self, part: int) -> int:
        """Bytes from the first wgmma to another one."""
        if self.transposed:
            return part * (K_BYTES // self.item) * ROW_BYTES
        first = int(self.region.origin[1]) * self.item
        return self._across(first + part * K_BYTES) - self._across(first)


class Registers:
    """A left operand in registers.

    Parameters
    ----------
    region : Region
        The matrix, [64, k].

    Raises
    ------
    LoweringRefused
        If threads hold other parts of it than wgmma takes.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.item = item = item_bytes(region.dtype)
        first, columns = ir.constant(region.origin[1]), region.extents[-1]
        whole = region.extents == (ROWS, columns) and columns * item % K_BYTES == 0
        if not whole or not region.has_layout(operand_layout(columns, region.dtype)):
            raise region.refuse(
                f"layout {region.buffer.layout} of {list(region.extents)} in registers",
                f"that of operand_layout: {ROWS} rows over a warpgroup",
                "declare the buffer with "
                "crossfuse.lower.hopper.multiply.tile_layouts.operand_layout",
            )
        if first is None or first * item % K_BYTES:
            raise region.refuse(
                f"columns from {region.origin[1]} on",
                f"a constant multiple of {K_BYTES // item}: registers have no addresses",
                "unroll the loop around it",
            )
        self.first = first * item // K_BYTES
        self.extent = region.shape[1]

    def open(self) -> Callable[[int], list[Any]]:
        """Declare the registers and write them by here; returns those of each wgmma along k."""
        registers = self.region.buffer.local().view("uint32")
        hold(registers, self.region.extents[1] * self.item // K_BYTES * GROUP_REGISTERS)

        def operands(part: int) -> list[Any]:
            place = GROUP_REGISTERS * (self.first + part)
            return [registers[place + each] for each in range(GROUP_REGISTERS)]

        return operands
