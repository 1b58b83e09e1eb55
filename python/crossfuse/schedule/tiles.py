"""Measures the tile of a buffer that one iteration of a loop works on."""

from __future__ import annotations

from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import (
    binds,
    constant_extent,
    in_loops,
    name_of,
    position,
    span,
    written_buffer,
)
from crossfuse.errors import ScheduleRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.markers import DSM_DTYPES

# Loop extents as the trace knows them, so that a sampled size stays mutable.
#
# ``sch.get(loop).extent`` is a number: baked into a later instruction it would survive a mutation
# of the decision it came from. The factor given to ``split`` is the random variable itself.


def symbolic_extent(sch: Any, rule: str, loop: Any) -> Any:
    """Extent of `loop` as a random variable where the trace has one, else as an int.

    The variable is the factor of the ``split`` that made the loop, if one was given. An extent that
    follows from a sampled factor without being one is refused: a trace has no expressions of random
    variables, so a number would be recorded, and be wrong after a mutation.
    """
    number = constant_extent(sch, rule, loop)
    output = _made_by_split(sch, loop)
    if output is None:
        return number
    factor = _factor(sch, output)
    if isinstance(factor, ir.Var):
        return factor
    if factor is None and _sampled(sch, output):
        raise refuse(
            ScheduleRefused,
            rule,
            name_of(sch, loop),
            found=f"extent {number}, what sampled factors leave over",
            limit="an extent that the trace can mutate: a number or a sampled factor",
            instead="give the sampled size to split as the factor of this loop and leave another "
            "factor None, or sample all factors with sample_perfect_tile",
        )
    return number


def is_sampled(sch: Any, loop: Any) -> bool:
    """Whether the extent of `loop` is a sampled factor, or inferred from such factors."""
    output = _made_by_split(sch, loop)
    if output is None:
        return False
    return isinstance(_factor(sch, output), ir.Var) or _sampled(sch, output)


def _made_by_split(sch: Any, loop: Any) -> Any:
    """The random variable under which a ``split`` or ``fuse`` made the loop, or None."""
    target = sch.get_sref(loop)
    for instruction in reversed(_instructions(sch)):
        for output in instruction.outputs:
            if _is_live(sch, output, target):
                return output
    return None


def _instructions(sch: Any) -> list[Any]:
    if sch.trace is None:
        return []
    return [each for each in sch.trace.insts if each.kind.name in ("Split", "Fuse")]


def _is_live(sch: Any, output: Any, target: Any) -> bool:
    """Whether a loop made by an earlier instruction is still the loop `target` refers to."""
    try:
        return bool(sch.get_sref(output).same_as(target))
    except (IndexError, ValueError):
        return False


def _maker(sch: Any, loop: Any) -> tuple[Any, int]:
    """The instruction that made a loop variable, live or not, and the index among its outputs."""
    for instruction in _instructions(sch):
        for index, output in enumerate(instruction.outputs):
            if output.same_as(loop):
                return instruction, index
    return None, 0


def _factor(sch: Any, loop: Any) -> Any:
    """The factor a loop was split by: a random variable, a number, or None where inferred."""
    instruction, index = _maker(sch, loop)
    if instruction is None or instruction.kind.name != "Split":
        return None
    return list(instruction.inputs)[1 + index]


def _sampled(sch: Any, loop: Any) -> bool:
    """Whether the extent of a loop without a given factor depends on sampled ones."""
    instruction, index = _maker(sch, loop)
    if instruction is None:
        return False
    inputs = list(instruction.inputs)
    if instruction.kind.name == "Fuse":
        return any(isinstance(_factor(sch, each), ir.Var) or _sampled(sch, each) for each in inputs)
    factor = inputs[1 + index]
    if factor is not None:
        return isinstance(factor, ir.Var)
    return any(isinstance(each, ir.Var) for each in inputs[1:]) or _sampled(sch, inputs[0])


def written_starts(sch: Any, block: Any) -> list[Any]:
    """First index that a block writes, by dimension, in terms of its loops."""
    return [in_loops(sch, block, each.min) for each in sch.get(block).writes[0].region]


def tile_extents(sch: Any, block: Any, loop: Any) -> tuple[int, ...]:
    """Extents of the region that a block writes in one iteration of `loop`, by buffer dimension."""
    inner = [sch.get(each) for each in _inside(sch, block, loop)]
    return tuple(span(start, inner) for start in written_starts(sch, block))


def is_sampled_tile(sch: Any, block: Any, loop: Any) -> bool:
    """Whether a mutation of the trace may change `tile_extents`."""
    starts = written_starts(sch, block)
    return any(
        is_sampled(sch, each)
        for each in _inside(sch, block, loop)
        if any(binds(sch.get(each).loop_var, start) for start in starts)
    )


def _inside(sch: Any, block: Any, loop: Any) -> list[Any]:
    """The loops of a block inside one of them."""
    loops, depth = position(sch, "tile", block, loop)
    return loops[depth + 1 :]


def check_dtype(rule: str, where: str, buffer: Any) -> None:
    """Refuse an element type that has no DSM access."""
    dtype = str(buffer.ty.dtype)
    if dtype not in DSM_DTYPES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"element type {dtype}",
            limit=", ".join(DSM_DTYPES),
            instead="compute the exchanged tile in one of these types and cast afterwards",
        )


def check_slab(sch: Any, rule: str, where: str, block: Any, rank: Any) -> None:
    """Refuse a slab, written by `block` in one iteration of loop `rank`, that no CTA can hold."""
    dtype = str(written_buffer(sch, block).ty.dtype)
    # The leading extent is the rank's: one, in one iteration.
    extents = tile_extents(sch, block, rank)[1:]
    size = prod(extents) * (int(ir.tvm.DataType(dtype).bits) // 8)
    if size > MAX_SHARED_BYTES:
        raise refuse(
            ScheduleRefused,
            rule,
            where,
            found=f"a slab of {' x '.join(map(str, extents))} {dtype}, {size} bytes",
            limit=f"{MAX_SHARED_BYTES} bytes of shared memory in a CTA",
            instead="split the output loops and reorder the parts outside the exchange, so that "
            "a smaller tile is exchanged at a time",
        )
