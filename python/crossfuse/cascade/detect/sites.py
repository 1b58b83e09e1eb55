"""Sites of cascades: groups of reductions with their terms, and the outputs made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.group import Group, Member
from crossfuse.cascade.detect.grouping import find_groups
from crossfuse.cascade.detect.loads import moved, same, variables_of
from crossfuse.cascade.detect.monoids import monoid_of
from crossfuse.cascade.detect.outputs import Output, outputs_of
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.detect.refusal import refused
from crossfuse.cascade.detect.selected import Selection
from crossfuse.cascade.detect.symbols import Symbols
from crossfuse.cascade.detect.terms import Reading, with_length
from crossfuse.cascade.site import OutputSite, Site, StageSite
from crossfuse.cascade.spec import Cascade, Stage


def find_sites(func: Any) -> tuple[Site, ...]:
    """Find the cascades of a function; see `crossfuse.cascade.detect.detect`."""
    program = read_program(func)
    groups = find_groups(program)
    if not groups:
        limit, instead = "at least one reduction", "leave it to an element-wise kernel"
        raise refused("function", "no reduction", limit, instead)
    outputs = outputs_of(program, groups)
    return tuple(_Builder(program, each, outputs[id(each)]).site() for each in groups)


class _Builder:
    """Makes the site of one group."""

    def __init__(self, program: Program, group: Group, outputs: list[Output]) -> None:
        self.program = program
        self.group = group
        self.outputs = outputs
        self.rows = _rows(group)
        self.axis, self.values = _axis(group)
        self.values |= _single(group, (*self.rows, self.axis))
        extents = {var: extent for var, extent in group.extents.items() if var not in self.values}
        extents[self.axis] = prod(group.extents[each] for each in group.axes)
        self.extents = extents
        self.symbols = Symbols(program, group, self.values, self.axis, extents)

    def site(self) -> Site:
        stages: dict[str, StageSite] = {}
        for member in self.group.members:
            stage = self._stage(member)
            columns = self._columns(member.loops, f"block '{member.block.name}'")
            # Of a top-k, the values may be kept nowhere.
            block, kept = member.block, member.block.buffer.ty.dtype
            dtype = str(block.value.ty if stage.monoid.k else kept)
            stages[stage.name] = StageSite(block.name, block.buffer, columns, dtype)
        places: list[OutputSite] = []
        made: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        for output in self.outputs:
            value = output.value(self.program)
            term = self._lengths(Reading(self.symbols, output.block, value, output.binding).term)
            name = str(output.buffer.name)
            while name in made or name in rows:
                name += "_"
            (rows if self._along_axis(output) else made)[name] = term
            places.append(self._output(name, output))
        cascade = Cascade(
            tuple(self.symbols.stages.values()),
            self.symbols.elements,
            self.symbols.invariants,
            made,
            rows,
            self.symbols.index,
            self.symbols.length,
        )
        return Site(
            self.program.function,
            cascade,
            self.rows,
            self.axis,
            self.extents,
            self.symbols.reads,
            stages,
            tuple(places),
            self.symbols.producers,
        )

    def _stage(self, member: Member) -> Stage:
        block = member.block
        read = Reading(self.symbols, block, self.program.value(block), member.binding)
        name = self.symbols.name(str(block.buffer.name))
        term = self._lengths(read.term)
        stage = Stage(name, monoid_of(self.program, block, term), term, read.cast)
        self.symbols.stages[id(block)] = stage
        if isinstance(block, Selection):
            self._check_place(block, member)
        return stage

    def _check_place(self, block: Selection, member: Member) -> None:
        """Where an element stands is its position on the axis, and nothing else."""
        place = block.place.value if isinstance(block.place, ir.tirx.Cast) else block.place
        at = moved(moved([place], member.binding, {}), self.values, self.extents)
        if not same(at, [self.axis]):
            places = block.buffer if block.places is None else block.places
            where = f"{block.where}, buffer '{places.name}'"
            instead = "keep positions, and look up what they stand for"
            raise refused(where, f"places {block.place}", "positions on the axis", instead)

    def _lengths(self, term: Any) -> Any:
        sums = [s.symbol for s in self.symbols.stages.values() if s.monoid.name == "sum"]
        return with_length(term, self.extents[self.axis], sums, self.symbols)

    def _along_axis(self, output: Output) -> bool:
        return bool(variables_of(output.coordinates) & frozenset(self.group.axes))

    def _output(self, name: str, output: Output) -> OutputSite:
        at = moved(output.coordinates, self.values, self.extents)
        return OutputSite(name, output.buffer, at, self._others(at))

    def _columns(self, loops: Sequence[Any], where: str) -> tuple[Any, ...]:
        """Loops of a result that are neither rows nor the axis."""
        for each in loops:
            if self._others([each]) and not isinstance(each, ir.Var):
                limit, instead = "loops that are rows or columns", "write the two as loops"
                raise refused(where, f"a loop {each} of rows and columns", limit, instead)
        return self._others(loops)

    def _others(self, loops: Sequence[Any]) -> tuple[Any, ...]:
        """Variables that are neither rows nor the axis, each once."""
        known = frozenset((*self.rows, *self.group.axes, self.axis, *self.values))
        every = (var for each in loops for var in ir.variables(each))
        return tuple(dict.fromkeys(var for var in every if var not in known))


def _rows(group: Group) -> tuple[Any, ...]:
    """Loops that the results of all members have."""
    first, *others = group.members
    shared = [variables_of(each.loops) for each in others]
    every = [each for loop in first.loops for each in group.extents if each in variables_of([loop])]
    return tuple(each for each in every if all(each in used for used in shared))


def _axis(group: Group) -> tuple[Any, dict[Any, Any]]:
    """One loop for all that is reduced, and the loops of the function in terms of it."""
    if len(group.axes) == 1:
        return group.axes[0], {}
    axis = ir.Var("l", str(group.axes[0].ty))
    values, stride = {}, 1
    for each in reversed(group.axes):
        part = axis if stride == 1 else ir.tirx.floordiv(axis, stride)
        values[each] = ir.tirx.floormod(part, group.extents[each])
        stride *= group.extents[each]
    outer = group.axes[0]
    values[outer] = ir.tirx.floordiv(axis, stride // group.extents[outer])
    return axis, values


def _single(group: Group, kept: Sequence[Any]) -> dict[Any, Any]:
    """Loops of one iteration that are neither rows nor the axis: of reductions that keep dims."""
    return {
        var: ir.tirx.const(0, str(var.ty))
        for var, extent in group.extents.items()
        if extent == 1 and var not in kept
    }
