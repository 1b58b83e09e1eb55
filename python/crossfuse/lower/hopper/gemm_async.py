"""`gemm_async` for sm_90a: TIRx's tile primitive as wgmma.

TVM has the primitive for Blackwell alone. This variant makes products of a warpgroup out of it::

    acc = T.alloc_buffer((64, 128), "float32", scope="local", layout=accumulator_layout(128))
    Tx.wg.gemm_async(acc, A[stage, 0:64, :], B[stage, :, :], accum=step > 0)
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(0)

The products run on after the call, which fences the registers that they use: the author commits
them and waits, and reads `acc` by `waited_sums`. Layouts are those of `wgmma`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.lower.hopper.plan.tiles import GROUP_REGISTERS
from crossfuse.lower.hopper.statements import run
from crossfuse.lower.hopper.wgmma import (
    CORE_BYTES,
    CORE_MATRIX,
    K_BYTES,
    NO_SWIZZLE,
    OPERAND_TYPES,
    PATTERN,
    SWIZZLE_128,
    accumulator_layout,
    described,
    hold,
    multiply,
    operand_layout,
    shared_layout,
    words,
)
from crossfuse.lower.refusal import refuse
from crossfuse.markers import SHARED_SCOPES

_RULE = "gemm-async"


@dataclass(frozen=True)
class Region:
    """A box of a buffer: one operand of the call."""

    #: Of the operand, for messages.
    name: str
    buffer: Any
    #: Indices of the dimensions before the last two.
    before: tuple[Any, ...]
    #: Of the box in the last two dimensions.
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
    def extents(self) -> tuple[int, ...]:
        """Extents of the buffer."""
        return tuple(int(each) for each in self.buffer.shape)

    def has_layout(self, layout: Any) -> bool:
        """Whether the buffer has a layout equal to this one."""
        found = self.buffer.layout
        return found is not None and ir.same_layout(found, layout)

    def refuse(self, found: str, limit: str, instead: str) -> Exception:
        """The refusal of this operand, to be raised."""
        where = f"{self.name} '{self.buffer.name}'"
        return refuse(_RULE, where, found=found, limit=limit, instead=instead)


def read_region(name: str, region: Any) -> Region:
    """Read a region of a call; refused unless it is a box of a matrix of constant extents."""
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

    The region is [rows, k], or [k, columns] if `transposed`. Refused if wgmma cannot take it as it
    lies.
    """

    def __init__(self, region: Region, *, transposed: bool = False) -> None:
        self.region = region
        self.transposed = transposed
        self.item = ir.item_bytes(region.dtype)
        self.swizzle = self._swizzle()
        self.start = self._start()
        self.extent = region.shape[0 if transposed else 1]

    def _swizzle(self) -> int:
        region = self.region
        *_, rows, columns = region.extents
        span = columns * self.item
        for swizzle, unit in ((SWIZZLE_128, ROW_BYTES), (NO_SWIZZLE, CORE_BYTES)):
            if rows % 8 or span % unit or (self.transposed and swizzle == NO_SWIZZLE):
                continue
            layout = shared_layout(region.dtype, region.extents, swizzled=swizzle != NO_SWIZZLE)
            if region.has_layout(layout):
                return swizzle
        raise region.refuse(
            f"layout {region.buffer.layout} of {list(region.extents)}",
            "that of shared_layout: rows of 128 bytes with the 128-byte swizzle, or core matrices "
            "without a swizzle where the reduction is the inner dimension",
            "declare the buffer with crossfuse.lower.hopper.wgmma.shared_layout",
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
        return CORE_BYTES if self.swizzle == NO_SWIZZLE else ROW_BYTES

    def _across(self, offset: int) -> int:
        """Byte offset of a column that is `offset` bytes behind the first one of its row."""
        *_, rows, _ = self.region.extents
        block, rest = divmod(offset, self._row_bytes)
        return block * rows * self._row_bytes + rest

    def open(self) -> Callable[[int], Any]:
        """Emit the first descriptor; returns a function to that of each wgmma along k."""
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
        """Bytes from the first wgmma to number `part`."""
        if self.transposed:
            return part * (K_BYTES // self.item) * ROW_BYTES
        first = int(self.region.origin[1]) * self.item
        return self._across(first + part * K_BYTES) - self._across(first)


class Registers:
    """A left operand [64, k] in registers.

    Refused if threads hold other parts of it than wgmma takes.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.item = item = ir.item_bytes(region.dtype)
        first, columns = ir.constant(region.origin[1]), region.extents[-1]
        whole = region.extents == (WARPGROUP_ROWS, columns) and columns * item % K_BYTES == 0
        if not whole or not region.has_layout(operand_layout(columns, region.dtype)):
            raise region.refuse(
                f"layout {region.buffer.layout} of {list(region.extents)} in registers",
                f"that of operand_layout: {WARPGROUP_ROWS} rows over a warpgroup",
                "declare the buffer with crossfuse.lower.hopper.wgmma.operand_layout",
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
        """Declare the registers, written before this place; returns those of each wgmma along k."""
        registers = self.region.buffer.local().view("uint32")
        hold(registers, self.region.extents[1] * self.item // K_BYTES * GROUP_REGISTERS)

        def operands(part: int) -> list[Any]:
            place = GROUP_REGISTERS * (self.first + part)
            return [registers[place + each] for each in range(GROUP_REGISTERS)]

        return operands


_INSTEAD = "multiply tiles of another form, or write wgmma by T.ptx"


@dataclass(frozen=True)
class _Call:
    """A call that wgmma can do."""

    sums: Region
    left: Descriptors | Registers
    right: Descriptors
    #: Whether the sums are added to rather than overwritten.
    accumulates: Any


def lower_gemm_async(call: Any, context: Any) -> Any:
    """The function that replaces one call of the primitive.

    ``gemm_async(C, A, B, transA, transB, accum)`` is ``C (+)= A B^T``, or ``A B`` if B is
    transposed. A refusal names the operand that wgmma cannot take, and what it can.
    """
    _check_threads(context)
    return _emit(_read(call))


def is_hopper(context: Any) -> tuple[bool, str]:
    """Whether a call is lowered for sm_90a, with the reason if it is not."""
    arch = str(context.target.attrs.get("arch", ""))
    return arch == "sm_90a", f"architecture {arch or 'unknown'}, expected sm_90a"


def _check_threads(context: Any) -> None:
    """Refuse a call unless all threads of one warpgroup execute it, as wgmma wants."""
    found = {
        str(axis): [ir.constant(each) for each in span] for axis, span in context.intra.items()
    }
    scope = str(context.scope_kind)
    if scope != "warpgroup" or found != {"laneid": [32, 0], "wid_in_wg": [4, 0]}:
        raise refuse(
            "gemm-async",
            "gemm_async",
            found=f"scope {scope} with threads {found}",
            limit="all threads of a warpgroup",
            instead="call it as Tx.wg.gemm_async, outside of conditions on lanes and warps",
        )


def _read(call: Any) -> _Call:
    if len(call.args) != 6:
        raise refuse(
            "gemm-async",
            "gemm_async",
            found="scale factors",
            limit="plain products: Hopper scales no blocks",
            instead="scale the sums",
        )
    regions = [read_region(*each) for each in zip("CAB", call.args[:3], strict=True)]
    sums, left, right = regions
    transposed = [bool(ir.constant(each)) for each in call.args[3:5]]
    _check_types(left, right)
    _check_sums(sums)
    if transposed[0]:
        raise left.refuse(
            "a left operand stored as [k, m]", "[m, k]: the reduction inside", _INSTEAD
        )
    if transposed[1] and ir.item_bytes(right.dtype) != 2:
        raise right.refuse(
            f"a {right.dtype} operand stored as [k, n]", "operands of 8 bits as [n, k]", _INSTEAD
        )
    for each, scopes in ((left, ("local", *SHARED_SCOPES)), (right, SHARED_SCOPES)):
        if each.scope not in scopes:
            raise each.refuse(f"scope {each.scope}", f"scope {' or '.join(scopes)}", _INSTEAD)
    first = Registers(left) if left.scope == "local" else Descriptors(left)
    made = _Call(sums, first, Descriptors(right, transposed=transposed[1]), call.args[5])
    _check_extents(made)
    return made


def _check_types(left: Region, right: Region) -> None:
    known = left.dtype in OPERAND_TYPES and right.dtype in OPERAND_TYPES
    same = known and ir.item_bytes(left.dtype) == ir.item_bytes(right.dtype)
    if not same or (left.dtype != right.dtype and ir.item_bytes(left.dtype) == 2):
        raise left.refuse(
            f"operands of {left.dtype} and {right.dtype}",
            f"one 16-bit type, or two of 8 bits, of {', '.join(OPERAND_TYPES)}",
            "convert the operands",
        )


def _check_sums(sums: Region) -> None:
    columns = sums.extents[-1]
    whole = (
        sums.extents == sums.shape == (WARPGROUP_ROWS, columns)
        and columns % 8 == 0
        and columns <= 256
    )
    if sums.scope != "local" or sums.dtype != "float32" or not whole:
        raise sums.refuse(
            f"{list(sums.shape)} of {list(sums.extents)} {sums.dtype} in scope {sums.scope}",
            f"all of [{WARPGROUP_ROWS}, n] float32 in scope local, n a multiple of 8 up to 256",
            "give each product sums of its own",
        )
    if not sums.has_layout(accumulator_layout(columns)):
        raise sums.refuse(
            f"layout {sums.buffer.layout}",
            "that of accumulator_layout",
            "declare the buffer with crossfuse.lower.hopper.wgmma.accumulator_layout",
        )


def _check_extents(call: _Call) -> None:
    """Refuse operands whose rows, columns and reduction do not fit together."""
    left, right = call.left.region, call.right.region
    rows, columns = left.shape[0], right.shape[1 if call.right.transposed else 0]
    depth = call.left.extent
    steps = depth * ir.item_bytes(left.dtype) % K_BYTES == 0
    if (rows, columns) != call.sums.shape or call.right.extent != depth or not steps:
        raise left.refuse(
            f"[{rows}, {depth}] by a right operand of {columns} columns and depth "
            f"{call.right.extent}",
            f"{WARPGROUP_ROWS} rows by {call.sums.shape[1]} columns, of one depth, a multiple of "
            f"{K_BYTES} bytes",
            "name regions that fit together",
        )


def _emit(call: _Call) -> Any:
    """Emit descriptors, the fence of all registers, then the products."""
    with ir.IRBuilder() as builder, ir.script.prim_func():
        ir.script.func_name("gemm_async")
        sums = call.sums.buffer.local()
        left, right = call.left.open(), call.right.open()
        count = call.sums.shape[1] // 2
        hold(sums, count)
        run(ir.script.ptx.wgmma.fence.sync.aligned())
        types = call.left.region.dtype, call.right.region.dtype
        for part in range(call.left.extent * ir.item_bytes(types[0]) // K_BYTES):
            keep = call.accumulates if part == 0 else 1
            operand = left(part)
            multiply(
                types,
                [sums[each] for each in range(count)],
                operand if isinstance(operand, list) else [operand],
                right(part),
                ir.script.Cast("uint32", keep),
                transposed=call.right.transposed,
            )
    return builder.get()


def waited_sums(sums: Any) -> Any:
    """The registers of sums in the order of PTX, once the author has waited for their products.

    Each thread has [columns / 2] of them. No read is moved before this place. `sums` has the layout
    of `accumulator_layout`.
    """
    registers = sums.local()
    hold(registers, int(sums.shape[1]) // 2)
    return registers
