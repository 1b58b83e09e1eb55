"""Decides which reductions share an axis, and how each one's loops map to those of its group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.cascade.detect.loads import Load, moved, refused, same, variables_of
from crossfuse.cascade.detect.program import Program

# Bindings: equal accesses to one buffer say which variables of two readers are the same.

#: Each variable of a reader in the group's variables.
Binding = Mapping[Any, Any]
#: An index in the group's variables, and the one in the reader's that is to equal it.
Pair = tuple[Any, Any]
#: Extents by variable.
Extents = Mapping[Any, int]


def extended(
    binding: Binding, pairs: Iterable[Pair], own: Extents, group: Extents
) -> dict[Any, Any] | None:
    """Extend a reader's binding so that pairs of indices become equal; None if they cannot.

    Together, the reader's variables go once through all that the group's variables in them go
    through. `own` and `group` are the extents of the two.
    """
    found, later = dict(binding), []
    for there, here in pairs:
        if here in own and own[here] > 1 and here not in found:
            found[here] = there
        else:
            later.append((there, here))
    for choice in _choices(found, later, own, group):
        if all(_equal(there, here, choice, own, group) for there, here in later):
            single = _single(choice, later, own, group)
            if is_bijection(choice, own, group):
                return choice | single
    return None


def is_bijection(binding: Binding, own: Extents, group: Extents) -> bool:
    """Whether the bound variables of a reader count each iteration of the group's once."""
    bound = {var: own[var] for var in binding if own.get(var, 1) > 1}
    values = [binding[var] for var in bound]
    used = variables_of(values)
    domain = {var: extent for var, extent in group.items() if var in used}
    known = access.analyzer(domain)
    for value, extent in zip(values, bound.values(), strict=True):
        reach = known.const_int_bound(value)
        if int(reach.min_value) < 0 or int(reach.max_value) >= extent:
            return False
    return not bound or access.inverse(values, bound, domain) is not None


def _equal(there: Any, here: Any, binding: Binding, own: Extents, group: Extents) -> bool:
    """Whether two indices are equal under a binding; variables of one iteration are 0."""
    every = {**own, **group}
    return same(access.simplified([there], group), access.replaced([here], binding, every))


def _single(found: Binding, later: Sequence[Pair], own: Extents, group: Extents) -> dict[Any, Any]:
    """Pair variables of one iteration that stand at the same place: they may as well be one."""
    taken = variables_of(found.values())
    return {
        here: there
        for there, here in later
        if own.get(here) == 1 and group.get(there) == 1 and not {there} & taken
    }


def _choices(
    found: dict[Any, Any], later: Sequence[Pair], own: Extents, group: Extents
) -> Iterator[dict[Any, Any]]:
    """Candidate bindings of variables that occur only inside of indices, such as ``l // 4``."""
    wanted = variables_of(here for _, here in later) & set(own) - set(found)
    free = [var for var in own if var in wanted and own[var] > 1]
    if not free:
        yield found
        return
    solved = _solved(free, later, own, group)
    if solved is not None:
        yield found | solved
    there = variables_of(there for there, _ in later) - variables_of(found.values())
    images = [var for var in group if var in there and group[var] > 1]
    for order in permutations(images, len(free)):
        if all(own[var] == group[image] for var, image in zip(free, order, strict=True)):
            yield found | dict(zip(free, order, strict=True))


def _solved(
    free: Sequence[Any], later: Sequence[Pair], own: Extents, group: Extents
) -> dict[Any, Any] | None:
    """Solve indices for the variables that are all in them: a row made of a batch and a head."""
    pairs = [(there, here) for there, here in later if variables_of([here]) & set(free)]
    if len(pairs) == len(free) == 1:
        # The same loop, but shifted or turned: such elements are of another row.
        return None
    names = [ir.Var(f"c{place}", str(there.ty)) for place, (there, _) in enumerate(pairs)]
    known = access.analyzer(group)
    extents = {
        name: int(known.const_int_bound(there).max_value) + 1
        for name, (there, _) in zip(names, pairs, strict=True)
    }
    indices = [here for _, here in pairs]
    if variables_of(indices) - set(free) or not all(map(access.is_affine, indices)):
        return None
    values = access.inverse(indices, extents, {var: own[var] for var in free})
    if values is None:
        return None
    places = dict(zip(names, (there for there, _ in pairs), strict=True))
    return dict(zip(free, moved([values[var] for var in free], places, group), strict=True))


@dataclass(frozen=True, eq=False)
class Member:
    """A reduction of a group."""

    block: Block
    #: The block's variables in terms of the group's; those of one iteration may be absent.
    binding: Binding

    @property
    def coordinates(self) -> tuple[Any, ...]:
        """Where its result stands, in the group's variables."""
        return tuple(self.binding.get(each, each) for each in self.block.coordinates)

    @property
    def loops(self) -> tuple[Any, ...]:
        """Its coordinates without the one that counts the numbers of a top-k."""
        return self.coordinates[:-1] if self.block.combine == "topk" else self.coordinates


@dataclass(eq=False)
class Group:
    """Reductions that share an axis, in program order."""

    #: Loops that are reduced.
    axes: tuple[Any, ...]
    #: Of all loops of the group.
    extents: dict[Any, int]
    members: list[Member] = field(default_factory=list)
    _read: dict[Member, list[Load]] = field(default_factory=dict)

    def member(self, buffer: Any) -> Member | None:
        """The member that writes a buffer."""
        for each in self.members:
            if buffer in each.block.buffers:
                return each
        return None

    def bind(
        self, program: Program, reader: Block, wanted: Iterable[Load], read: Sequence[Load]
    ) -> tuple[Binding, bool]:
        """Bind the variables of a reader, which reads results at its own row.

        The reader is a reduction, or the block of an output; `wanted` are its loads that may be of
        results, `read` those that may be of elements. Returns the binding as far as it is known,
        and whether the reader reads elements that members read too. A result that is read at
        another row is refused.
        """
        found, later = self._bind_results(reader, wanted, {})
        found, shared = self.bind_elements(program, reader, read, found)
        # Rows may be known only by the elements, as where a channel is a group and a place in it.
        found, wrong = self._bind_results(reader, later, found)
        if wrong:
            made = self.member(wrong[0].buffer)
            assert made is not None
            raise other_row(reader, wrong[0], made.block)
        return found, shared

    def _bind_results(
        self, reader: Block, loads: Iterable[Load], binding: Binding
    ) -> tuple[Binding, list[Load]]:
        """Bind variables by loads of results; returns the loads that say nothing yet, too."""
        later = []
        for load in loads:
            member = self.member(load.buffer)
            if member is None:
                continue
            pairs = zip(member.coordinates, load.indices, strict=True)
            found = extended(binding, pairs, reader.domain, self.extents)
            if found is None:
                later.append(load)
            else:
                binding = found
        return binding, later

    def bind_elements(
        self, program: Program, reader: Block, loads: Sequence[Load], binding: Binding
    ) -> tuple[Binding, bool]:
        """Bind more of a reader's variables by elements that members read too.

        Also returns whether the reader reads any such elements.
        """
        known = [each for member in self.members for each in self._elements(program, member)]
        return self._bind_alike(reader, loads, known, binding)

    def bind_beside(
        self, program: Program, reader: Block, loads: Sequence[Load], binding: Binding
    ) -> Binding:
        """Bind more of a reader's variables by elements that an output reads beside the group's."""
        return self._bind_alike(reader, loads, self._beside(program), binding)[0]

    def _beside(self, program: Program) -> list[Load]:
        """What outputs read where they read elements of members, in the group's variables."""
        found: list[Load] = []
        for block in (program.made[each] for each in program.outputs):
            loads = program.loads(block) if not block.combine else []
            binding, _ = self._bind_results(block, loads, {})
            binding, shared = self.bind_elements(program, block, loads, binding)
            bound = [each for each in loads if each.variables <= set(binding)] if shared else []
            found += [Load(e.buffer, moved(e.indices, binding, self.extents)) for e in bound]
        return found

    def _bind_alike(
        self, reader: Block, loads: Sequence[Load], known: Sequence[Load], binding: Binding
    ) -> tuple[Binding, bool]:
        any_shared = False
        # What is read twice, as in x * x, says something new only if more is bound by then.
        tried: set[tuple[Any, Any]] = set()
        for theirs in known:
            for load in loads:
                pair = (theirs.key, load.key)
                if pair in tried or not load.buffer.same_as(theirs.buffer):
                    continue
                pairs = zip(theirs.indices, load.indices, strict=True)
                found = extended(binding, pairs, reader.domain, self.extents)
                if found is not None and self._keeps_axes(reader, found):
                    if not _alike(found, binding):
                        tried.clear()
                    binding, any_shared = found, True
                tried.add(pair)
        return binding, any_shared

    def _elements(self, program: Program, member: Member) -> list[Load]:
        """Elements that a member reads, in the group's variables."""
        if member not in self._read:
            self._read[member] = [
                Load(each.buffer, moved(each.indices, member.binding, self.extents))
                for each in elements(program, member.block)
            ]
        return self._read[member]

    def _keeps_axes(self, reader: Block, binding: Binding) -> bool:
        """Whether reduced loops map to reduced loops; those of outputs may be anything."""
        if not reader.combine:
            return True
        axes = frozenset(self.axes)
        for var, value in binding.items():
            used = variables_of([value])
            if used & axes if var not in reader.summed else used - axes:
                return False
        return True

    def reduces_alike(self, block: Block, binding: Binding) -> bool:
        """Whether the loops that a block reduces are the axes, one for one."""
        summed = {each: block.domain[each] for each in block.summed if block.domain[each] > 1}
        axes = {each: self.extents[each] for each in self.axes if self.extents[each] > 1}
        if not summed or not axes:
            return not summed and not axes
        if any(each not in binding for each in summed):
            return False
        return access.inverse([binding[each] for each in summed], summed, axes) is not None


def _alike(one: Binding, other: Binding) -> bool:
    """Whether a binding that extends another one adds nothing."""
    return len(one) == len(other) and all(one[var] is other[var] for var in other)


def elements(program: Program, block: Block) -> list[Load]:
    """Loads of a reduction that change along its axis."""
    summed = frozenset(block.summed)
    return [each for each in program.loads(block) if each.variables & summed]


def results(program: Program, block: Block) -> list[Load]:
    """Loads of other reductions' results that stay the same along a reduction's axis."""
    summed = frozenset(block.summed)
    return [
        each
        for each in program.loads(block)
        if program.reduction(each.buffer) and not each.variables & summed
    ]


def other_row(reader: Block, load: Load, made: Block) -> Exception:
    """The refusal of a result that is read at another row than the reader's."""
    rows = ", ".join(str(each) for each in made.coordinates)
    limit = f"the result of its own row: [{rows}] of block '{made.name}'"
    where = f"{reader.where}, buffer '{load.buffer.name}'"
    return refused(where, f"a result read at another row: {load.text}", limit)


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
        binding = group.bind_beside(program, block, elements(program, block), binding)
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
        if load.buffer in block.buffers
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
