"""Registers of a stream: what they hold, and how many each warpgroup has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiles import arrays_of
from crossfuse.lower.hopper.stream.program import Kind, Step, StreamProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import WARPGROUP_ROWS
from crossfuse.planner.kernels.stream import (
    BOX_COLUMNS,
    MAX_COLUMNS,
    REGISTERS,
    SHARED_REGISTERS,
    adders_of,
    divide_columns,
    element_registers,
)

# Which registers of a thread hold which buffer of a stream.


@dataclass(frozen=True)
class RegisterPlan:
    """Which registers of a thread hold which buffer."""

    #: Buffers of elements of a tile, each with the number of its array; scores have the first.
    arrays: tuple[tuple[Any, int], ...]
    #: Buffers of values of rows.
    rows: tuple[Any, ...]
    #: Of these, sums of which each thread has its own part until the stream is over.
    deferred: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Number of arrays."""
        return 1 + max(number for _, number in self.arrays)

    def array(self, buffer: Any) -> int | None:
        """Number of the array that holds a buffer; None for another one."""
        return dict(self.arrays).get(buffer)


def plan_registers(program: StreamProgram) -> RegisterPlan:
    """Give each buffer its registers: elements take the place of those that they are made of."""
    steps = program.all_steps
    made = [each for each in steps if each.kind is Kind.TILE and each is not program.weights]
    tiles = list(dict.fromkeys((program.scores, *(each.target for each in made))))
    numbers = {each: number for number, each in enumerate(tiles)}

    def number(step: Step) -> int | None:
        return numbers[step.target] if any(step is each for each in made) else None

    def read(step: Step) -> frozenset[int]:
        return frozenset(n for n, each in enumerate(tiles) if ir.mentions(step.value, each))

    found = arrays_of([(number(each), read(each)) for each in steps])
    arrays = tuple((tiles[tile], array) for tile, array in found.items())
    written = (*program.before, *program.steps, *program.after)
    of_rows = (Kind.ROW, Kind.TOP, Kind.SUM)
    rows = tuple(dict.fromkeys(each.target for each in written if each.kind in of_rows))
    deferred = tuple(each for each in rows if _is_deferred(each, program))
    return RegisterPlan(arrays, rows, _independent(deferred, program))


def _is_deferred(buffer: Any, program: StreamProgram) -> bool:
    """Whether all that happens to a sum in the stream is that it grows, or is multiplied.

    Then threads of a row need not know each other's parts: a factor is the same for all of them.
    """
    begun = [each for each in program.before if each.target.same_as(buffer)]
    zero = len(begun) == 1 and float(getattr(begun[0].value, "value", 1)) == 0
    inside = [*program.all_steps, *program.carries]
    stores = [each for each in inside if each.target.same_as(buffer)]
    others = [each for each in inside if not each.target.same_as(buffer)]
    read = any(ir.mentions(each.value, buffer) for each in others)
    sums = [each for each in stores if each.kind is Kind.SUM]
    scaled = [each for each in stores if each.kind is not Kind.SUM]
    plain = all(each.start is None and not ir.mentions(each.value, buffer) for each in sums)
    return zero and bool(sums) and plain and not read and all(map(_is_scaled, scaled))


def _is_scaled(step: Step) -> bool:
    """Whether a step multiplies its target by something else."""
    value = step.value
    if step.kind is not Kind.ROW or not isinstance(value, ir.tirx.Mul):
        return False
    return any(
        isinstance(one, ir.TensorLoad)
        and ir.mentions(one, step.target)
        and not ir.mentions(other, step.target)
        for one, other in ((value.a, value.b), (value.b, value.a))
    )


def _independent(deferred: tuple[Any, ...], program: StreamProgram) -> tuple[Any, ...]:
    """Those deferred sums that are not made of another one."""
    return tuple(
        each
        for each in deferred
        if not any(
            ir.mentions(step.value, other)
            for step in program.steps
            if step.target.same_as(each)
            for other in deferred
            if other is not each
        )
    )


# Who multiplies: warpgroups that do all of their rows, or some that share the columns of 64 rows.
#
# A thread holds scores, weights and sums of its rows. Where that is too much, one warpgroup makes
# the weights of 64 rows, and others add to the sums, each to its own columns.

_REGISTERS_OF_SM = 1 << 16
#: Registers of an instruction beside its sums, as ptxas 13.0 counts them.
_BESIDE_SUMS = 26


def launched_registers(threads: int) -> int:
    """Registers of a thread as a CTA of so many threads starts."""
    return _REGISTERS_OF_SM // threads // 8 * 8


def instruction_sums(sums: int, threads: int) -> int:
    """Sums of a thread that one wgmma takes, of those that it has.

    ptxas asks that an instruction's registers are there as the kernel starts, whatever setmaxnreg
    brings: 154 for 256 columns ("Insufficient registers (128) to compile instruction"). Two of 128
    columns read the left operand twice.
    """
    return sums if sums + _BESIDE_SUMS <= launched_registers(threads) else sums // 2


def plan_adders(program: StreamProgram, registers: RegisterPlan) -> int:
    """Decide how many warpgroups share the columns of a tile's sums, beside one that scores.

    None of them (0) if each warpgroup has registers for all of its own 64 rows; refuses tiles for
    which neither has. The tiles must have been checked.
    """
    rows, keys = program.tile
    columns = program.output.columns
    split = program.split is not None
    found = adders_of(rows, keys, columns, registers.count, split=split)
    if found is None:
        raise _no_room(program, registers, rows, keys)
    return found


def _no_room(program: StreamProgram, registers: RegisterPlan, rows: int, keys: int) -> Exception:
    """Say why registers hold no such tile, which only few rows, columns or keys would help."""
    columns, elements = program.output.columns, element_registers(keys, registers.count)
    if rows > WARPGROUP_ROWS:
        limit = REGISTERS[rows // WARPGROUP_ROWS][-1]
        fits = columns <= MAX_COLUMNS and 12 + columns // 2 <= limit  # 16 keys
        return refuse(
            "stream-registers",
            f"scores '{program.scores.name}'",
            found=f"{elements + columns // 2} registers for {registers.count} arrays of {keys} "
            f"keys, their weights and {columns} columns of sums",
            limit=f"{limit} registers a thread with {rows // WARPGROUP_ROWS} multiplying "
            "warpgroups",
            instead="take fewer keys a tile"
            if fits
            else f"take {WARPGROUP_ROWS} rows a tile, whose columns several warpgroups share",
        )
    adders = -(-columns // MAX_COLUMNS)
    if not divide_columns(columns, adders):
        return refuse(
            "stream-columns",
            f"sums '{program.sums.name}'",
            found=f"{columns} columns",
            limit=f"at most {MAX_COLUMNS}, or a multiple of {2 * BOX_COLUMNS} up to "
            f"{max(SHARED_REGISTERS) * MAX_COLUMNS} that two warpgroups share: each begins with a "
            f"box of {BOX_COLUMNS}",
            instead="pad the columns with zeros, or leave the annotation out for the general "
            "lowering",
        )
    if program.split is not None:
        return refuse(
            "stream-columns",
            f"loop '{program.split.place.var.name}'",
            found=f"{program.split.place.extent} CTAs that share keys, whose {columns} columns of "
            f"sums {adders} warpgroups of a CTA hold apart from the rows",
            limit="sums, weights and rows of a tile in one warpgroup, which hands them over",
            instead="take one CTA a tile (CascadeTiles(cluster=1)), or fewer columns",
        )
    return refuse(
        "stream-registers",
        f"scores '{program.scores.name}'",
        found=f"{elements} registers for {registers.count} arrays of {keys} keys and their weights",
        limit=f"{SHARED_REGISTERS[adders][-1]} registers a thread of the warpgroup that makes them "
        f"beside {adders} that add",
        instead="take fewer keys a tile",
    )
