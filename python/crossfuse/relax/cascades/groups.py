"""Cascades over several calls of a dataflow block, with the kernels that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.relax.cascades.kernels import Cascades, Found, Kernel, once, swept
from crossfuse.relax.graph import Callee, Graph, Node, elements_of, in_order
from crossfuse.relax.merge import Unit, Units, likeness, merged, name_of, places, why_not

# Which calls of a dataflow block become one cascade: by what they read and over which loops.
#
# Reductions are taken together first if they share an axis, then those that make the elements of
# others, last the element-wise calls around them. Each step merges the functions and lets detection
# say what they are; no name of an operator matters.

#: float32 operations of an H100 per byte from memory, by its data sheet: its roofline's ridge.
_OPERATIONS = 16
#: Views behind one another that are looked through: torch expands, reshapes and permutes in a row.
_MOST_VIEWS = 4
#: Whether a variable is the result of an operator of the caller, and no part of one.
Known = Callable[[Any], bool]


class Growth:
    """Grows units of a dataflow block's calls until each is as large a cascade as it can be.

    Units in `done` are finished, and join no other. `steps` has, for each unit that reduces, the
    units that it was made of one after the other, and itself last. Of calls that are one operator
    of the caller, whose results alone are `known`, element-wise ones around a cascade are taken in
    together.
    """

    def __init__(
        self, graph: Graph, cascades: Cascades, known: Known, done: Iterable[Unit] = ()
    ) -> None:
        self.graph = graph
        self.cascades = cascades
        self.known = known
        self.units = Units(graph)
        self.steps: dict[Unit, list[Unit]] = {}
        self._found: dict[Unit, Found] = {}
        self._moved: dict[Callee, int] = {}
        self._tried: set[tuple[Unit, tuple[int, int]]] = set()
        self._apart: dict[Node, dict[Unit, tuple[int, str]]] = {}
        self._done = frozenset(map(self.units.claim, done))
        for unit in dict.fromkeys(self.units.of.values()):
            if any(each.reduces for each in unit) and unit not in self._done:
                self._keep(unit)

    def grow(self) -> None:
        """Join units wherever that saves bytes."""
        while self._each(self._join_axis) or self._each(self._join_producer):
            pass
        for unit in list(self.steps):
            found = self.found(unit)
            if not found.reason and not (found.plain and found.is_product):
                self._take_neighbours(unit)

    def found(self, unit: Unit) -> Found:
        """What detection finds of the merged calls, once for equal ones."""
        if unit not in self._found:
            alike = likeness(self.graph, unit)
            self._found[unit] = self.cascades.found_once(alike, lambda: self.function(unit))
        return self._found[unit]

    def function(self, unit: Unit) -> Any:
        """The calls of a unit as one function."""
        first = next(iter(unit))
        # A call may give one tensor twice, or a number; its kernel takes `Graph.inputs`.
        if len(unit) == 1 and first.reads == self.graph.inputs(unit):
            return first.func
        return merged(self.graph, unit)

    def before(self, unit: Unit) -> int:
        """Bytes that calls move unfused; views move nothing."""
        return sum(self._swept(each) for each in unit)

    def apart(self, unit: Unit) -> tuple[str, ...]:
        """Neighbours of a unit that were not taken in, each with the reason."""
        reasons: dict[Unit, tuple[int, str]] = {}
        for node in in_order(unit):
            for other, reason in self._apart.get(node, {}).items():
                if not other & unit:
                    reasons[other] = max(reason, reasons.get(other, reason))
        # Of a neighbour that grew the largest is named, with what says most.
        last = [each for each in reasons if not any(each < other for other in reasons)]
        return tuple(f"{name_of(each)}: {reasons[each][1]}" for each in sorted(last, key=places))

    def _swept(self, node: Node) -> int:
        if node.callee is None or node.is_view:
            return 0
        if node.callee not in self._moved:
            self._moved[node.callee] = swept(node.callee.func)
        return self._moved[node.callee]

    def _keep(self, unit: Unit) -> None:
        """Make a unit that replaces those it is made of."""
        self.units.claim(unit)
        parts = [each for each in self.steps if each <= unit]
        history = [step for part in parts for step in self.steps.pop(part)]
        self.steps[unit] = [*history, unit]

    def _each(self, join: Callable[[Unit, Unit], bool]) -> bool:
        """Join each unit that reduces with others as long as possible; whether any was."""
        waiting, changed = sorted(self.steps, key=lambda each: places(each)[1]), False
        while waiting:
            unit = waiting.pop(0)
            near = self._near(unit) if unit in self.steps and not self.found(unit).reason else []
            for other in near:
                if not self.found(other).reason and join(other, unit):
                    waiting.insert(0, self.units.of[next(iter(unit))])
                    changed = True
                    break
        return changed

    def _join_axis(self, one: Unit, other: Unit) -> bool:
        """Join units whose reductions share an axis."""
        first, second = self.found(one), self.found(other)
        depends = self.units.needs(one, other) or self.units.needs(other, one)
        if (first.is_product or second.is_product) and not depends:
            return False  # products that read one tensor stay products of their own
        producers = len(first.producers) + len(second.producers)
        due = (first.stages + second.stages, producers)
        wrong = "they do not reduce the same axis"
        # Two may read the same elements only behind what is made of them: x, and x * x.
        return self._join(due, wrong, one, other) or self._join(
            due, wrong, one, other, between=self._of_common(one, other)
        )

    def _join_producer(self, one: Unit, other: Unit) -> bool:
        """Join a reduction with the unit that it makes elements for."""
        first, second = self.found(one), self.found(other)
        if not first.plain or first.producers or not self.units.needs(other, one):
            return False
        if second.plain and second.is_product:
            return False  # two products in a row are a chain
        due = (second.stages, len(second.producers) + 1)
        return self._join(due, "it makes no elements of the axis", one, other)

    def _join(
        self, due: tuple[int, int], wrong: str, *units: Unit, between: Iterable[Unit] = ()
    ) -> bool:
        """Join units if they are one cascade that streams, and note why if they are not.

        It must have as many stages and producers as are `due`; else `wrong` is the reason.
        """
        parts = (*units, *between)
        if self.units.between(*parts, of=self._done):
            return False
        more = [each for each in self.units.between(*parts, of=self.steps) if self.found(each).site]
        if more:
            # One more reduction than is due: what lies between need not be made to know that.
            text = f"{name_of(more[0])}, which lies between, reduces too"
            self._note_each(units, 0, text)
            return False
        unit = self._with_constants(self.units.joined(*parts))
        if (unit, due) in self._tried:
            return False
        self._tried.add((unit, due))
        between_them = why_not(unit)
        weight, reason = (0, between_them) if between_them else self._against(unit, due, wrong)
        if reason:
            self._note_each(units, weight, reason)
            return False
        self._keep(unit)
        return True

    def _with_constants(self, unit: Unit) -> Unit:
        """A unit with the calls that read no tensor and that it alone reads, such as one of zeros.

        Detection sees their number then; a tensor could hold any. Infinities are made in two calls:
        TVM fills with finite numbers, which are then multiplied.
        """
        sources = {each for node in unit for each in self.graph.sources(node)} - unit
        for each in in_order(sources):
            made = self._made_of_number(each) if each.reads else frozenset({each})
            alone = all(unit.union(made).issuperset(self.graph.users(one)) for one in made)
            if alone and all(self.units.of[one] == {one} for one in made):
                unit |= made
        return unit

    def _made_of_number(self, node: Node) -> frozenset[Node]:
        """A node with those that it is made of; empty if they read anything, or fill nothing."""
        sources = self.graph.sources(node)
        if len(sources) < len(node.reads) or not (sources or _fills(node)):
            return frozenset()
        parts = [self._made_of_number(each) for each in sources]
        return frozenset({node}).union(*parts) if all(parts) else frozenset()

    def _note_each(self, units: Sequence[Unit], weight: int, reason: str) -> None:
        """Note for both of two units why they were not joined."""
        for one, other in zip(units, reversed(units), strict=True):
            self._note(one, other, weight, reason)

    def _note(self, unit: Unit, other: Unit, weight: int, reason: str) -> None:
        """Note why a unit was not joined with another; of several reasons the weightiest stays."""
        for node in unit:
            known = self._apart.setdefault(node, {})
            known[other] = max(known.get(other, (weight, reason)), (weight, reason))

    def _against(self, unit: Unit, due: tuple[int, int], wrong: str) -> tuple[int, str]:
        """Why calls are not one cascade that streams, with the weight of the reason."""
        found = self.found(unit)
        if found.reason:
            return 1, found.reason
        if (found.stages, len(found.producers)) != due:
            return 0, wrong
        reason = self.cascades.refusal(found)
        if not reason and once(found.func) >= self.before(unit):
            reason = "it would move as many bytes as before"
        return 2, reason

    def _near(self, unit: Unit) -> list[Unit]:
        """Reducing units that a unit reads through element-wise calls, or that read the same."""
        variables, found = self._upwards(unit)
        for node in {node for var in variables for node in self.graph.readers[var]}:
            found |= self._downwards(self.units.of[node])
        return sorted(found - {unit}, key=places, reverse=True)

    def _upwards(self, unit: Unit) -> tuple[set[Any], set[Unit]]:
        """All that a unit reads, through element-wise calls, and the reducing units among it."""
        variables, found, waiting = set(), set(), [unit]
        while waiting:
            each = waiting.pop()
            variables |= {var for node in each for var in node.reads}
            for source in self.units.sources(each):
                if source in self.steps:
                    found.add(source)
                elif source not in self._done and not why_not(source):
                    waiting.append(source)
        return variables, found

    def _of_common(self, one: Unit, other: Unit) -> set[Unit]:
        """Element-wise calls through which two units read the same variables.

        Taken are calls that read the nearest such variables, or what such calls make.
        """
        common = self._upwards(one)[0] & self._upwards(other)[0]
        found: set[Unit] = set()
        waiting = [one, other]
        while waiting:
            each = waiting.pop()
            for var in (var for node in each for var in node.reads if var not in common):
                source = self.units.of[self.graph.makers[var]] if var in self.graph.makers else each
                known = source is each or source in found or source in self.steps
                if not known and source not in self._done and not why_not(source):
                    found.add(source)
                    waiting.append(source)
        leading: set[Unit] = set()
        for each in sorted(found, key=places):
            reads = {var for node in each for var in node.reads}
            if reads & common or self.units.sources(each) & leading:
                leading.add(each)
        return leading

    def _downwards(self, unit: Unit) -> set[Unit]:
        """The first units that reduce what a unit makes; a unit that reduces is its own."""
        found, waiting = set(), [unit]
        while waiting:
            each = waiting.pop()
            if each in self.steps:
                found.add(each)
            elif each not in self._done and not why_not(each):
                waiting += self.units.users(each)
        return found

    def _take_neighbours(self, unit: Unit) -> None:
        """Take in element-wise calls around a cascade, as long as bytes are saved."""
        found = self.found(unit)
        due = (found.stages, len(found.producers))
        while unit in self.steps:
            size = len(unit)
            for other in self._neighbours(unit):
                worth = self._is_worth(unit, other)
                if worth and self._join(due, "it changes what is reduced", other, unit):
                    unit = self.units.of[next(iter(unit))]
                    break
            if len(unit) == size:
                return

    def _neighbours(self, unit: Unit) -> Iterator[Unit]:
        """Element-wise calls behind a cascade and before it, with views in between."""
        for step in (self.units.users, self.units.sources):
            for each in sorted(step(unit), key=places):
                for found in _beyond_views(each, step, unit):
                    other = self._with_operators(found, unit)
                    parts = {self.units.of[node] for node in other}
                    taken = parts & (self.steps.keys() | self._done)
                    if not (taken or why_not(other)):
                        yield other

    def _with_operators(self, other: Unit, unit: Unit) -> Unit:
        """Neighbours of a unit with all calls of the operators that they are parts of."""
        pending = list(other)
        while pending:
            node = pending.pop()
            near = [each for each in self.graph.sources(node) if not self.known(each.var)]
            near += self.graph.users(node) if not self.known(node.var) else ()
            for each in near:
                if each not in other | unit:
                    pending += self.units.of[each]
                    other |= self.units.of[each]
        return other

    def _is_worth(self, unit: Unit, other: Unit) -> bool:
        """Whether recomputing a call for other rows takes less time than the bytes it saves."""
        site = self.found(unit).site
        assert site is not None
        parts = {self.units.of[node] for node in other}
        if self.units.users(unit) & parts:
            return True
        turns = int(site.extents[site.axis])
        for row in site.rows:
            turns *= int(site.extents[row])
        calls = [each for each in other if each.func is not None]
        again = sum(max(0, turns - elements_of(each)) * _operations(each.func) for each in calls)
        saved = self.before(other)
        if again > _OPERATIONS * saved:
            text = f"for each row again it would take {again} operations, to save {saved} bytes"
            self._note(unit, other, 2, text)
        return again <= _OPERATIONS * saved


def _is_view(unit: Unit) -> bool:
    return all(each.is_view for each in unit)


def _beyond_views(first: Unit, step: Callable[[Unit], set[Unit]], start: Unit) -> Iterator[Unit]:
    """A unit, or views and each unit behind them: a view alone saves nothing, what follows may."""
    waiting = [(first, first)]
    while waiting:
        last, found = waiting.pop(0)
        if not _is_view(last):
            yield found
        elif len(found) <= _MOST_VIEWS:
            waiting += [(each, found | each) for each in sorted(step(last) - {start}, key=places)]


def _operations(func: Any) -> int:
    """Floating-point operations that make one element; conversions do not count."""
    found: list[Any] = []
    kinds = (ir.tirx.Add, ir.tirx.Sub, ir.tirx.Mul, ir.tirx.Div, ir.tirx.Max, ir.tirx.Min, ir.Call)
    ir.walk(func, *((kind, found.append) for kind in kinds))
    return sum("float" in str(getattr(each, "ty", "")) for each in found)


@dataclass(frozen=True, eq=False)
class CascadeGroup:
    """Calls that become one kernel."""

    members: Unit
    #: What detection found of the merged calls.
    found: Found
    kernel: Kernel
    #: Neighbours that were not taken in, each with the reason.
    apart: tuple[str, ...]
    #: Bytes that the calls move unfused, see `crossfuse.relax.cascades.kernels`.
    before: int


@dataclass(frozen=True)
class Refused:
    """Calls that are one cascade without a kernel."""

    #: Names of the functions.
    calls: tuple[str, ...]
    reason: str


def find_cascades(
    graph: Graph, cascades: Cascades, known: Known = lambda _: True
) -> tuple[tuple[CascadeGroup, ...], tuple[Refused, ...]]:
    """Find the cascades of a dataflow block, and those that were tried but have no kernel.

    Where calls that were joined have no kernel, the largest part that has one is taken, and the
    rest is tried again without what is known to fail. Groups are disjoint, in the order of their
    last calls. Element-wise calls around a cascade join it by whole operators, see `Growth`.
    """
    groups: list[CascadeGroup] = []
    refused: dict[Unit, Refused] = {}
    failed = True
    while failed:
        growth = Growth(graph, cascades, known, [each.members for each in groups])
        growth.grow()
        failed = False
        for steps in growth.steps.values():
            kept, reason = _largest(growth, cascades, steps)
            if reason and steps[-1] not in refused:
                # What grew so is not taken together again: its kernel is known to fail. What is
                # kept of it may grow in another way.
                refused[steps[-1]] = Refused(calls_of(steps[-1]), reason)
                failed = True
            elif kept:
                groups.append(kept)
    groups.sort(key=lambda each: places(each.members)[1])
    return tuple(groups), tuple(dict.fromkeys(refused.values()))


def _largest(
    growth: Growth, cascades: Cascades, steps: list[Unit]
) -> tuple[CascadeGroup | None, str]:
    """The group of the last step that has a kernel, and why the very last step has none."""
    reason = ""
    for step in reversed(steps):
        found = growth.found(step)
        if found.reason or found.plain:
            continue
        kernel = cascades.kernel(found)
        if isinstance(kernel, Kernel):
            group = CascadeGroup(step, found, kernel, growth.apart(step), growth.before(step))
            return group, reason
        reason = reason or kernel
    return None, reason


def calls_of(unit: Unit) -> tuple[str, ...]:
    """Names of the functions that a unit calls, in order."""
    nodes = in_order(unit)
    return tuple(each.name for each in nodes if each.func is not None)


def _fills(node: Node) -> bool:
    """Whether a call makes a tensor of one floating-point number; positions are none."""
    stores = [] if node.func is None else list(ir.nodes(node.func.body, ir.BufferStore))
    return bool(stores) and all(isinstance(each.value, ir.tirx.FloatImm) for each in stores)
