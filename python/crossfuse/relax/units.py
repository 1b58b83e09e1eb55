"""Calls that are taken together, and what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
        for node in flow.nodes:
            if node not in self.of:
                users = flow.users(node) if len(node.results) > 1 else ()
                self.claim([node, *(each for each in users if each.is_element)])

    def claim(self, nodes: Iterable[Node]) -> Unit:
        """Take nodes together; those that were in a unit leave it to nothing else."""
        unit = frozenset(nodes)
        self.of |= dict.fromkeys(unit, unit)
        self._sources.clear()
        self._users.clear()
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
        start = set(units)
        behind = self._reached(start, self.users)
        before = self._reached(start, self.sources)
        return frozenset(node for unit in start | (behind & before) for node in unit)

    def needs(self, unit: Unit, other: Unit) -> bool:
        """Whether a unit needs results of another one, directly or through others."""
        return other in self._reached({unit}, self.sources)

    def _reached(self, start: set[Unit], step: Callable[[Unit], set[Unit]]) -> set[Unit]:
        found: set[Unit] = set()
        waiting = list(start)
        while waiting:
            for each in step(waiting.pop()):
                if each not in found:
                    found.add(each)
                    waiting.append(each)
        return found


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
