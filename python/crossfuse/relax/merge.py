"""Calls of a dataflow block merged to one TIR function: which may be one, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

from crossfuse import _tvm as ir
from crossfuse.relax.graph import Graph, Node, emit_copies, fused_region, in_order


def merged(graph: Graph, members: Iterable[Node], name: str = "merged") -> Any:
    """Make one function of several calls, as TVM's ``FuseTIR`` does of what ``FuseOps`` groups.

    Members are calls of TIR functions, and elements of their tuples. The function has the blocks of
    all of them. Its parameters are `Graph.inputs`, then `Graph.outputs`; `Graph.numbers` are
    written where they are read.
    """
    nodes = in_order(members)
    numbers, outputs = graph.numbers(nodes), [each.var for each in graph.outputs(nodes)]
    inputs = (*graph.inputs(nodes), *numbers)
    callees = {each.value.args[0]: each.func for each in nodes if each.func is not None}
    builder = relax.BlockBuilder(tvm.IRModule(callees))
    params = [relax.Var(f"p{place}", each.ty) for place, each in enumerate(inputs)]
    image: dict[Any, Any] = dict(zip(inputs, params, strict=True))
    with builder.function(name, params, attrs={"Primitive": 1}, private=True):
        with builder.dataflow():
            emit_copies(builder, nodes, image, outputs)
        made = [image[each] for each in outputs]
        builder.emit_func_output(made[0] if len(made) == 1 else relax.Tuple(made))
    func = fused_region(builder, name, params, relax.transform.FuseTIR())
    return _with_numbers(func, len(inputs) - len(numbers), numbers)


def likeness(graph: Graph, members: Iterable[Node]) -> tuple[Any, ...]:
    """A key of what `merged` makes of several calls, but for names: equal for equal layers.

    To be compared within one graph: what is called, and where each argument comes from.
    """
    nodes = in_order(members)
    names: dict[Any, Any] = {var: -1 - at for at, var in enumerate(graph.inputs(nodes))}
    names |= {each: (str(each.ty), each.value.numpy().tobytes()) for each in graph.numbers(nodes)}
    names |= {each.var: at for at, each in enumerate(nodes)}
    calls = tuple(
        (
            each.callee if each.callee is not None else int(each.value.index),
            tuple(names[var] for var in each.reads),
        )
        for each in nodes
    )
    return calls, tuple(names[each.var] for each in graph.outputs(nodes))


def _with_numbers(func: Any, first: int, numbers: Sequence[Any]) -> Any:
    """Inline constants for parameters, from the parameter at `first` on.

    Detection recognises a mask only if it sees the number that takes the place of elements.
    """
    params = list(func.params)
    taken = params[first : first + len(numbers)]
    values = {
        buffer: ir.tirx.const(number.value.numpy().reshape(()).item(), str(buffer.ty.dtype))
        for buffer, number in zip(taken, numbers, strict=True)
    }

    def written(load: Any, mutator: Any) -> Any:
        return values[load.source] if load.source in values else mutator.default_mutate(load)

    def unread(block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        return ir.block_like(block, reads=[e for e in block.reads if e.source not in values])

    if not numbers:
        return func
    body = ir.mutate(func.body, (ir.TensorLoad, written), (ir.SBlock, unread))
    kept = [each for each in params if each not in values]
    return ir.PrimFunc(kept, body, func.ret_type, func.attrs)


# Sets of calls that become one function, and what lies between them in the datagraph.

#: Nodes that become one function.
Unit = frozenset[Node]


class Units:
    """The partition of a dataflow block's nodes into units, each to become one function.

    At first each node is a unit; a call with several results and the elements taken of its tuple
    are one.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of: dict[Node, Unit] = {}
        # Asked for far more often than units change.
        self._sources: dict[Unit, set[Unit]] = {}
        self._users: dict[Unit, set[Unit]] = {}
        # Sets of nodes are integers with a bit for each place.
        self._before = _closed(graph.nodes, graph.sources)
        self._behind = _closed(graph.nodes[::-1], graph.users)
        self._several: dict[Unit, int] = {}
        for node in graph.nodes:
            if node not in self.of:
                users = graph.users(node) if len(node.results) > 1 else ()
                self.claim([node, *(each for each in users if each.is_element)])

    def claim(self, nodes: Iterable[Node]) -> Unit:
        """Make nodes one unit, which contains the units that they were in as a whole."""
        unit = frozenset(nodes)
        around = {node for each in unit for node in (*self.graph.sources(each), each)}
        around |= {node for each in unit for node in self.graph.users(each)}
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
            found = {self.of[each] for node in unit for each in self.graph.sources(node)}
            self._sources[unit] = found - {unit}
        return self._sources[unit]

    def users(self, unit: Unit) -> set[Unit]:
        """Units that read results of a unit."""
        if unit not in self._users:
            found = {self.of[each] for node in unit for each in self.graph.users(node)}
            self._users[unit] = found - {unit}
        return self._users[unit]

    def joined(self, *units: Unit) -> Unit:
        """Units with all that needs results of one of them and makes what another one reads.

        Without these nodes, the fused function would need its own results.
        """
        start = frozenset(node for unit in units for node in unit)
        return start | frozenset(self._nodes(self._between(start)))

    def between(self, *units: Unit, of: Iterable[Unit]) -> list[Unit]:
        """Those of the units `of` that `joined` would take in."""
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
            yield self.graph.nodes[place]
            mask ^= 1 << place


def _closed(nodes: Iterable[Node], step: Callable[[Node], Iterable[Node]]) -> list[int]:
    """The nodes reached from each place, as bits; `nodes` has what `step` reaches first."""
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
    """Why nodes cannot be one function, whatever they compute; empty if they can."""
    for each in in_order(nodes):
        if each.reason:
            return f"{each.name}, which lies between: {each.reason}"
    return ""


def places(unit: Unit) -> tuple[int, int]:
    """First and last place of a unit in its block."""
    numbers = [each.place for each in unit]
    return min(numbers), max(numbers)


def name_of(unit: Unit) -> str:
    """Names of the functions that reduce; of a unit without reductions those of all."""
    nodes = in_order(unit)
    reducing = [each.name for each in nodes if each.reduces]
    return ", ".join(reducing or [each.name for each in nodes if each.func is not None])
