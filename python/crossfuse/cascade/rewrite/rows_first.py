"""A product whose left operand a cascade makes, row by row: rows first, then the product.

A norm or a quantiser in front of a product reads whole rows before it knows its first element. So
the function is cut where the product reads: what makes the rows is a cascade of its own, which
streams, and what is left is a product as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.facts import is_reduction
from crossfuse.cascade.rewrite.tiles import refused


@dataclass(frozen=True, eq=False)
class RowsFirst:
    """A function in two, cut at the left operand of its product.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        The whole.
    rows : tvm.tirx.PrimFunc
        What makes the operand: a cascade, whose outputs are `passed`.
    product : tvm.tirx.PrimFunc
        The rest, of which `passed` are parameters.
    passed : tuple[tvm.tirx.Buffer, ...]
        What the first function makes for the second, in program order.
    """

    function: Any
    rows: Any
    product: Any
    passed: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Nest:
    """A statement of the function with what it reads and writes, and how many loops it reduces.

    Of the others `wide` have more than one iteration: sums may keep the dimension that they reduce.
    """

    node: Any
    reads: frozenset[Any]
    writes: frozenset[Any]
    spatial: int
    reduced: int
    wide: int


def rows_first(func: Any) -> RowsFirst | None:
    """Cut a function at the left operand of its last product.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        In s_tir form, unscheduled, one block for each operator.

    Returns
    -------
    RowsFirst | None
        None if its last reduction is no product of an intermediate and a parameter, or it takes
        other than reductions to one number a row to make that.
    """
    root = func.body.block
    nests = [_nest(each) for each in _statements(root)]
    last = max((n for n, each in enumerate(nests) if each.reduced), default=0)
    operand = _operand(nests[last], func)
    if operand is None:
        return None
    needed = _needed(nests[:last], frozenset([operand]))
    first = [nests[each] for each in needed]
    rest = [each for number, each in enumerate(nests) if number not in needed]
    # One number a row: what reduces to more is a product itself.
    reductions = [each.wide for each in first if each.reduced]
    others = [each for each in rest if each.reduced]
    if not reductions or max(reductions) >= len(operand.ty.shape) or len(others) > 1:
        return None
    read = frozenset().union(*(each.reads for each in rest))
    passed = tuple(each for each in root.alloc_buffers if each in read and _is_made(each, first))
    return RowsFirst(
        func, _part(func, first, passed, "rows"), _part(func, rest, passed, "product"), passed
    )


def joined(parts: RowsFirst, stream: Any) -> Any:
    """The whole function, with another way to make the operand.

    Parameters
    ----------
    parts : RowsFirst
        The function.
    stream : tvm.tirx.PrimFunc
        What does what `parts.rows` does, with parameters of the same names.

    Returns
    -------
    tvm.tirx.PrimFunc
        Sequential: the nests of the stream, then those of the product.

    Raises
    ------
    CascadeRefused
        If a block has a name of both.
    """
    known = {str(each.name): each for each in (*parts.rows.params, *parts.passed)}
    images = {each: known[str(each.name)] for each in stream.params}
    body = ir.substitute(stream.body, lambda var: images.get(var, var)).block
    rest = parts.product.body.block
    _check_names(body, rest)
    root = ir.block_like(
        rest,
        body=ir.SeqStmt([*_statements(body), *_statements(rest)]),
        alloc_buffers=[*parts.passed, *body.alloc_buffers, *rest.alloc_buffers],
    )
    whole = ir.SBlockRealize([], ir.tirx.const(1, "bool"), root)
    made = ir.with_body(parts.function, whole)
    for name, value in dict(stream.attrs or {}).items():
        if made.attrs is None or name not in made.attrs:
            made = made.with_attr(name, value)
    return made


def _statements(root: Any) -> list[Any]:
    return list(root.body.seq) if isinstance(root.body, ir.SeqStmt) else [root.body]


def _nest(node: Any) -> _Nest:
    reads: list[Any] = []
    writes: list[Any] = []
    blocks: list[Any] = []
    ir.walk(
        node,
        (ir.TensorLoad, lambda load: reads.append(load.source)),
        (ir.BufferStore, lambda store: writes.append(store.buffer)),
        (ir.SBlock, blocks.append),
    )
    iters = [each for block in blocks for each in block.iter_vars]
    reduced = sum(is_reduction(each) for each in iters)
    kept = len(iters) - reduced
    single = sum(ir.constant(each.dom.extent) == 1 and not is_reduction(each) for each in iters)
    return _Nest(node, frozenset(reads), frozenset(writes), kept, reduced, kept - single)


def _operand(nest: _Nest, func: Any) -> Any:
    """The matrix that a product of a matrix and a parameter reads; None of anything else."""
    read = nest.reads - nest.writes
    made = [each for each in func.body.block.alloc_buffers if each in read]
    if (nest.spatial, nest.reduced, len(read), len(made)) != (2, 1, 2, 1):
        return None
    return made[0]


def _needed(nests: list[_Nest], wanted: frozenset[Any]) -> list[int]:
    """Numbers of the nests that it takes to make buffers."""
    found: list[int] = []
    for number in reversed(range(len(nests))):
        if nests[number].writes & wanted:
            found.insert(0, number)
            wanted |= nests[number].reads
    return found


def _is_made(buffer: Any, nests: list[_Nest]) -> bool:
    return any(buffer in each.writes for each in nests)


def _part(func: Any, nests: list[_Nest], passed: tuple[Any, ...], name: str) -> Any:
    """A function of some of the nests; what passes from one to the other is a parameter."""
    root = func.body.block
    used = frozenset().union(*(each.reads | each.writes for each in nests))
    outputs = [each for each in passed if _is_made(each, nests)]
    inputs = [each for each in passed if each in used and each not in outputs]
    given = [each for each in func.params if each in used]
    own = [each for each in root.alloc_buffers if each in used and each not in passed]
    nodes = [each.node for each in nests]
    whole = ir.SeqStmt(nodes) if len(nodes) > 1 else nodes[0]
    block = ir.block_like(root, body=whole, alloc_buffers=own)
    body = ir.SBlockRealize([], ir.tirx.const(1, "bool"), block)
    made = ir.PrimFunc([*inputs, *given, *outputs], body, func.ret_type, func.attrs)
    return made.with_attr("global_symbol", name)


def _check_names(stream: Any, rest: Any) -> None:
    """Schedules name blocks."""
    both = _block_names(stream) & _block_names(rest)
    if both:
        raise refused(
            f"block '{min(both)}'",
            "a name that a block of the stream has",
            "blocks by names of their own",
            "rename it",
        )


def _block_names(root: Any) -> set[str]:
    blocks: list[Any] = []
    ir.walk(root.body, (ir.SBlock, blocks.append))
    return {str(each.name_hint) for each in blocks}
