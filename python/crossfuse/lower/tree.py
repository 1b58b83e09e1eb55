"""Walks statements together with the loops, conditions and blocks around them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.scheduled import analyzer as analyzer
from crossfuse.markers import cluster_axis, thread_tag

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
