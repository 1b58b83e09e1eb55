"""Registers of a stream: what they hold, and how many each warpgroup has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.plan.operands import MAX_BOX
from crossfuse.lower.hopper.stream.common_subexpressions import reads
from crossfuse.lower.hopper.stream.program import Kind, Step, StreamProgram
from crossfuse.lower.refusal import refuse
from crossfuse.planner.kernels.boxes import ROW_BYTES, WARPGROUP_ROWS

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
        found = (number for each, number in self.arrays if each.same_as(buffer))
        return next(found, None)


def plan_registers(program: StreamProgram) -> RegisterPlan:
    """Give each buffer its registers: elements take the place of those that they are made of."""
    arrays: list[tuple[Any, int]] = [(program.scores, 0)]
    steps = program.all_steps
    for number, step in enumerate(steps):
        known = any(each.same_as(step.target) for each, _ in arrays)
        if step.kind is not Kind.TILE or step is program.weights or known:
            continue
        free = _free(step, steps[number + 1 :], arrays)
        arrays.append((step.target, free))
    written = [*program.before, *program.steps, *program.after]
    rows: list[Any] = []
    for step in written:
        of_rows = step.kind in (Kind.ROW, Kind.TOP, Kind.SUM)
        if of_rows and not any(each.same_as(step.target) for each in rows):
            rows.append(step.target)
    deferred = tuple(each for each in rows if _is_deferred(each, program))
    return RegisterPlan(tuple(arrays), tuple(rows), _independent(deferred, program))


def _free(step: Step, later: tuple[Step, ...], arrays: list[tuple[Any, int]]) -> int:
    """An array that no later step reads, or a new one."""
    count = 1 + max(number for _, number in arrays)
    for array in range(count):
        held = [each for each, number in arrays if number == array]
        if not any(reads(after.value, each) for after in later for each in held):
            return array
    return count


def _is_deferred(buffer: Any, program: StreamProgram) -> bool:
    """Whether all that happens to a sum in the stream is that it grows, or is multiplied.

    Then threads of a row need not know each other's parts: a factor is the same for all of them.
    """
    begun = [each for each in program.before if each.target.same_as(buffer)]
    zero = len(begun) == 1 and float(getattr(begun[0].value, "value", 1)) == 0
    inside = [*program.all_steps, *program.carries]
    stores = [each for each in inside if each.target.same_as(buffer)]
    others = [each for each in inside if not each.target.same_as(buffer)]
    read = any(reads(each.value, buffer) for each in others)
    sums = [each for each in stores if each.kind is Kind.SUM]
    scaled = [each for each in stores if each.kind is not Kind.SUM]
    plain = all(each.start is None and not reads(each.value, buffer) for each in sums)
    return zero and bool(sums) and plain and not read and all(map(_is_scaled, scaled))


def _is_scaled(step: Step) -> bool:
    """Whether a step multiplies its target by something else."""
    value = step.value
    if step.kind is not Kind.ROW or not isinstance(value, ir.tirx.Mul):
        return False
    return any(
        isinstance(one, ir.TensorLoad) and reads(one, step.target) and not reads(other, step.target)
        for one, other in ((value.a, value.b), (value.b, value.a))
    )


def _independent(deferred: tuple[Any, ...], program: StreamProgram) -> tuple[Any, ...]:
    """Those deferred sums that are not made of another one."""
    return tuple(
        each
        for each in deferred
        if not any(
            reads(step.value, other)
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

#: Registers a thread by the number of multiplying warpgroups: of the loading one, and of the
#: others; and how many of the latter scores, weights and sums may take beside addresses. Together
#: at most 64 Ki a CTA.
REGISTERS = {1: (0, 0, 176), 2: (24, 240, 184), 3: (32, 160, 132)}
#: The same by the number of warpgroups that share columns: of the loading one, of that of scores,
#: of those of sums; and how many of the second scores and weights may take.
SHARED_REGISTERS = {1: (24, 240, 240, 184), 2: (24, 120, 184, 80)}
#: Columns that a warpgroup can sum, and those that begin with a box of 16-bit values.
MAX_COLUMNS, _BOX = MAX_BOX, ROW_BYTES // 2
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
    elements = registers.count * keys // 2 + keys // 4
    limit = REGISTERS[rows // WARPGROUP_ROWS][-1]
    if columns <= MAX_COLUMNS and elements + columns // 2 <= limit:
        return 0
    if rows > WARPGROUP_ROWS:
        fits = columns <= MAX_COLUMNS and 12 + columns // 2 <= limit  # 16 keys
        raise refuse(
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
    _check_columns(program, adders)
    _check_elements(program, registers, elements, adders)
    return adders


def _check_columns(program: StreamProgram, adders: int) -> None:
    columns = program.output.columns
    if adders > max(SHARED_REGISTERS) or (adders > 1 and columns % (adders * _BOX)):
        raise refuse(
            "stream-columns",
            f"sums '{program.sums.name}'",
            found=f"{columns} columns",
            limit=f"at most {MAX_COLUMNS}, or a multiple of {2 * _BOX} up to "
            f"{max(SHARED_REGISTERS) * MAX_COLUMNS} that two warpgroups share: each begins with a "
            f"box of {_BOX}",
            instead="pad the columns with zeros, or leave the annotation out for the general "
            "lowering",
        )
    if program.split is not None:
        raise refuse(
            "stream-columns",
            f"loop '{program.split.place.var.name}'",
            found=f"{program.split.place.extent} CTAs that share keys, whose {columns} columns of "
            f"sums {adders} warpgroups of a CTA hold apart from the rows",
            limit="sums, weights and rows of a tile in one warpgroup, which hands them over",
            instead="take one CTA a tile (CascadeTiles(cluster=1)), or fewer columns",
        )


def _check_elements(
    program: StreamProgram, registers: RegisterPlan, found: int, adders: int
) -> None:
    limit = SHARED_REGISTERS[adders][-1]
    if found > limit:
        raise refuse(
            "stream-registers",
            f"scores '{program.scores.name}'",
            found=f"{found} registers for {registers.count} arrays of {program.tile[1]} keys and "
            "their weights",
            limit=f"{limit} registers a thread of the warpgroup that makes them beside {adders} "
            "that add",
            instead="take fewer keys a tile",
        )
