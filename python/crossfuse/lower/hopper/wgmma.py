"""Asynchronous products of tiles by a warpgroup (PTX ISA, wgmma)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.hardware import ROW_BYTES, WARPGROUP_ROWS
from crossfuse.lower.hopper.plan.tiles import CHUNK, GROUP, GROUP_REGISTERS, Operand, share_bytes
from crossfuse.lower.hopper.program.tile import Gather
from crossfuse.lower.hopper.statements import Variable, run
from crossfuse.lower.refusal import refuse

if TYPE_CHECKING:
    from crossfuse.lower.hopper.plan.kernel import RingPlan
    from crossfuse.lower.hopper.plan.phase import PhasePlan


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


@contextmanager
def batch() -> Iterator[None]:
    """Products that are committed together, behind what has been written to their registers."""
    run(ir.script.ptx.wgmma.fence.sync.aligned())
    yield
    run(ir.script.ptx.wgmma.commit_group.sync.aligned())


def await_batches(pending: int) -> None:
    """Wait until at most `pending` batches are still in flight."""
    run(ir.script.ptx.wgmma.wait_group.sync.aligned(pending))


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
    span = columns * ir.item_bytes(dtype)
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


def scale(registers: Any, count: int, above: Any, below: Any) -> None:
    """Multiply a thread's sums of one block of 64 rows by a factor for each of its two rows.

    Sums ``4 j + 2 h + q`` are of row h: `above` is the factor of the first row, `below` that of the
    row 8 further down.
    """
    name = f"crossfuse_scale_{count}"
    source = (
        f"__device__ __forceinline__ void {name}(float* sums, float above, float below) {{\n"
        f"#pragma unroll\n  for (int i = 0; i < {count}; ++i) "
        "sums[i] *= i / 2 % 2 ? below : above;\n}\n"
    )
    run(ir.cuda_func_call(name, registers.data, above, below, source_code=source))


# Left operands of wgmma: registers, or tiles in shared memory named by matrix descriptors.

#: What names the operand of one wgmma: a tile, the number of the wgmma in it, and the block of 64
#: rows.
Operands = Callable[[Any, int, int], list[Any]]


@dataclass(frozen=True)
class LeftOperand:
    """Where one warpgroup's left tiles are."""

    #: Emits what is needed once; returns a function to the operand of each wgmma.
    open: Callable[[], Operands]
    #: Registers that hold all of them, and their number; none of tiles in shared memory, which
    #: barriers guard.
    registers: Any = None
    count: int = 0


def _left_tiles(descriptor: Callable[[], Variable], pitch: int, step: int) -> LeftOperand:
    """Left tiles in shared memory, K-major: `pitch` bytes apart, and each wgmma's part `step`.

    `descriptor` emits that of the first tile.
    """

    def open_tiles() -> Operands:
        first = descriptor()

        def operands(tile: Any, part: int, block: int) -> list[Any]:
            start = part * step + block * (WARPGROUP_ROWS * ROW_BYTES)
            return [first.value + words(tile * pitch + start)]

        return operands

    return LeftOperand(open_tiles)


def left_registers(registers: Any, count: int, depth: int) -> LeftOperand:
    """Left tiles of `depth` columns in registers, in the order of the columns; see `KeptTile`."""

    def operands(tile: Any, part: int, block: int) -> list[Any]:
        first = (tile * (depth // GROUP) + part) * GROUP_REGISTERS
        return [registers[first + each] for each in range(GROUP_REGISTERS)]

    return LeftOperand(lambda: operands, registers, count)


def ring_tiles(
    ring: RingPlan, region: Callable[[Any], Any], warpgroup: Any, rows: int
) -> LeftOperand:
    """Tiles of a ring, one in each stage, with the rows that the warpgroup multiplies."""
    start = warpgroup * (rows * ROW_BYTES)
    return _left_tiles(lambda: swizzled("left_tile", region(start)), ring.pitch, K_BYTES)


def gathered_tiles(
    gather: Gather, depth: int, region: Callable[[Any], Any], warpgroup: Any
) -> LeftOperand:
    """Tiles of the intermediate that a cluster has gathered, one for each `depth` columns."""

    def descriptor() -> Variable:
        address = region(warpgroup * share_bytes(gather))
        return described("left_tile", address, CHUNK, CORE_MATRIX, NO_SWIZZLE)

    return _left_tiles(descriptor, depth // 8 * CHUNK, 2 * CHUNK)


class Multiplier:
    """One warpgroup's products: its blocks of 64 rows of the left tile by all of each right one.

    `ring` holds right tiles, and `region` maps a byte offset in it to an address. `accumulators`
    are registers of all phases, of which this one uses the first.
    """

    def __init__(
        self,
        plan: PhasePlan,
        left: LeftOperand,
        ring: RingPlan,
        region: Callable[[Any], Any],
        accumulators: Any,
    ) -> None:
        self.plan = plan
        self.left = left
        self.ring = ring
        self.accumulators = accumulators
        self._left = left.open()
        self._rights = []
        start = 0
        for operand in plan.rights:
            self._rights.append(_descriptor(region(start), operand))
            start += operand.size
        self._k = OPERAND_TYPES[plan.program.contraction.left.dtype][1]

    def start(self, left: Any, right: Any, first: Any) -> None:
        """Multiply a left tile by a stage; `first` discards what was accumulated before."""
        self.hold()
        count = len(self._rights)
        together = count if self.plan.is_one_product else 1
        with batch():
            for part in range(self.plan.program.contraction.depth // self._k):
                keep = ir.script.Cast("uint32", ir.script.Not(first)) if part == 0 else 1
                for block, number in product(range(self.plan.blocks), range(0, count, together)):
                    operand = self._left(left, part, block)
                    sums = self.plan.first_sum(block, number)
                    several = range(sums, sums + together * self.plan.accumulators)
                    self._multiply(several, operand, (number, right, part), keep)

    def _multiply(
        self, sums: Iterable[int], left: list[Any], place: tuple[int, Any, int], keep: Any
    ) -> None:
        """Issue one wgmma; `place` is the number of a right operand, the stage, and the part."""
        number, stage, part = place
        operand = self.plan.rights[number]
        # Along k: 16 rows, if it is stored as [k, n].
        step = K_BYTES if operand.k_major else 16 * operand.row_bytes
        multiply(
            (self.plan.program.contraction.left.dtype, operand.tile.dtype),
            [self.accumulators[each] for each in sums],
            left,
            self._rights[number].value + words(stage * self.ring.pitch + part * step),
            ir.script.Cast("uint32", keep),
            transposed=not operand.k_major,
        )

    def wait(self, pending: int) -> None:
        """Wait until at most `pending` stages are still in flight."""
        await_batches(pending)
        if pending == 0:
            self.hold()
            if self.left.count:
                hold(self.left.registers, self.left.count)

    def scale(self, above: Any, below: Any) -> None:
        """Multiply the sums of either row of a thread by a factor; none may be in flight."""
        scale(self.accumulators, self.plan.sums, above, below)
        self.hold()

    def hold(self) -> None:
        """Keep the compiler from moving the accumulators across this place."""
        hold(self.accumulators, self.plan.sums)

    def forget(self) -> None:
        """Declare that the values of the accumulators are dead."""
        forget(self.accumulators, self.plan.sums)

    def clear(self) -> None:
        """Set the accumulators to zero."""
        clear(self.accumulators, self.plan.sums)


def _descriptor(address: Any, operand: Operand) -> Variable:
    """Matrix descriptor of a right operand's first stage.

    Tiles stored as [k, n] repeat every 8 rows of k and, by the leading offset, with every box.
    """
    width = operand.row_bytes
    if operand.k_major:
        return swizzled("right_tile", address)
    return swizzled("right_tile", address, operand.tile.shape[0] * width, width)
