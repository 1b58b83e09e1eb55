"""Which buffers of a function's outputs a group makes, and over which loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.group import Group, elements
from crossfuse.cascade.detect.loads import Load, loads_of, moved, same, variables_of
from crossfuse.cascade.detect.program import Program
from crossfuse.cascade.detect.refusal import SPLIT, refused


@dataclass(frozen=True, eq=False)
class Output:
    """An output and what makes it.

    Attributes
    ----------
    buffer : tvm.tirx.Buffer
        The parameter.
    block : Block
        What writes it: an element-wise block, or a reduction of the group.
    binding : Mapping
        The group's variables for those of the block.
    """

    buffer: Any
    block: Block
    binding: Mapping[Any, Any]

    @property
    def coordinates(self) -> tuple[Any, ...]:
        """Where it is stored, in the group's variables."""
        return tuple(self.binding.get(each, each) for each in self.block.coordinates)

    def value(self, program: Program) -> Any:
        """What is stored, in the block's variables."""
        if not self.block.combine:
            return program.value(self.block)
        return ir.tirx.BufferLoad(self.buffer, list(self.block.coordinates))


def outputs_of(program: Program, groups: Sequence[Group]) -> dict[int, list[Output]]:
    """Say which group makes each output of a function.

    Parameters
    ----------
    program : Program
        The function.
    groups : Sequence[Group]
        Its groups, whose extents get the loops of outputs.

    Returns
    -------
    dict[int, list[Output]]
        By the identity of the group, in the order of the parameters.

    Raises
    ------
    CascadeRefused
        For an output of no group or of several, and one that needs two positions of the axis.
    """
    found: dict[int, list[Output]] = {id(each): [] for each in groups}
    for buffer in program.outputs:
        block = program.made[buffer]
        group = _group_of(program, groups, buffer, block)
        found[id(group)].append(_output(program, group, buffer, block))
    for group in groups:
        if not found[id(group)]:
            names = ", ".join(f"'{each.block.name}'" for each in group.members)
            instead = "take the blocks out, or store their results"
            raise refused(f"block {names}", "results that no output needs", "results", instead)
    return found


def _group_of(program: Program, groups: Sequence[Group], buffer: Any, block: Block) -> Group:
    loads = [Load(buffer, block.coordinates)] if block.combine else program.loads(block)
    owners = [each for each in groups if any(each.member(load.buffer) for load in loads)]
    if not owners:
        owners = [each for each in groups if _shares(program, each, loads)]
    if len(owners) != 1:
        what = "nothing that a reduction needs or makes"
        if owners:
            what = f"results of {len(owners)} sets of reductions that share no axis"
        raise refused(f"{block.where}, buffer '{buffer.name}'", what, "results of one set", SPLIT)
    return owners[0]


def _shares(program: Program, group: Group, loads: Sequence[Load]) -> bool:
    """Whether an output is made of what a group reads along its axis."""
    known = {load.buffer for each in group.members for load in elements(program, each.block)}
    return any(each.buffer in known for each in loads)


def _output(program: Program, group: Group, buffer: Any, block: Block) -> Output:
    member = group.member(buffer)
    if member is not None:
        return Output(buffer, block, member.binding)
    loads = [Load(buffer, block.coordinates)] if block.combine else program.loads(block)
    # What is stored is read, not reduced, even where a reduction stores it.
    binding, _ = group.bind(program, replace(block, combine="", summed=()), loads, loads)
    own = {var: var for var in block.coordinates if var not in binding}
    group.extents |= {var: block.domain[var] for var in own}
    binding = {**binding, **own}
    _check_one_axis(program, group, block, buffer, binding)
    return Output(buffer, block, binding)


def _check_one_axis(
    program: Program, group: Group, block: Block, buffer: Any, binding: Mapping[Any, Any]
) -> None:
    """No output is made of two positions of one tensor."""
    moving = {*group.axes, *(var for var in binding.values() if var in block.domain)}
    places: dict[tuple[Any, int], Load] = {}
    for load in program.loads(block) if not block.combine else []:
        at = Load(load.buffer, moved(load.indices, binding, group.extents))
        for dimension in _along(program, group, at.buffer):
            index = at.indices[dimension]
            if loads_of(index) or not variables_of([index]) & moving:
                continue
            other = places.setdefault((at.buffer, dimension), at)
            if not same([other.indices[dimension]], [index]):
                where = f"{block.where}, buffer '{buffer.name}'"
                found = f"an output that needs two positions of the axis: {other.text}, {at.text}"
                raise refused(where, found, "outputs of one row, or of one element of it")


def _along(program: Program, group: Group, buffer: Any) -> set[int]:
    """Dimensions of a buffer that members follow along the axis."""
    found = set()
    for member in group.members:
        for load in elements(program, member.block):
            if load.buffer.same_as(buffer):
                axes = set(member.block.summed)
                found |= {d for d, index in enumerate(load.indices) if variables_of([index]) & axes}
    return found
