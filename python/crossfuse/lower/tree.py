"""Walks statements together with the loops, conditions and blocks around them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import analyzer as analyzer
from crossfuse.markers import cluster_axis, thread_tag

if TYPE_CHECKING:
    import numpy as np


#: Bits of the access mask of ``tvm_access_ptr``.
_READS, _WRITES = 1, 2
_SOURCE = re.compile(r', source_code="(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Site:
    """A statement and what encloses it."""

    #: Of a compound statement, only what it evaluates itself is meant.
    node: Any
    #: Enclosing statements, outermost first.
    path: tuple[Any, ...]

    @property
    def loops(self) -> tuple[Any, ...]:
        """Enclosing loops, outermost first."""
        return tuple(each for each in self.path if isinstance(each, ir.For))

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Conditions and predicates that are known to hold here."""
        found: list[Any] = []
        for each, inner in zip(self.path, (*self.path[1:], self.node), strict=True):
            if isinstance(each, ir.SBlockRealize):
                found.append(each.predicate)
            elif isinstance(each, ir.IfThenElse) and not inner.same_as(each.else_case):
                found.append(each.condition)
        return tuple(found)

    @property
    def text(self) -> str:
        """The statement as TVMScript, on one line."""
        return text_of(self.node)


@dataclass(frozen=True)
class Access:
    """One use of a buffer."""

    #: Of a view made by ``match_buffer``, the buffer it looks at.
    buffer: Any
    #: None if a pointer or a view hides them.
    indices: tuple[Any, ...] | None
    read: bool
    write: bool
    #: The statement that uses it.
    site: Site

    @property
    def loops(self) -> tuple[Any, ...]:
        """Enclosing loops, outermost first."""
        return self.site.loops

    def cluster_loop(self, axis: str) -> Any:
        """The innermost enclosing loop bound to a cluster axis, or None."""
        return coordinate_loop(self.loops, f"cluster.{axis}")


def children(node: Any) -> list[Any]:
    """Statements directly inside a statement."""
    if isinstance(node, ir.SeqStmt):
        return list(node.seq)
    if isinstance(node, ir.SBlockRealize):
        return [node.block]
    if isinstance(node, ir.SBlock):
        return [*([] if node.init is None else [node.init]), node.body]
    if isinstance(node, ir.IfThenElse):
        return [node.then_case, *([] if node.else_case is None else [node.else_case])]
    body = getattr(node, "body", None)
    return [] if body is None else [body]


def evaluated(node: Any) -> list[Any]:
    """Expressions that a statement evaluates itself, without the statements inside it."""
    if isinstance(node, ir.BufferStore):
        return [node.value, *node.indices]
    if isinstance(node, ir.For):
        return [node.min, node.extent, *([] if node.step is None else [node.step])]
    if isinstance(node, ir.SBlockRealize):
        return [*node.iter_values, node.predicate]
    names = ("value", "condition", "data")
    return [getattr(node, name) for name in names if getattr(node, name, None) is not None]


def sites(body: Any) -> list[Site]:
    """All statements below `body` that evaluate something, in program order."""
    found: list[Site] = []

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        if evaluated(node):
            found.append(Site(node, path))
        for child in children(node):
            visit(child, (*path, node))

    visit(body, ())
    return found


def accesses(body: Any) -> list[Access]:
    """All uses of buffers below `body`, in program order."""
    views = _views(body)
    found: list[Access] = []
    for site in sites(body):
        for expression in evaluated(site.node):
            _add_uses(found, views, site, expression)
        if isinstance(site.node, ir.BufferStore):
            found.append(_access(views, site, site.node.buffer, site.node.indices, _WRITES))
    return found


def coordinate_loop(loops: tuple[Any, ...], tag: str) -> Any:
    """The innermost loop bound to a coordinate (``"blockIdx.x"``, ``"cluster.y"``), or None."""
    return next((loop for loop in reversed(loops) if coordinate(loop) == tag), None)


def coordinate(loop: Any) -> str:
    """Coordinate that a loop is bound to, such as ``"cluster.x"``; empty for a plain loop."""
    axis = cluster_axis(loop)
    return thread_tag(loop) if axis is None else f"cluster.{axis}"


def bounds(loops: Iterable[Any]) -> dict[Any, tuple[int | None, int | None]]:
    """First value and extent of each loop's variable, None where not constant."""
    return {each.loop_var: (ir.constant(each.min), ir.constant(each.extent)) for each in loops}


def is_executed(node: Any) -> bool:
    """Whether the body of a compound statement runs at least once for certain: that of a loop."""
    return isinstance(node, ir.For) and (ir.constant(node.extent) or 0) > 0


def contains_cluster(node: Any) -> bool:
    """Whether a cluster-bound loop stands at or below a statement."""
    return any(map(cluster_axis, ir.nodes(node, ir.For)))


def text_of(node: Any) -> str:
    """A statement as TVMScript, on one line, without the source text of helpers that it calls."""
    lines = [line.strip() for line in str(node.script()).strip().splitlines()]
    return _SOURCE.sub("", lines[0 if children(node) else -1])


def buffer_behind(pointer: Any) -> Any:
    """The buffer whose data a pointer expression is, or None."""
    if is_call(pointer, "tirx.buffer_data"):
        return buffer_behind(pointer.args[0])
    return pointer if isinstance(pointer, ir.Var) and ir.is_buffer_var(pointer) else None


def is_call(value: Any, name: str) -> bool:
    """Whether an expression calls the operator `name`."""
    return isinstance(value, ir.Call) and isinstance(value.op, ir.Op) and value.op.name == name


def _add_uses(found: list[Access], views: dict[Any, Any], site: Site, expression: Any) -> None:
    seen: list[Any] = []

    def visit_call(call: Any) -> None:
        if is_call(call, "tirx.address_of") and isinstance(call.args[0], ir.TensorLoad):
            seen.append(call.args[0])
            found.append(_access(views, site, call.args[0].source, None, _READS | _WRITES))
        elif is_call(call, "tirx.tvm_access_ptr") and buffer_behind(call.args[1]) is not None:
            seen.append(call.args[1])
            mask = ir.constant(call.args[4]) or _READS | _WRITES
            found.append(_access(views, site, buffer_behind(call.args[1]), None, mask))

    def visit_data(call: Any) -> None:
        if is_call(call, "tirx.buffer_data") and not any(call.same_as(each) for each in seen):
            found.append(_access(views, site, call.args[0], None, _READS | _WRITES))

    def visit_load(load: Any) -> None:
        if not any(load.same_as(each) for each in seen) and ir.is_buffer_var(load.source):
            found.append(_access(views, site, load.source, load.indices, _READS))

    ir.walk(expression, (ir.Call, visit_call))
    ir.walk(expression, (ir.Call, visit_data))
    ir.walk(expression, (ir.TensorLoad, visit_load))


def _access(views: dict[Any, Any], site: Site, buffer: Any, indices: Any, mask: int) -> Access:
    hidden = indices is None or buffer in views
    where = None if hidden else tuple(indices)
    return Access(views.get(buffer, buffer), where, bool(mask & _READS), bool(mask & _WRITES), site)


def _views(body: Any) -> dict[Any, Any]:
    """Views made by ``match_buffer``, each with the allocated buffer it looks at."""
    views: dict[Any, Any] = {}
    for block in ir.nodes(body, ir.SBlock):
        for match in block.match_buffers:
            source = match.source.source
            views[match.buffer] = views.get(source, source)
    return views


# Dissolves blocks that hold other blocks: their statements take their place.
#
# A schedule binds loops around a block that holds a whole nest, because then it need not look into
# the nest. Lowerings that read a nest statement by statement read it without that block.


def open_blocks(func: Any) -> Any:
    """Dissolve all blocks that hold other blocks, except the root.

    Buffers of dissolved blocks move to the root; their variables are replaced by their values.
    Blocks with conditions or initial values stay.
    """
    root = func.body.block
    buffers: list[Any] = []

    def visit(realize: Any, mutator: Any) -> Any:
        realize = mutator.default_mutate(realize)
        block = realize.block
        if block.same_as(root) or not _is_opened(realize):
            return realize
        buffers.extend(block.alloc_buffers)
        bound = {
            each.var: value
            for each, value in zip(block.iter_vars, realize.iter_values, strict=True)
        }
        return ir.substitute(block.body, bound)

    body = ir.mutate(root.body, (ir.SBlockRealize, visit))
    if not buffers and body.same_as(root.body):
        return func
    made = ir.block_like(root, body=body, alloc_buffers=[*root.alloc_buffers, *buffers])
    whole = ir.SBlockRealize([], func.body.predicate, made)
    return ir.with_body(func, whole)


def _is_opened(realize: Any) -> bool:
    block = realize.block
    plain = block.init is None and not len(block.match_buffers) and not len(block.annotations)
    holds_blocks = bool(ir.nodes(block.body, ir.SBlockRealize))
    return plain and ir.constant(realize.predicate) == 1 and holds_blocks


# Which elements a store writes and which thread writes them, by enumeration.
#
# TVM's affine analysis proves most stores distinct and gives up on some that are. Extents are
# constant, so what it cannot prove is counted.

#: Variables of loops, each with its first value and its extent; None where that is not constant.
Bounds = Mapping[Any, tuple[int | None, int | None]]

#: Iterations that are enumerated at most.
MAX_ITERATIONS = 1 << 22


@dataclass(frozen=True)
class StoredElements:
    """Pairs of an element that a store writes and the parallel iteration that writes it."""

    #: Indices, one column for each element.
    elements: np.ndarray
    #: Number of the parallel iteration, for each column.
    actors: np.ndarray

    @staticmethod
    def joined(stores: Sequence[StoredElements]) -> StoredElements:
        """The writes of several stores of the same parallel loops together."""
        import numpy as np

        return StoredElements(
            np.concatenate([each.elements for each in stores], axis=1),
            np.concatenate([each.actors for each in stores]),
        )

    def of_several_actors(self) -> np.ndarray:
        """Elements that different parallel iterations store, by column."""
        import numpy as np

        order = np.lexsort((self.actors, *self.elements))
        elements, actors = self.elements[:, order], self.actors[order]
        same = (np.diff(elements, axis=1) == 0).all(axis=0)
        return elements[:, 1:][:, same & (np.diff(actors) != 0)]


def stored_elements(
    indices: Sequence[Any],
    parallel: Bounds,
    serial: Bounds,
    conditions: Iterable[Any],
) -> StoredElements | None:
    """Enumerate the elements that a store writes, and the parallel iterations that write them.

    `parallel` loops are those bound to CTAs or threads. Conditions on other variables are left out,
    so that more may be found than is stored. None where there are too many iterations or no
    constant number of them, or an expression has a node that is not evaluated here.
    """
    import numpy as np

    loops = {**parallel, **serial}
    iterations = _iterations(loops)
    if iterations is None:
        return None
    values, shape = iterations
    try:
        executed = np.broadcast_to(_value(_decided(conditions, loops), values), shape)
        columns = [np.broadcast_to(_value(each, values), shape).ravel() for each in indices]
    except _Unknown:
        return None
    executed = executed.astype(bool).ravel()
    width = int(np.prod(shape[: len(parallel)], dtype=np.int64))
    actors = np.repeat(np.arange(width), executed.size // max(width, 1))
    return StoredElements(np.stack(columns)[:, executed], actors[executed])


def implies(premise: Any, conclusion: Any, loops: Bounds) -> bool:
    """Whether enumeration shows that a condition holds wherever another does."""
    import numpy as np

    used = {var for each in (premise, conclusion) for var in ir.variables(each)}
    known = {var: bound for var, bound in loops.items() if var in used}
    iterations = _iterations(known)
    if len(known) < len(used) or iterations is None:
        return False
    values, _ = iterations
    try:
        holds, wanted = _value(premise, values), _value(conclusion, values)
    except _Unknown:
        return False
    return bool(np.all(np.logical_not(holds) | wanted))


def are_apart(steps: Iterable[tuple[int, int]]) -> bool:
    """Whether each step exceeds all that smaller ones reach together, so that all sums differ.

    A step comes with the number of its multiples, from 0 on; a sum has one multiple of each.
    """
    reached = 0
    for step, count in sorted(steps, key=operator.itemgetter(0)):
        if step <= reached:
            return False
        reached += step * (count - 1)
    return True


def _iterations(loops: Bounds) -> tuple[dict[Any, Any], tuple[int, ...]] | None:
    """Values of each variable over all iterations, and the number of each variable's values.

    Shapes of values broadcast against each other. None where there are too many iterations or no
    constant number of them.
    """
    import numpy as np

    starts = [start for start, _ in loops.values() if start is not None]
    shape = tuple(extent for _, extent in loops.values() if extent)
    if len(starts) < len(loops) or len(shape) < len(loops):
        return None
    if np.prod(shape, dtype=np.int64) > MAX_ITERATIONS:
        return None
    counters = np.indices(shape, dtype=np.int64, sparse=True)
    values = {
        variable: counter + start
        for variable, start, counter in zip(loops, starts, counters, strict=True)
    }
    return values, shape


def _decided(conditions: Iterable[Any], loops: Bounds) -> Any:
    """The terms of conditions that depend on variables of the loops alone."""
    return ir.conjunction(
        term
        for condition in conditions
        for term in ir.terms(condition)
        if all(var in loops for var in ir.variables(term))
    )


class _Unknown(Exception):
    """An expression has a node that is not evaluated here."""


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
    "And": operator.and_,
    "Or": operator.or_,
}


def _value(expression: Any, values: Mapping[Any, Any]) -> Any:
    import numpy as np

    number = ir.constant(expression)
    if number is not None:
        return np.int64(number)
    if isinstance(expression, ir.Var):
        if expression not in values:
            raise _Unknown
        return values[expression]
    kind = type(expression).__name__
    if kind in ("Min", "Max"):
        pick = np.minimum if kind == "Min" else np.maximum
        return pick(_value(expression.a, values), _value(expression.b, values))
    if kind in _BINARY:
        return _BINARY[kind](_value(expression.a, values), _value(expression.b, values))
    raise _Unknown
