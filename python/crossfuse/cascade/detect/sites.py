"""Sites of cascades: groups of reductions with their terms, and the outputs made of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.grouping import Group, Member, find_groups
from crossfuse.cascade.detect.monoids import monoid_of
from crossfuse.cascade.detect.outputs import Output, outputs_of
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.detect.refusal import refused
from crossfuse.cascade.detect.terms import Symbols, with_length
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
        self.symbols = Symbols(program, group, self.values, self.axis)

    def site(self) -> Site:
        stages: dict[str, StageSite] = {}
        for member in self.group.members:
            stage = self._stage(member)
            columns = tuple(each for each in member.loops if each not in self.rows)
            # Of a top-k, the values may be kept nowhere.
            block, kept = member.block, member.block.buffer.ty.dtype
            dtype = str(block.value.ty if stage.monoid.k else kept)
            stages[stage.name] = StageSite(block.name, block.buffer, columns, dtype)
        places: list[OutputSite] = []
        made: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        for output in self.outputs:
            value = output.value(self.program)
            term = self._lengths(self.symbols.read(output.block, value, output.binding).term)
            name = str(output.buffer.name)
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
        extents = {var: each for var, each in self.group.extents.items() if var not in self.values}
        extents[self.axis] = prod(self.group.extents[each] for each in self.group.axes)
        return Site(
            self.program.function,
            cascade,
            self.rows,
            self.axis,
            extents,
            self.symbols.reads,
            stages,
            tuple(places),
            self.symbols.producers,
        )

    def _stage(self, member: Member) -> Stage:
        block = member.block
        read = self.symbols.read(block, self.program.value(block), member.binding)
        name = self.symbols.name(str(block.buffer.name))
        term = self._lengths(read.term)
        stage = Stage(name, monoid_of(self.program, block, term), term, read.cast)
        self.symbols.stages[id(block)] = stage
        return stage

    def _lengths(self, term: Any) -> Any:
        sums = [s.symbol for s in self.symbols.stages.values() if s.monoid.name == "sum"]
        extent = prod(self.group.extents[each] for each in self.group.axes)
        return with_length(term, extent, sums, self.symbols)

    def _along_axis(self, output: Output) -> bool:
        return any(each in self.group.axes for each in output.coordinates)

    def _output(self, name: str, output: Output) -> OutputSite:
        at = tuple(self.values.get(each, each) for each in output.coordinates)
        known = (*self.rows, *self.group.axes)
        columns = tuple(each for each in output.coordinates if each not in known)
        return OutputSite(name, output.buffer, at, columns)


def _rows(group: Group) -> tuple[Any, ...]:
    """Loops that the results of all members have."""
    first, *others = group.members
    return tuple(each for each in first.loops if all(each in other.loops for other in others))


def _axis(group: Group) -> tuple[Any, Mapping[Any, Any]]:
    """One loop for all that is reduced, and the loops of the functions in terms of it."""
    if len(group.axes) == 1:
        return group.axes[0], {group.axes[0]: group.axes[0]}
    axis = ir.Var("l", "int32")
    values, stride = {}, 1
    for each in reversed(group.axes):
        extent = group.extents[each]
        part = axis if stride == 1 else ir.tirx.floordiv(axis, stride)
        values[each] = ir.tirx.floormod(part, extent)
        stride *= extent
    outer = group.axes[0]
    values[outer] = ir.tirx.floordiv(axis, stride // group.extents[outer])
    return axis, values
