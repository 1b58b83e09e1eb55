"""One wgmma instruction: its shape and types, matrix descriptors and layouts of operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import Variable, run
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES

#: Element types of operands, with the type's name in PTX and the k of its wgmma.
OPERAND_TYPES = {
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
    "float8_e4m3fn": ("e4m3", 32),
    "float8_e5m2": ("e5m2", 32),
}
#: Bytes of a K-major row that hold the k of one wgmma.
K_BYTES = 32
#: Codes of swizzles for `encode_matrix_descriptor`.
NO_SWIZZLE, SWIZZLE_128 = 0, 3
_SWIZZLES = {32: 1, 64: 2, 128: SWIZZLE_128}
#: Bytes of eight rows of a swizzled tile: one repeat of the pattern.
PATTERN = 8 * ROW_BYTES
#: Bytes of a row of a core matrix, which has no swizzle, and of its eight rows.
CORE_BYTES, CORE_MATRIX = 16, 128


def multiply(
    types: tuple[str, str],
    accumulators: list[Any],
    left: list[Any],
    right: Any,
    keep: Any,
    *,
    transposed: bool = False,
) -> None:
    """Emit one wgmma: 64 rows by two columns for each float32 register of `accumulators`.

    `types` of both operands are keys of `OPERAND_TYPES`. `left` is one descriptor or four 32-bit
    registers, `right` a descriptor; `transposed` says that the right operand is stored as [k, n].
    With `keep` 0, what the accumulators held is discarded.
    """
    (first, k), (second, _) = (OPERAND_TYPES[each] for each in types)
    shape = f"m64n{2 * len(accumulators)}k{k}"
    call = ir.script.ptx[f"wgmma.mma_async.sync.aligned.{shape}.f32.{first}.{second}"]
    # Only 16-bit types in shared memory may have operands that are not K-major.
    layouts = [] if k == 32 else [*([0] if len(left) == 1 else []), int(transposed)]
    run(call(*accumulators, *left, right, ir.script.ptx.pred(keep), 1, 1, *layouts))


def swizzled(name: str, address: Any, leading: int = 16, row_bytes: int = ROW_BYTES) -> Variable:
    """Descriptor of a tile with rows as long as its swizzle; the pattern repeats every 8 rows.

    The leading offset has no meaning for K-major tiles.
    """
    return described(name, address, leading, 8 * row_bytes, _SWIZZLES[row_bytes])


def described(name: str, address: Any, leading: int, stride: int, swizzle: int) -> Variable:
    """Descriptor of a tile at an address in shared memory, in a variable of its own.

    `leading` and `stride` are bytes between neighbouring patterns, as PTX defines them for this
    swizzle.
    """
    descriptor = Variable(name, "uint64")
    run(
        ir.script.cuda.wgmma.encode_matrix_descriptor(
            descriptor.address, address, leading // 16, stride // 16, swizzle
        )
    )
    return descriptor


def words(offset: Any) -> Any:
    """A byte offset in the descriptor's units of 16."""
    return ir.script.Cast("uint64", offset // 16)


# Layouts of tiles that wgmma takes, for kernels that are written in TIRx by hand.
#
# `gemm_async` recognises buffers with these layouts, see
# `crossfuse.lower.hopper.gemm_async`.

#: Rows of a fragment: those of one warpgroup.
ROWS = 64


def accumulator_layout(columns: int) -> Any:
    """Layout of a warpgroup's float32 sums of shape [64, columns] in scope ``local``.

    Register ``4 j + 2 h + q`` of lane ``4 g + t`` of warp w is element (16 w + 8 h + g, 8 j + 2 t +
    q); `columns` is a multiple of 8. PTX ISA, wgmma, register fragments for D.
    """
    axes = ir.layout_axes
    return ir.tile_layout(
        (4, 2, 8, columns // 8, 4, 2),
        (1 @ axes.wid_in_wg, 2, 4 @ axes.laneid, 4, 1 @ axes.laneid, 1),
    )


def operand_layout(columns: int, dtype: str) -> Any:
    """Layout of a warpgroup's left operand of shape [64, columns] in scope ``local``.

    Rows are a multiple of 32 bytes, of 16- or 8-bit elements; neighbours in a row share a register.
    PTX ISA, wgmma, register fragments for A.
    """
    each = 32 // int(ir.tvm.DataType(dtype).bits)  # elements of a register
    axes = ir.layout_axes
    return ir.tile_layout(
        (4, 2, 8, columns // (8 * each), 2, 4, each),
        (1 @ axes.wid_in_wg, each, 4 @ axes.laneid, 4 * each, 2 * each, 1 @ axes.laneid, 1),
    )


def shared_layout(dtype: str, shape: Sequence[int], *, swizzled: bool = True) -> Any:
    """Layout of tiles in shared memory: stages first, the last two dimensions are a tile's.

    `swizzled` are blocks of 128 bytes of all rows, as TMA stores them with the 128-byte swizzle;
    otherwise 16 bytes of all rows, then the next ones. Refused if rows or columns do not fill whole
    patterns.
    """
    *_, rows, columns = shape
    span = columns * int(ir.tvm.DataType(dtype).bits) // 8
    unit = ROW_BYTES if swizzled else CORE_BYTES
    if rows % 8 or span % unit:
        raise refuse(
            "gemm-async",
            f"a tile of {rows} x {columns} {dtype}",
            found=f"{rows} rows of {span} bytes",
            limit=f"a multiple of 8 rows, of a multiple of {unit} bytes",
            instead="take larger tiles" + (", or none of the swizzle" if swizzled else ""),
        )
    return ir.mma_shared_layout(dtype, SWIZZLE_128 if swizzled else NO_SWIZZLE, list(shape))


# Places that the compiler must not move registers across: wgmma uses them while it runs.


def hold(registers: Any, count: int) -> None:
    """Fence reads and writes of the first `count` registers of a buffer at this place."""
    _each("hold", "", registers, count, "+")


def forget(registers: Any, count: int) -> None:
    """Declare that the values of the registers are dead."""
    _each("forget", "", registers, count, "=")


def clear(registers: Any, count: int) -> None:
    """Zero the registers here: not before, as the compiler might with a constant."""
    _each("clear", "mov.b32 %0, 0;", registers, count, "=")


def _each(name: str, instruction: str, registers: Any, count: int, access: str) -> None:
    """Emit an instruction for each register; an empty one is only a fence."""
    is_float = str(registers.ty.dtype) == "float32"
    name = f"crossfuse_{name}_{count}" if is_float else f"crossfuse_{name}_words_{count}"
    # Words may be pairs of smaller elements, with a pointer of that type.
    register = "registers[i]" if is_float else "((unsigned*)registers)[i]"
    source = (
        f"__device__ __forceinline__ void {name}({'float' if is_float else 'void'}* registers) "
        f"{{\n#pragma unroll\n  for (int i = 0; i < {count}; ++i) "
        f'asm volatile("{instruction}" : "{access}{"f" if is_float else "r"}"({register}) '
        ':: "memory");\n}\n'
    )
    run(ir.cuda_func_call(name, registers.data, source_code=source))
