"""Operands of an epilogue besides the sums: numbers, rows and matrices in global memory.

They are read by instructions that stay where they are written. As loads of C++ they could become
loads of constants, which the compiler moves in front of waits, and which the preceding kernel may
still be writing when this one has started early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Store
from crossfuse.lower.hopper.program.tile_program import SumProgram, TileProgram
from crossfuse.lower.hopper.statements import Warmup, registers, run, when

#: Statements that make float32 of an element's bits, by element type.
_FLOAT = {
    "bfloat16": "return __uint_as_float((bits >> {shift}) << 16);",
    "float16": "return __half2float(__ushort_as_half((unsigned short)(bits >> {shift})));",
    "float8_e4m3fn": "__nv_fp8_e4m3 x; x.__x = (unsigned char)(bits >> {shift}); return (float)x;",
    "float8_e5m2": "__nv_fp8_e5m2 x; x.__x = (unsigned char)(bits >> {shift}); return (float)x;",
}
#: Types that epilogues read, with their bits.
READ_TYPES = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
#: By bits of an element: instruction and register of one, and of two neighbours.
_LOADS = {
    32: (("ld.global.f32", "float32", 1), ("ld.global.v2.f32", "float32", 2)),
    16: (("ld.global.b16", "uint16", 1), ("ld.global.b32", "uint32", 1)),
    8: (("ld.global.b8", "uint8", 1), ("ld.global.b16", "uint16", 1)),
}


@dataclass(frozen=True)
class Further:
    """A further operand, as the epilogue's expression reads it."""

    #: The first of the equal loads in the expression.
    load: Any
    #: Whether the place that is read depends on the element's row.
    by_row: bool
    #: Whether the place that is read depends on the element's column.
    by_column: bool
    #: Whether neighbours in a row of the output are neighbours here.
    beside: bool
    #: Whether one aligned load reads what two neighbours in a row need.
    paired: bool

    @property
    def dtype(self) -> str:
        """Element type."""
        return str(self.load.source.ty.dtype)

    @property
    def form(self) -> tuple[str, str, int]:
        """The instruction that reads it, with the type and number of registers that it fills."""
        return _LOADS[READ_TYPES[self.dtype]][self.paired]

    @property
    def loads(self) -> int:
        """Number of loads for two neighbours in a row; a second one is for the second neighbour."""
        return 2 if self.by_column and not self.paired else 1

    @property
    def registers(self) -> int:
        """Number of registers for two neighbours in a row."""
        return self.loads * self.form[2]

    def address(self, store: Store, i: Any, j: Any) -> Any:
        """Address of what the element at row `i` and column `j` needs."""
        place = {store.row: i, store.column: j}
        return self.load.source.ptr_to([ir.substitute(each, place) for each in self.load.indices])

    def is_read_by(self, load: Any) -> bool:
        """Whether a load in the expression reads this operand."""
        same = load.source.same_as(self.load.source)
        return bool(same) and ir.alike(list(load.indices), list(self.load.indices))


def further_of(program: TileProgram | SumProgram) -> tuple[Further, ...]:
    """The further operands of a program's epilogue, each once."""
    found: list[Further] = []
    for load in ir.nodes(program.store.value, ir.TensorLoad):
        known = any(each.is_read_by(load) for each in found)
        if not known and not ir.among(load.source, program.results):
            found.append(_further(load, program.store))
    return tuple(found)


def _further(load: Any, store: Store) -> Further:
    by_row, by_column = (
        any(ir.occurs(var, index) for index in load.indices) for var in (store.row, store.column)
    )
    beside, even = _neighbours(load, store.column) if by_column else (False, False)
    return Further(load, by_row, by_column, beside, beside and even)


def _neighbours(load: Any, column: Any) -> tuple[bool, bool]:
    """Whether columns 2 h and 2 h + 1 are neighbours in memory, and the first at an even place."""
    known = ir.sym.Analyzer()
    half = ir.Var("half", str(column.ty))

    def placed(index: Any, offset: int) -> Any:
        return ir.substitute(index, {column: half * 2 + offset})

    *others, last = load.indices
    even = known.can_prove_equal(ir.tirx.floormod(placed(last, 0), 2), 0)
    beside = known.can_prove_equal(placed(last, 1) - placed(last, 0), 1)
    fixed = all(known.can_prove_equal(placed(each, 0), placed(each, 1)) for each in others)
    return beside and fixed, even and int(load.source.ty.shape[-1]) % 2 == 0


class Pair:
    """Registers for what two neighbours in a row read of one further operand."""

    def __init__(self, further: Further) -> None:
        self.further = further
        self.instruction, self.dtype, self.width = further.form
        self.registers = registers("further", further.registers, self.dtype)

    def clear(self, load: int) -> None:
        """Zero the registers of a load, for threads that read nothing."""
        for number in range(self.width):
            zero = ir.tirx.const(0, self.dtype)
            ir.script.buffer_store(self.registers, zero, [load * self.width + number])

    def load(self, load: int, address: Any) -> None:
        """Emit load number `load` of the pair."""
        targets = [self.registers[load * self.width + number] for number in range(self.width)]
        run(ir.script.ptx[self.instruction](*targets, address))

    @property
    def values(self) -> tuple[Any, Any]:
        """The values for both neighbours, in float32."""
        further = self.further
        low = self._float(0, 0)
        if not further.by_column:
            return low, low
        if not further.paired or further.dtype == "float32":
            return low, self._float(1, 0)
        return low, self._float(0, READ_TYPES[further.dtype])

    def _float(self, number: int, shift: int) -> Any:
        value, dtype = self.registers[number], self.further.dtype
        if dtype == "float32":
            return value
        name = f"crossfuse_{dtype}_at_{shift}"
        body = _FLOAT[dtype].format(shift=shift)
        return ir.cuda_func_call(
            name,
            value.astype("uint32"),
            source_code=f"__device__ __forceinline__ float {name}(unsigned bits) {{ {body} }}\n",
            return_type="float32",
        )


@dataclass(frozen=True)
class Read:
    """A pending load of one further operand for two neighbours in a row."""

    pair: Pair
    #: From 0 or 1, for either neighbour, to the place to read.
    address: Callable[[int], Any]
    #: From 0 or 1 to the conditions that the row and the column are the output's; None for one that
    #: always holds. Nothing is read beyond the output's own extents.
    inside: Callable[[int], Sequence[Any]]

    def conditions(self, load: int) -> list[Any]:
        """Guards of a load: the conditions on the indices that the operand depends on."""
        further = self.pair.further
        tails = zip(self.inside(load), (further.by_row, further.by_column), strict=True)
        return [term for term, depends in tails if depends and term is not None]


def read_all(reads: Sequence[Read], warmup: Warmup) -> None:
    """Emit several reads, one load after another.

    The warm-up reads nothing: the preceding kernel may still be writing the operand, and what is
    read once stays in the SM's cache.
    """
    loads = [(each, load) for each in reads for load in range(each.pair.further.loads)]
    for each, load in loads:
        if warmup.conditions() or each.conditions(load):
            each.pair.clear(load)
    # Addresses are named outside: others count from them.
    places = [each.address(load) for each, load in loads]
    with warmup.skipped():
        for (each, load), place in zip(loads, places, strict=True):
            terms = each.conditions(load)
            with when(ir.conjunction(terms)) if terms else nullcontext():
                each.pair.load(load, place)
