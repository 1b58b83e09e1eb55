"""Loop extents as the trace knows them, so that a sampled size stays mutable.

``sch.get(loop).extent`` is a number: baked into a later instruction it would survive a mutation of
the decision it came from. The factor given to ``split`` is the random variable itself.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import constant_extent, name_of
from crossfuse.errors import ScheduleRefused, refuse


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
