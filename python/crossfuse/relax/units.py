"""Calls that are taken together, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from crossfuse.relax.calls import Flow, Node

#: Nodes that become one function.
Unit = frozenset[Node]


class Units:
    """Which nodes of a dataflow block are taken together.

    Parameters
    ----------
    flow : Flow
        The block. At first each node is a unit; of a call with several results, all of them are.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.of: dict[Node, Unit] = {}
        # Asked for far more often than units change.
        self._sources: dict[Unit, set[Unit]] = {}
        self._users: dict[Unit, set[Unit]] = {}
        # Sets of nodes are integers with a bit for each place.
        self._before = _closed(flow.nodes, flow.sources)
        self._behind = _closed(flow.nodes[::-1], flow.users)
        self._several: dict[Unit, int] = {}
        for node in flow.nodes:
            if node not in self.of:
                users = flow.users(node) if len(node.results) > 1 else ()
                self.claim([node, *(each for each in users if each.is_element)])

    def claim(self, nodes: Iterable[Node]) -> Unit:
        """Take nodes together; those that were in a unit leave it to nothing else."""
        unit = frozenset(nodes)
        around = {node for each in unit for node in (*self.flow.sources(each), each)}
        around |= {node for each in unit for node in self.flow.users(each)}
        for each in {self.of[node] for node in around if node in self.of}:
            self._sources.pop(each, None)
            self._users.pop(each, None)
            if each & unit:
                self._several.pop(each, None)
        self.of |= dict.fromkeys(unit, unit)
        if len(unit) > 1:
            self._several[unit] = _mask(unit)
        return unit

    def sources(self, unit: Unit) -> set[Unit]:
        """Units whose results a unit reads."""
        if unit not in self._sources:
            found = {self.of[each] for node in unit for each in self.flow.sources(node)}
            self._sources[unit] = found - {unit}
        return self._sources[unit]

    def users(self, unit: Unit) -> set[Unit]:
        """Units that read results of a unit."""
        if unit not in self._users:
            found = {self.of[each] for node in unit for each in self.flow.users(node)}
            self._users[unit] = found - {unit}
        return self._users[unit]

    def joined(self, *units: Unit) -> Unit:
        """Units, and all that needs results of one of them and makes what another one reads.

        Without these, what is fused would need its own results.
        """
        start = frozenset(node for unit in units for node in unit)
        return start | frozenset(self._nodes(self._between(start)))

    def between(self, *units: Unit, of: Iterable[Unit]) -> list[Unit]:
        """Units, of some, that `joined` would take in."""
        start = frozenset(node for unit in units for node in unit)
        between = self._between(start) & ~_mask(start)
        return [each for each in of if between & _mask(each)]

    def _between(self, start: frozenset[Node]) -> int:
        return self._reached(start, self._behind) & self._reached(start, self._before)

    def needs(self, unit: Unit, other: Unit) -> bool:
        """Whether a unit needs results of another one, directly or through others."""
        return bool(self._reached(unit, self._before) & _mask(other))

    def _reached(self, start: Iterable[Node], closed: Sequence[int]) -> int:
        """Nodes of all units on one side of nodes, as bits."""
        found = 0
        for node in start:
            found |= closed[node.place]
        waiting, changed = dict(self._several), True
        while changed:
            # Of a unit that is reached every node is, and what these reach.
            inside = [each for each, mask in waiting.items() if mask & found]
            for unit in inside:
                found |= waiting.pop(unit)
                for node in unit:
                    found |= closed[node.place]
            changed = bool(inside)
        return found

    def _nodes(self, mask: int) -> Iterator[Node]:
        while mask:
            place = mask.bit_length() - 1
            yield self.flow.nodes[place]
            mask ^= 1 << place


def _closed(nodes: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> list[int]:
    """For each place the nodes that are reached from there, as bits; what is near comes first."""
    found: dict[int, int] = {}
    for node in nodes:
        reached = 0
        for each in step(node):
            reached |= found[each.place] | 1 << each.place
        found[node.place] = reached
    return [found[place] for place in sorted(found)]


def _mask(nodes: Iterable[Node]) -> int:
    mask = 0
    for each in nodes:
        mask |= 1 << each.place
    return mask


def why_not(nodes: Iterable[Node]) -> str:
    """Why nodes cannot be one function, whatever they compute; empty if they can.

    Parameters
    ----------
    nodes : Iterable[Node]
        What is to be taken together.
    """
    for each in sorted(nodes, key=lambda each: each.place):
        if each.reason:
            return f"{each.name}, which lies between: {each.reason}"
    return ""


def places(unit: Unit) -> tuple[int, int]:
    """First and last place of a unit in its block."""
    numbers = [each.place for each in unit]
    return min(numbers), max(numbers)


def name_of(unit: Unit) -> str:
    """Functions that reduce, for people; of a unit without any all functions."""
    nodes = sorted(unit, key=lambda each: each.place)
    reducing = [each.name for each in nodes if each.reduces]
    return ", ".join(reducing or [each.name for each in nodes if each.func is not None])
