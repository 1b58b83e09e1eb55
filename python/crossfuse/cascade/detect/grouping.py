"""Decides which reductions share an axis."""

from __future__ import annotations

from collections.abc import Sequence

from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.group import (
    Binding,
    Group,
    Member,
    elements,
    extended,
    other_row,
    results,
)
from crossfuse.cascade.detect.loads import Load, moved, refused, variables_of
from crossfuse.cascade.detect.program import Program, buffers_of

_ALIKE = "reductions over the same positions, of the same row"


def producers(program: Program) -> list[Block]:
    """Find the reductions whose results others read along their axis.

    Refused are such results that are also used as those of a row, and those made of other results.
    """
    found: dict[int, tuple[Block, Block]] = {}
    for block in program.reductions:
        for load in elements(program, block):
            made = program.reduction(load.buffer)
            if made is not None:
                found.setdefault(id(made), (made, block))
    for block in program.reductions:
        for load in results(program, block):
            made = program.reduction(load.buffer)
            if made is not None and id(made) in found:
                reader = found[id(made)][1]
                what = f"a result that {reader.where} reads along its axis and this one does not"
                where = f"{block.where}, buffer '{load.buffer.name}'"
                raise refused(where, what, "results of one row, or elements")
    for made, reader in found.values():
        for load in program.loads(made):
            inner = program.reduction(load.buffer)
            if inner is not None:
                where = f"{reader.where}, buffer '{made.buffer.name}'"
                what = f"elements that block '{made.name}' makes of results of block '{inner.name}'"
                raise refused(where, what, "elements that are inputs, or reductions of inputs")
    return [made for made, _ in found.values()]


def find_groups(program: Program) -> list[Group]:
    """Find the reductions that share an axis, in program order; none is in two groups.

    Refused is a reduction that needs the result of another one at another row, or over other
    positions; see also `producers`.
    """
    made = {id(each) for each in producers(program)}
    waiting = [each for each in program.reductions if id(each) not in made]
    groups: list[Group] = []
    while waiting:
        first = waiting.pop(0)
        group = _start(first)
        while joined := next((each for each in waiting if _join(program, group, each)), None):
            waiting.remove(joined)
        group.members.sort(key=lambda each: program.reductions.index(each.block))
        groups.append(group)
    for group in groups:
        _check_apart(program, group)
    return groups


def _start(block: Block) -> Group:
    variables = {var: var for var in block.domain}
    group = Group(block.summed, dict(block.domain))
    group.members.append(Member(block, variables))
    return group


def _join(program: Program, group: Group, block: Block) -> bool:
    """Add a reduction to a group if it shares the axis."""
    needed = [each for each in results(program, block) if group.member(each.buffer)]
    feeds = _feeds(program, group, block)
    if feeds:
        # It comes before members that were found without it: they are matched the other way round.
        return _join_before(program, group, block, feeds)
    binding, shared = group.bind(program, block, needed, elements(program, block))
    if needed and not group.reduces_alike(block, binding):
        binding = _by_domain(program, group, block, binding)
    if not group.reduces_alike(block, binding) or not (needed or shared):
        if needed:
            raise _other_positions(group, block, needed[0])
        return False
    _admit(group, block, binding)
    return True


def _feeds(program: Program, group: Group, block: Block) -> list[tuple[Member, Load]]:
    return [
        (member, load)
        for member in group.members
        for load in results(program, member.block)
        if load.buffer in buffers_of(block)
    ]


def _join_before(
    program: Program, group: Group, block: Block, feeds: Sequence[tuple[Member, Load]]
) -> bool:
    """Add a reduction whose result members use: it is of their row."""
    binding: Binding = {}
    for member, load in feeds:
        there = moved(load.indices, member.binding, group.extents)
        pairs = list(zip(there, block.coordinates, strict=True))
        found = extended(binding, pairs, block.domain, group.extents)
        if found is None:
            raise other_row(member.block, load, block)
        binding = found
    binding, _ = group.bind_elements(program, block, elements(program, block), binding)
    if not group.reduces_alike(block, binding):
        binding = _by_domain(program, group, block, binding)
    if not group.reduces_alike(block, binding):
        raise _other_positions(group, feeds[0][0].block, feeds[0][1], block)
    _admit(group, block, binding)
    return True


def _by_domain(program: Program, group: Group, block: Block, binding: Binding) -> Binding:
    """Bind axes by their extents where one of two reductions reads no tensor along its axis."""
    bare = not elements(program, block)
    bare |= all(not elements(program, each.block) for each in group.members)
    ours = [each for each in block.summed if each not in binding]
    theirs = [each for each in group.axes if each not in variables_of(binding.values())]
    sizes = ([block.domain[each] for each in ours], [group.extents[each] for each in theirs])
    if not bare or sizes[0] != sizes[1]:
        return binding
    return {**binding, **dict(zip(ours, theirs, strict=True))}


def _admit(group: Group, block: Block, binding: Binding) -> None:
    own = {var: var for var in block.domain if var not in binding}
    if any(var in block.summed for var in own):
        # A reduced loop of one iteration is the axis of one iteration.
        axes = [each for each in group.axes if each not in variables_of(binding.values())]
        summed = [each for each in own if each in block.summed]
        own |= dict(zip(summed, axes, strict=False))
    group.extents |= {var: block.domain[var] for var in own.values() if var in block.domain}
    group.members.append(Member(block, {**binding, **own}))


def _check_apart(program: Program, group: Group) -> None:
    """Refuse members that need a result of another group."""
    for member in group.members:
        for load in results(program, member.block):
            if group.member(load.buffer) is None:
                raise _other_positions(group, member.block, load, program.reduction(load.buffer))


def _other_positions(
    group: Group, block: Block, load: Load, other: Block | None = None
) -> Exception:
    member = group.member(load.buffer)
    made = member.block if member is not None else other
    assert made is not None
    found = f"a reduction over {_size(block)} that needs a result over {_size(made)} of other"
    found += f" positions (block '{made.name}')"
    return refused(f"{block.where}, buffer '{load.buffer.name}'", found, _ALIKE)


def _size(block: Block) -> str:
    return " x ".join(str(block.domain[each]) for each in block.summed) or "one element"
