"""Decides all that the kernel of a stream needs to know, and the order of its tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiles import arrays_of
from crossfuse.hardware import WARPGROUP, WARPGROUP_ROWS, Device
from crossfuse.lower.hopper.plan.tiles import MAX_BOX
from crossfuse.lower.hopper.program.tile import Place, identifier
from crossfuse.lower.hopper.stream.plan.memory import (
    HandoffLayout,
    Mailbox,
    Operand,
    divide_memory,
    plan_handoff,
    plan_mailbox,
    plan_operands,
)
from crossfuse.lower.hopper.stream.program import Kind, Step, StreamProgram
from crossfuse.lower.hopper.stream.seen_keys import seen_keys, share_elements
from crossfuse.lower.image import BufferSpec, TensorMap
from crossfuse.lower.refusal import Rule, refuse
from crossfuse.planner.kernels.memory import (
    BOX_COLUMNS,
    MAX_COLUMNS,
    REGISTERS,
    SHARED_REGISTERS,
    Arena,
    adders_of,
    divide_columns,
    element_registers,
)

_stream_tile_refused = Rule("stream-tile")

# Which tiles of rows a CTA goes through, in which order.


@dataclass(frozen=True)
class TileOrder:
    """Turns of all CTAs: CTA c takes turns ``c, c + CTAs, ...``, tile after tile of a head."""

    #: Places that tell heads apart, outermost first.
    outer: tuple[Place, ...]
    #: The place that counts tiles of rows; None if a head has one.
    inner: Place | None
    #: Whether streams of later tiles are longer, as under a causal mask.
    uneven: bool
    #: Whether a turn is two tiles, the longest left and the shortest left: all turns are as long.
    paired: bool
    #: CTAs that run, or clusters that share keys.
    ctas: int

    @property
    def tiles(self) -> int:
        """Tiles of a head."""
        return 1 if self.inner is None else self.inner.extent

    @property
    def turns_of_head(self) -> int:
        """Turns that a head takes."""
        return -(-self.tiles // 2) if self.paired else self.tiles

    @property
    def turns(self) -> int:
        """All turns."""
        return self.turns_of_head * prod(each.extent for each in self.outer)


def order_tiles(program: StreamProgram, device: Device) -> TileOrder:
    """Divide the tiles among as many CTAs as run at once: one wave of persistent CTAs."""
    down = program.queries.origin[program.queries.axis]
    rows = set(ir.variables(down))
    on_grid = [each for each in program.places if not each.in_cluster]
    inner = [each for each in on_grid if each.var in rows and each.extent > 1]
    place = inner[-1] if inner else None
    outer = tuple(each for each in on_grid if each is not place)
    bounds = {
        each
        for bound in (program.stream.first, program.stream.count)
        for each in ir.variables(bound)
    }
    uneven = place is not None and place.var in bounds
    beside = program.beside
    most = device.resident_clusters(1 if beside is None else beside.extent)
    heads = prod(each.extent for each in outer)
    pairs = heads * -(-(place.extent if place else 1) // 2)
    paired = uneven and pairs >= most and program.split is None
    order = TileOrder(outer, place, uneven, paired, most)
    if program.split is not None:
        most = order.turns  # what CTAs receive has room for one tile of rows
    return TileOrder(outer, place, uneven, order.paired, min(most, order.turns))


# The plan of a kernel: all decisions, made before any of it is written.


class StreamKernel:
    """What plans of a stream's kernels have as plans of products do."""

    program: StreamProgram
    #: States in global memory, which one kernel stores and another one merges.
    states: BufferSpec | None
    early: ClassVar[bool] = False
    fast: ClassVar = False
    helps: ClassVar = False
    is_persistent: ClassVar = False
    row_count: ClassVar = None
    state: ClassVar[tuple[BufferSpec, ...]] = ()

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Buffers of the function that the kernel takes."""
        return self.program.parameters

    @property
    def workspaces(self) -> tuple[BufferSpec, ...]:
        """Buffers in global memory for one launch of the function."""
        return () if self.states is None else (self.states,)


@dataclass(frozen=True)
class StreamPlan(StreamKernel):
    """The decisions of a kernel."""

    program: StreamProgram
    #: What TMA copies.
    queries: Operand
    keys: Operand
    values: Operand
    output: Operand
    #: Which registers hold what.
    registers: RegisterPlan
    order: TileOrder
    #: Tiles of queries in shared memory.
    slots: int
    #: Stages of keys, and of values.
    stages: int
    #: Shared memory: ``queries``, ``keys``, ``values``, ``boxes`` of results or the ``inbox`` of
    #: what a cluster's CTAs hand over, ``barriers``, ``scratch``. Where warpgroups share columns
    #: ``passed``, and boxes lie where the queries were.
    arena: Arena
    #: Layout of the mailbox, where CTAs share keys; also in global memory, for a second kernel.
    mailbox: Mailbox | None = None
    #: Warpgroups that share the columns of a tile's sums, beside one that makes scores and weights;
    #: 0 if each warpgroup does all for its own rows.
    adders: int = 0
    #: What passes between these warpgroups.
    handoff: HandoffLayout | None = None
    #: What a second kernel merges: the states of all tiles of rows; None without one.
    states: BufferSpec | None = None

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.mailbox.size if self.mailbox is not None and self.receives else self.sharers

    @property
    def receives(self) -> bool:
        """Whether CTAs of a cluster hand their states to one another."""
        return self.mailbox is not None and not self.mailbox.in_memory

    @property
    def sharers(self) -> int:
        """CTAs that go through the same tiles: each loads a part of them for all."""
        return 1 if self.program.beside is None else self.program.beside.extent

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return self.adders + 1 if self.adders else self.program.tile[0] // WARPGROUP_ROWS

    @property
    def rings(self) -> tuple[tuple[str, int], ...]:
        """What is loaded, each with its stages, in the order of its barriers."""
        values = () if self.program.shares_tile else (("values", self.stages),)
        return (("queries", self.slots), ("keys", self.stages), *values)

    @property
    def readers(self) -> tuple[int, int, int]:
        """Warpgroups that hand back a stage of queries, of keys, and of values."""
        of_all = self.sharers
        if not self.adders:
            return self.consumers, self.consumers * of_all, self.consumers * of_all
        # Results leave from where the queries were, and who adds knows that scores are made.
        scoring = self.adders if self.program.shares_tile else 1
        return self.adders, scoring * of_all, self.adders * of_all

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def clusters(self) -> int:
        """Clusters that are launched, most often of one CTA."""
        return self.order.ctas

    @property
    def scores(self) -> int:
        """Float32 registers of a thread for a tile of scores."""
        return self.program.tile[1] // 2

    @property
    def sums(self) -> int:
        """Float32 registers of a thread for the second product."""
        return self.columns // 2

    @property
    def columns(self) -> int:
        """Columns of the second product that a warpgroup sums."""
        return self.program.output.columns // max(1, self.adders)

    @property
    def words(self) -> int:
        """Registers of a thread that hold the second product's left operand."""
        return self.scores // 2

    @property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Descriptors that the kernel takes."""
        copied = [self.queries, self.keys]
        if not self.program.shares_tile:
            copied.append(self.values)
        if self.mailbox is None:
            copied.append(self.output)
        return tuple(each.map for each in copied)


def plan_stream(program: StreamProgram, device: Device) -> StreamPlan:
    """Plan the kernel of a stream for a device.

    Refuses tiles that tensor cores, TMA, registers or shared memory cannot take.
    """
    program = replace(share_elements(program), seen=seen_keys(program))
    _check_tile(program)
    operands = plan_operands(program)
    registers = plan_registers(program)
    adders = plan_adders(program, registers)
    mailbox = plan_mailbox(program)
    handoff = plan_handoff(program, registers) if adders else None
    slots, stages, arena = divide_memory(program, operands, mailbox or handoff, device)
    order = order_tiles(program, device)
    queries, keys, values, output = operands
    return StreamPlan(
        *(program, queries, keys, values, output, registers),
        order=order,
        slots=slots,
        stages=stages,
        arena=arena,
        mailbox=mailbox,
        adders=adders,
        handoff=handoff,
        states=_plan_states(program, mailbox),
    )


def _plan_states(program: StreamProgram, mailbox: Mailbox | None) -> BufferSpec | None:
    if mailbox is None or not mailbox.in_memory:
        return None
    taken = {identifier(each) for each in program.parameters}
    name = "partial_states"
    while name in taken:
        name += "_"
    tiles = prod(each.extent for each in program.tile_places)
    return BufferSpec(name, (tiles, mailbox.bytes // 4), "float32", True)


def _check_tile(program: StreamProgram) -> None:
    rows, keys = program.tile
    if rows % WARPGROUP_ROWS or rows // WARPGROUP_ROWS not in REGISTERS or keys % 16:
        raise _stream_tile_refused(
            f"scores '{program.scores.name}'",
            found=f"a tile of {rows} rows and {keys} keys",
            limit=f"64, 128 or 192 rows, and keys in multiples of 16 up to {MAX_BOX}",
            instead="split rows and keys by other factors",
        )
    if program.output.rows < rows > WARPGROUP_ROWS:
        raise _stream_tile_refused(
            f"scores '{program.scores.name}'",
            found=f"{program.output.rows} of {rows} rows of a tile that are stored",
            limit=f"all rows, or a tile of {WARPGROUP_ROWS}",
            instead=f"take {WARPGROUP_ROWS} rows a tile",
        )
    depths = program.queries.columns, program.keys.columns
    widths = program.values.columns, program.output.columns
    # Of a tile that is keys and values, values are the first columns.
    beyond = widths[1] > widths[0] if program.shares_tile else widths[0] != widths[1]
    most = max(SHARED_REGISTERS) * MAX_COLUMNS
    if depths[0] != depths[1] or beyond or keys > MAX_BOX or widths[1] > most:
        raise _stream_tile_refused(
            f"scores '{program.scores.name}'",
            found=f"queries of {depths[0]}, keys of {depths[1]}, values of {widths[0]} and "
            f"results of {widths[1]} columns, in tiles of {keys} keys",
            limit=f"as many columns of both operands, at most {MAX_BOX} keys and {most} columns of "
            "values",
            instead="take fewer keys a tile, or split the columns of the values",
        )


# Registers of a stream: what they hold, and how many each warpgroup has.

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
