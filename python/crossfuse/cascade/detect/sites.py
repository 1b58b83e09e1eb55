"""Builds the sites of cascades out of groups of reductions, their terms and their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block
from crossfuse.calls import checked
from crossfuse.cascade.detect.group import Group, Member, elements, find_groups
from crossfuse.cascade.detect.loads import SPLIT, Load, loads_of, moved, refused, same, variables_of
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.detect.selection import Selection
from crossfuse.cascade.detect.terms import Reading, Symbols, is_kept, with_length
from crossfuse.cascade.expressions.tir import number
from crossfuse.cascade.spec import (
    Cascade,
    Monoid,
    OutputSite,
    Site,
    Stage,
    StageSite,
    check_exact,
    topk,
)

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

_NAMES = {"product": "prod"}


def monoid_of(program: Program, block: Block, term: sympy.Expr) -> Monoid:
    """The operator of a reduction of a term; refused if its initial value changes the result."""
    if block.combine == "topk":
        return topk(block.k)  # type: ignore[attr-defined]
    monoid = Monoid(_NAMES.get(block.combine, block.combine))
    start = number(block.initial)
    if start != monoid.identity and not _harmless(monoid, start, block, term):
        what = f"an initial value {start} of a {monoid.name}"
        limit = f"{monoid.identity}, which changes nothing"
        instead = f"start at {monoid.identity}, and combine the result with {start} afterwards"
        raise refused(f"{block.where}, buffer '{block.buffer.name}'", what, limit, instead)
    return monoid


def _harmless(monoid: Monoid, start: sympy.Expr, block: Block, term: sympy.Expr) -> bool:
    """Whether a maximum or minimum starts beyond all that it may meet."""
    if not monoid.ordered:
        return False
    lowest = -_largest(str(block.buffer.ty.dtype))
    if monoid.name in ("min", "argmin"):
        start, term = -start, -term
    if start <= lowest:
        return True
    return bool(start <= 0 and term.is_nonnegative and monoid.name in ("max", "min"))


def _largest(dtype: str) -> sympy.Expr:
    import ml_dtypes
    import numpy as np

    if "float" in dtype:
        value = float(ml_dtypes.finfo(getattr(ml_dtypes, dtype, dtype)).max)
        # As `number` reads it: the shortest decimal is not the number itself.
        return sympy.Rational(repr(value) if dtype == "float64" else str(np.float32(value)))
    return sympy.Integer(int(np.iinfo(dtype).max))


@dataclass(frozen=True, eq=False)
class Output:
    """An output of the function and the block that writes it."""

    #: The parameter.
    buffer: Any
    #: An element-wise block, or a reduction of the group.
    block: Block
    #: The group's variables for those of the block.
    binding: Mapping[Any, Any]

    @property
    def coordinates(self) -> tuple[Any, ...]:
        """Where it is stored, in the group's variables."""
        return tuple(self.binding.get(each, each) for each in self.block.coordinates)

    def value(self, program: Program) -> Any:
        """The stored value, in the block's variables."""
        if not self.block.combine:
            return program.value(self.block)
        return ir.tirx.BufferLoad(self.buffer, list(self.block.coordinates))


def outputs_of(program: Program, groups: Sequence[Group]) -> dict[int, list[Output]]:
    """Assign each output to the group that makes it, by the group's identity, in parameter order.

    The extents of groups get the loops of their outputs. Refused are outputs of no group or of
    several, and those that need two positions of the axis.
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
    """Whether an output is made of elements that a group reads along its axis."""
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
    """Refuse an output that is made of two positions of one tensor."""
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


@checked
def detect(func: PrimFunc) -> tuple[Site, ...]:
    """Find the cascades of a function.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form, unscheduled, with constant shapes: blocks that each write one buffer, or the
        two of an argmax or argmin. Its attribute ``crossfuse.nonnegative`` may name parameters that
        hold no negative number.

    Returns
    -------
    tuple[Site, ...]
        One for each set of reductions that share an axis, in program order: usually one. A site of
        a single stage is a plain reduction.

    Raises
    ------
    CascadeRefused
        If reductions depend on each other in another way; the reason, with block and buffer.

    Examples
    --------
    >>> from crossfuse.workload import cascade_build, cascades
    >>> func = cascade_build.prim_func(cascades.parse("softmax:rows=4,cols=64"))
    >>> [[stage.name for stage in site.cascade.stages] for site in detect(func)]
    [['m', 's']]
    """
    program = read_program(func)
    groups = find_groups(program)
    if not groups:
        limit, instead = "at least one reduction", "leave it to an element-wise kernel"
        raise refused("function", "no reduction", limit, instead)
    outputs = outputs_of(program, groups)
    return tuple(_Builder(program, each, outputs[id(each)]).site() for each in groups)


class _Builder:
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
            read = Reading(self.symbols, output.block, value, output.binding)
            self._check_rounding(output, read.cast)
            term = self._lengths(read.term)
            name = str(output.buffer.name)
            while name in made or name in rows:
                name += "_"
            (rows if self._along_axis(output) else made)[name] = term
            places.append(self._output(name, output))
        columned = any(each.columns for each in stages.values())
        cascade = Cascade(
            tuple(self.symbols.stages.values()),
            self.symbols.elements,
            self.symbols.invariants,
            made,
            rows,
            self.symbols.index,
            self.symbols.length,
            # Of tiles a first one is no load of a row.
            {} if self.symbols.producers or columned else self.symbols.firsts(),
        )
        site = Site(
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
        # One reduction of what is read as it is may be of flags that another function widens.
        if len(cascade.stages) > 1 or not cascade.stages[0].term.is_Symbol:
            check_exact(site)
        return site

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
        """Refuse a place that is anything but the position of an element on the axis."""
        place = block.place.value if isinstance(block.place, ir.tirx.Cast) else block.place
        at = moved(moved([place], member.binding, {}), self.values, self.extents)
        if not same(at, [self.axis]):
            places = block.buffer if block.places is None else block.places
            where = f"{block.where}, buffer '{places.name}'"
            instead = "keep positions, and look up what they stand for"
            raise refused(where, f"places {block.place}", "positions on the axis", instead)

    def _check_rounding(self, output: Output, cast: str) -> None:
        """Refuse what is rounded and computed with before it is stored: no term says so."""
        if cast and cast != str(output.buffer.ty.dtype) and is_kept(cast, self.program):
            where = f"{output.block.where}, buffer '{output.buffer.name}'"
            found = f"numbers that are rounded to {cast} and computed with"
            limit = "types that lose no more than those of the tensors, or the type that is stored"
            raise refused(where, found, limit, f"store {cast}, or round by arithmetic")

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
    """One loop over all reduced loops, and these in terms of it."""
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
