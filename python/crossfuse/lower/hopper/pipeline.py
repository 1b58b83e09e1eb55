"""A ring of stages in shared memory, filled by TMA and emptied by warpgroups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP
from crossfuse.lower.hopper import mbarrier
from crossfuse.lower.hopper.plan.memory import Arena
from crossfuse.lower.hopper.plan.operands import Operand
from crossfuse.lower.hopper.program.tile import Place, Tile, WindowTile
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.statements import Coordinates, Variable, at, let, run, strides, when
from crossfuse.lower.image import TensorMap


@dataclass(frozen=True)
class Ring:
    """Full and empty barriers of the stages."""

    stages: int
    #: Buffer of 64-bit mbarriers: one for each full stage, then one for each empty stage.
    barriers: Any

    def initialise(self, consumers: int, thread: Any) -> None:
        """Initialise all barriers, a stage each thread; `consumers` arrivals make a stage empty.

        Instructions that run once have to be fetched from L2: one after another, they would keep
        the cluster waiting for a microsecond.
        """
        with when(thread < self.stages):
            mbarrier.initialise(self.full(thread), 1)
            mbarrier.initialise(self.empty(thread), consumers)

    def full(self, stage: Any) -> Any:
        """Address of the barrier that completes when a stage has been filled."""
        return self.barriers.ptr_to([stage])

    def empty(self, stage: Any) -> Any:
        """Address of the barrier that completes when all consumers have read a stage."""
        return self.barriers.ptr_to([self.stages + stage])


def ring_barriers(arena: Arena, memory: Any, name: str, stages: int, offset: int) -> Ring:
    """The barriers of a ring, at an offset among those of the kernel."""
    buffer = ir.script.decl_buffer(
        (2 * stages,),
        "uint64",
        data=memory.data,
        scope="shared.dyn",
        byte_offset=arena["barriers"].offset + offset,
    )
    ir.IRBuilder.name(name, buffer)
    return Ring(stages, buffer)


class Cursor:
    """One role's position in a ring: it carries stage and parity, so that no one else counts."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._stage = Variable("stage", "int32", 0)
        self._parity = Variable("parity", "int32", 0)

    @property
    def stage(self) -> Any:
        """The current stage."""
        return self._stage.value

    def before(self, number: int) -> Any:
        """The stage `number` before the current one, at most the length of the ring."""
        stages = self.ring.stages
        wraps = self.stage == 0 if number == 1 else self.stage < number
        wrapped = stages - 1 if number == 1 else self.stage + (stages - number)
        return ir.script.Select(wraps, wrapped, self.stage - number)

    def wait_full(self) -> None:
        """Wait until the stage has been filled."""
        mbarrier.wait(self.ring.full(self.stage), self._parity.value)

    def wait_empty(self) -> None:
        """Wait until the stage may be overwritten. On the first round it is empty at once."""
        mbarrier.wait(self.ring.empty(self.stage), self._parity.value ^ 1)

    def advance(self) -> None:
        """Go on to the next stage."""
        self._stage.set(self.stage + 1)
        with when(self.stage == self.ring.stages):
            self._stage.set(0)
            self._parity.set(self._parity.value ^ 1)


class Throttle:
    """Limits how many stages a loader has in flight, not yet arrived.

    Loads are served in order: all that the CTA loads or stores later waits behind them, while the
    memory needs to know of little more than what it delivers in its latency. At most `most` stages
    are in flight, or fewer at first: ``begin = (few, end)`` allows `few` until `end` are issued.
    The stages after number `first` are issued once the barrier at `gate` completes, if there is
    one.
    """

    def __init__(
        self,
        ring: Ring,
        most: int,
        first: int = 0,
        gate: Any = None,
        begin: tuple[int, int] = (0, 0),
    ) -> None:
        self.ring = ring
        self.first = first
        #: Whether somebody waits for the first stages.
        self.begins_with_few = begin[1] > 0
        self.gate = gate if first < most else None
        # Stages are waited for, one more each time: between two numbers of those asked for, and
        # from a third on.
        few, end = begin
        self._waits: list[tuple[int, int | None]] = [(few, end)] if end else []
        if most < ring.stages:
            self._waits.append((end - few + most, None))
        if self._waits:
            self._arrived = Cursor(ring)
        self._counts = bool(self._waits) or self.gate is not None
        if self._counts:
            self._asked = Variable("asked_for", "int32", 0)

    def __call__(self) -> None:
        """Wait until one more stage may be issued."""
        if self.gate is not None:
            with when(self._asked.value == self.first):
                mbarrier.wait(self.gate, 0)
        for start, end in self._waits:
            begun = self._asked.value >= start
            within = begun if end is None else ir.script.And(begun, self._asked.value < end)
            with when(within):
                self._arrived.wait_full()
                self._arrived.advance()
        if self._counts:
            self._asked.set(self._asked.value + 1)


class Release:
    """Hands stages of a warpgroup back to all CTAs that fill them.

    `fillers` are the CTAs that fill a stage of this one in this phase or a later one: their number,
    and the rank of number `thread` of them. Each arrival counts `weight`, so that the barrier
    expects the same number in every phase: that of all CTAs that share a stage in the phase where
    most do.
    """

    def __init__(self, ring: Ring, thread: Any, fillers: tuple[int, Any], weight: int) -> None:
        self.ring = ring
        self.thread = thread
        self.fillers, rank = fillers
        self.weight = weight
        if self.fillers > 1:
            self.remote = Variable("empty_in_cluster", "uint32")
            mbarrier.cluster_address(self.remote.value, ring.empty(0), let("release_rank", rank))

    def __call__(self, stage: Any) -> None:
        """Signal that this warpgroup has read a stage."""
        with when(self.thread < self.fillers):
            if self.fillers == 1:
                mbarrier.arrive(self.ring.empty(stage), self.weight)
                return
            offset = ir.script.Cast("uint32", stage * 8)
            mbarrier.arrive_remote(self.remote.value + offset, self.weight)


# Copies of tiles to shared memory by TMA (PTX ISA, cp.async.bulk.tensor).

# Descriptors are parameters: a generic address, which the instruction takes.
_FETCH_DESCRIPTOR = """\
__device__ __forceinline__ void crossfuse_fetch_descriptor(unsigned long long map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
"""


def prepare(
    where: Coordinates,
    initialise: Callable[[], None],
    descriptors: tuple[TensorMap, ...],
    maps: dict[str, Any],
) -> None:
    """Initialise all barriers by one warp of those that load, and fetch descriptors by another.

    Each by a lane of its own: the first copy would wait for its descriptor.
    """
    with when(ir.script.And(where.warpgroup == 0, where.thread < WARP)):
        initialise()
        mbarrier.publish_initialised()
    with when(ir.script.And(where.warpgroup == 0, where.thread >= 3 * WARP)):
        for number, each in enumerate(descriptors):
            with when(where.lane == number):
                address = ir.script.address_of(maps[each.name])
                run(
                    ir.cuda_func_call(
                        "crossfuse_fetch_descriptor", address, source_code=_FETCH_DESCRIPTOR
                    )
                )


def load_name(rank: int) -> str:
    """Instruction that loads a box to shared memory, by a tensor map of `rank` dimensions."""
    return f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"


def store_name(rank: int) -> str:
    """Instruction that stores a box from shared memory, by a tensor map of `rank` dimensions."""
    return f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"


#: Cache policy of lines that nobody loads again: what `createpolicy.fractional.L2::evict_first`
#: makes, as CUTLASS spells it (include/cute/arch/copy_sm90_desc.hpp, TMA::CacheHintSm90).
EVICT_FIRST = 0x12F0000000000000
_PIXELS = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"


def load_tile(
    program: TileProgram,
    operand: Operand,
    descriptor: Any,
    where: Coordinates,
    values: Mapping[Any, Any],
    stage: Any,
    barrier: Any,
) -> None:
    """Load this CTA's part of an operand's tile, multicast to all CTAs that share it.

    `descriptor` is the tensor map parameter, `values` are those of all variables of the tile's
    origin, `stage` gives addresses in shared memory of the stage's tile. The bytes complete
    `barrier` in each receiving CTA.
    """
    row, column = (at(each, values) for each in operand.tile.origin)
    part = _part(operand, where)
    size = operand.size // operand.sharers
    rows = operand.map.box[1]
    for copy in range(operand.copies):
        offset = part * size + copy * operand.box_bytes
        if operand.k_major:
            coordinates = (column, row + part * (operand.copies * rows) + copy * rows)
        else:
            box = part * operand.copies + copy
            coordinates = (column + box * operand.map.box[0], row)
        _copy(program, operand, descriptor, where, coordinates, stage(offset), barrier)


def _copy(
    program: TileProgram,
    operand: Operand,
    descriptor: Any,
    where: Coordinates,
    coordinates: tuple[Any, Any],
    destination: Any,
    barrier: Any,
) -> None:
    address = ir.script.address_of(descriptor)
    name, more = load_name(2), []
    place: tuple[Any, ...] = coordinates
    if operand.map.pixels is not None:
        name = _PIXELS
        place, offsets = _pixels(operand.tile, coordinates, tail=program.has_tail(0))
        more += offsets
    if operand.sharers > 1:
        name += ".multicast::cluster"
        more.append(_mask(program, operand, where))
    if operand.streamed:
        name += ".L2::cache_hint"
        more.append(ir.script.uint64(EVICT_FIRST))
    run(ir.script.ptx[name](destination, address, *place, barrier, *more))


def _pixels(
    tile: Tile, coordinates: tuple[Any, Any], *, tail: bool
) -> tuple[tuple[Any, ...], list[Any]]:
    """The first pixel of a walk, channel first, and its offset: across, then down.

    With a `tail`, rows may lie behind the last pixel. PTX says of no walk that it may begin there,
    so it begins with the last pixel: nobody reads these rows.
    """
    assert isinstance(tile, WindowTile)
    column, row = coordinates
    if tail:
        row = ir.script.min(row, tile.extents[0] - 1)
    image, y, x = tile.corner(row)
    down, across, channel = tile.within(column)
    offsets = [ir.script.Cast("uint16", each) for each in (across, down)]
    return (channel, x, y, image), offsets


def _part(operand: Operand, where: Coordinates) -> Any:
    """Index of the part of the tile that this CTA loads: its place among the sharers."""
    part: Any = 0
    for place in operand.shared_by:
        part = part * place.extent + where.places[place.var]
    return part


def sharing_rank(
    program: TileProgram, shared_by: tuple[Place, ...], where: Coordinates, number: Any
) -> Any:
    """Rank of CTA `number` among those that differ from this one only in places `shared_by`."""
    steps = strides(program.cluster)
    rank = _first_sharer(program, shared_by, where)
    for place in reversed(shared_by):
        rank = rank + number % place.extent * steps[place.var]
        number = number // place.extent
    return rank


def _first_sharer(program: TileProgram, shared_by: tuple[Place, ...], where: Coordinates) -> Any:
    """Rank of the first CTA that differs from this one only in the places `shared_by`.

    Written as a sum of what is never negative: TVM refuses to cast what might be.
    """
    steps = strides(program.cluster)
    shared = [place.var for place in shared_by]
    others = (place.var for place in program.cluster if place.var not in shared)
    rank: Any = 0
    for var in others:
        rank = rank + where.places[var] * steps[var]
    return rank


def _mask(program: TileProgram, operand: Operand, where: Coordinates) -> Any:
    """Bit mask of the ranks of the sharers."""
    steps = strides(program.cluster)
    moves = [
        [value * steps[place.var] for value in range(place.extent)] for place in operand.shared_by
    ]
    pattern = sum(1 << sum(combination) for combination in product(*moves))
    if program.cluster_size == operand.sharers:
        return ir.script.uint16(pattern)
    first = _first_sharer(program, operand.shared_by, where)
    return ir.script.Cast("uint16", ir.script.int32(pattern) << first)
