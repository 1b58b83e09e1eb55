"""Cuts attention and its output product in two, at the matrix that both share.

Attention stores a row for each sequence, head and query; the product reads a matrix, of which a row
holds all heads of a token. What lies between only moves elements, and goes: the stream stores its
tiles where the product reads them.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.access import is_reduction
from crossfuse.cascade.rewrite.rows_first import (
    RowsFirst,
    joined,
    needed_for,
    nest_of,
    operand_of,
    part_of,
    statements_of,
)
from crossfuse.cascade.rewrite.tiles import tiles_refused

#: Dimensions of what attention makes: sequences, heads, queries, columns of a head.
_DIMENSIONS = 4


def attention_first(func: Any) -> RowsFirst | None:
    """Cut a function at the left operand of its last product, which attention makes.

    The function is unscheduled, with one block for each operator. `rows` of the result makes the
    output of attention, [sequence, head, query, column], and `product` takes it as a matrix, which
    is what is passed. None if the operand is made otherwise, or not by copies of such an output.
    """
    root = func.body.block
    nests = [nest_of(each) for each in statements_of(root)]
    last = max((n for n, each in enumerate(nests) if each.reduced), default=0)
    matrix = operand_of(nests[last], func)
    if matrix is None:
        return None
    source, copies = _source(root, matrix)
    if source is None:
        return None
    needed = needed_for(nests[:last], frozenset([source]))
    copying = [n for n, each in enumerate(nests) if each.writes & frozenset(copies)]
    first = [nests[each] for each in needed]
    rest = [e for n, e in enumerate(nests) if n not in needed and n not in copying]
    others = frozenset().union(*(each.reads for each in rest))
    # Attention reduces to more than a number for each row, and nobody else reads what it makes.
    wide = max((each.wide for each in first if each.reduced), default=0)
    made = frozenset().union(*(each.writes for each in first))
    if wide < len(source.ty.shape) - 1 or (made | frozenset(copies[:-1])) & others:
        return None
    if sum(bool(each.reduced) for each in rest) != 1:
        return None
    passed = (matrix,)
    return RowsFirst(
        func,
        part_of(func, first, (source,), "rows"),
        part_of(func, rest, passed, "product"),
        passed,
    )


def attended(parts: RowsFirst, stream: Any) -> Any:
    """The whole function, with attention made by `stream`, which `tiled` wrote of `parts.rows`.

    It is sequential: the nests of the stream, which store the matrix, then those of the product.
    """
    return joined(parts, _as_matrix(stream, parts.passed[0]))


def _source(root: Any, matrix: Any) -> tuple[Any, list[Any]]:
    """What a matrix is a copy of, and what is stored on the way, the matrix last; None if none.

    Row ``b * queries + i`` and column ``h * columns + c`` must be that of ``[b, h, i, c]``.
    """
    copies: list[Any] = []
    wanted, indices, found = matrix, None, {}
    for block in _blocks(root):
        store = block.body
        if isinstance(store, ir.BufferStore):
            found[store.buffer] = block
    tokens, width = (ir.tirx.Var(name, "int32") for name in ("token", "column"))
    indices = [tokens, width]
    while wanted in found and _is_copy(found[wanted]):
        block = found[wanted]
        copies.insert(0, wanted)
        store = block.body
        values = dict(zip((each for each in store.indices), indices, strict=True))
        load = _load_of(store.value)

        def value(var: Any, known: dict[Any, Any] = values) -> Any:
            return next((e for v, e in known.items() if v.same_as(var)), var)

        indices = [ir.substitute(each, value) for each in load.indices]
        wanted = load.source
    if not copies or len(wanted.ty.shape) != _DIMENSIONS:
        return None, []
    if not _is_matrix(wanted, matrix, (tokens, width), indices):
        return None, []
    return wanted, copies


def _blocks(root: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(root.body, (ir.SBlock, found.append))
    return found


def _is_copy(block: Any) -> bool:
    """Whether a block stores elements of another tensor at other places, and does nothing else."""
    store = block.body
    plain = all(isinstance(each, ir.Var) for each in store.indices)
    return (
        plain and _load_of(store.value) is not None and not any(map(is_reduction, block.iter_vars))
    )


def _load_of(value: Any) -> Any:
    return value if isinstance(value, ir.TensorLoad) else None


def _is_matrix(source: Any, matrix: Any, places: tuple[Any, Any], indices: list[Any]) -> bool:
    """Whether elements of a tensor of four dimensions are where the stream would store them."""
    extents = [int(each) for each in source.ty.shape]
    own = [ir.tirx.Var(f"v{number}", "int32") for number in range(_DIMENSIONS)]
    known = ir.sym.Analyzer()
    for var, extent in zip(own, extents, strict=True):
        known.bind(var, ir.tvm.ir.Range(0, extent))
    at = dict(zip(places, _place(own, extents), strict=True))
    if [int(e) for e in matrix.ty.shape] != [extents[0] * extents[2], extents[1] * extents[3]]:
        return False
    return all(
        known.can_prove_equal(ir.substitute(each, lambda var: at.get(var, var)), var)
        for each, var in zip(indices, own, strict=True)
    )


def _place(indices: Any, extents: list[int]) -> tuple[Any, Any]:
    """Row and column of an element [sequence, head, query, column] in the matrix."""
    sequence, head, query, column = indices
    return sequence * extents[2] + query, head * extents[3] + column


def _as_matrix(stream: Any, matrix: Any) -> Any:
    """A function that stores its last parameter as a matrix of the shape and name of another."""
    made = stream.params[-1]
    extents = [int(each) for each in made.ty.shape]
    image = ir.tirx.decl_buffer(matrix.ty.shape, str(matrix.ty.dtype), str(matrix.name))

    def store(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if not node.buffer.same_as(made):
            return node
        return ir.BufferStore(image, node.value, list(_place(node.indices, extents)))

    def block(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        return ir.block_like(node, writes=[region(each) for each in node.writes])

    def region(each: Any) -> Any:
        if not each.source.same_as(made):
            return each
        first = _place([axis.min for axis in each.region], extents)
        sequence, head, query, column = (axis.extent for axis in each.region)
        if any(ir.constant(one) != 1 for one in (sequence, head)):
            raise tiles_refused(
                f"tensor '{made.name}'",
                f"stores of {sequence} sequences and {head} heads at once",
                "tiles of one head",
                "lower attention and its product as two functions",
            )
        both = zip(first, (query, column), strict=True)
        ranges = [ir.tvm.ir.Range.from_min_extent(start, extent) for start, extent in both]
        return ir.tirx.BufferRegion(image, ranges)

    body = ir.mutate(stream.body, (ir.BufferStore, store), (ir.SBlock, block))
    params = [*stream.params[:-1], image]
    return ir.PrimFunc(params, body, stream.ret_type, stream.attrs)
