"""Copies of tiles to shared memory by TMA (PTX ISA, cp.async.bulk.tensor)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.coordinates import Coordinates, at, strides
from crossfuse.lower.hopper.plan.operands import Operand
from crossfuse.lower.hopper.program.tile import Place, Tile, WindowTile
from crossfuse.lower.hopper.program.tile_program import TileProgram
from crossfuse.lower.hopper.statements import run, when
from crossfuse.lower.image import TensorMap

# Descriptors are parameters: a generic address, which the instruction takes.
_FETCH_DESCRIPTOR = """\
__device__ __forceinline__ void crossfuse_fetch_descriptor(unsigned long long map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
}
"""


def fetch_descriptors(descriptors: tuple[TensorMap, ...], lane: Any, maps: dict[str, Any]) -> None:
    """Prefetch all descriptors, one by each lane: the first copy would wait for its own."""
    for number, each in enumerate(descriptors):
        with when(lane == number):
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
    row, column = (at(each, dict(values)) for each in operand.tile.origin)
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
