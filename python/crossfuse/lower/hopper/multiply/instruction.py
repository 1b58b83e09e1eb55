"""One wgmma: its text, and the matrix descriptors that tell where operands lie (PTX ISA, wgmma)."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import Variable, run
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
#: Bytes of eight rows of 16 bytes each, without a swizzle.
CORE_MATRIX = 128


def multiply(
    types: tuple[str, str],
    accumulators: list[Any],
    left: list[Any],
    right: Any,
    keep: Any,
    *,
    transposed: bool = False,
) -> None:
    """Write one wgmma: 64 rows by two columns for each accumulator.

    Parameters
    ----------
    types : tuple[str, str]
        Element types of both operands, keys of `OPERAND_TYPES`.
    accumulators : list
        Float32 registers.
    left : list
        One descriptor, or four 32-bit registers.
    right : Any
        A descriptor.
    keep : Any
        0 if what the accumulators held does not count.
    transposed : bool
        Whether the right operand is stored as [k, n].
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
    """Descriptor of a tile, in a variable of its own.

    Parameters
    ----------
    name : str
        Of the variable.
    address : Any
        Of the tile in shared memory.
    leading, stride : int
        Bytes between neighbours, as PTX has them for this swizzle.
    swizzle : int
        `NO_SWIZZLE`, `SWIZZLE_128` or one of the narrower ones.
    """
    descriptor = Variable(name, "uint64")
    run(
        ir.script.cuda.wgmma.encode_matrix_descriptor(
            descriptor.address, address, leading // 16, stride // 16, swizzle
        )
    )
    return descriptor


def words(offset: Any) -> Any:
    """An offset in bytes in a descriptor's units of 16."""
    return ir.script.Cast("uint64", offset // 16)
