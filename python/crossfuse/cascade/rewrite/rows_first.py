"""Finds cascades with products behind them, and cuts such functions in two.

A norm or a quantiser in front of a product reads whole rows before it knows its first element. So
the function is cut where the product reads: what makes the rows is a cascade of its own, which
streams, and what is left is a product as any other.

Attention stores a row for each sequence, head and query; its output product reads a matrix, of
which a row holds all heads of a token. What lies between only moves elements, and goes: the stream
stores its tiles where the product reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_blocks, write_function
from crossfuse.blocks.scheduled import is_reduction
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.tiles import refused, tiles_refused
from crossfuse.cascade.spec import Site
from crossfuse.errors import PlanRefused


@dataclass(frozen=True, eq=False)
class RowsFirst:
    """A function in two, cut at the left operand of its product."""

    #: The whole.
    function: Any
    #: Makes the operand: a cascade, whose outputs are `passed`.
    rows: Any
    #: The rest, of which `passed` are parameters.
    product: Any
    #: Results of the first function that the second reads, in program order.
    passed: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class _Nest:
    """A statement of the function with its buffers and the kinds of its loops."""

    node: Any
    reads: frozenset[Any]
    writes: frozenset[Any]
    #: Loops that are not reduced.
    spatial: int
    #: Loops that are.
    reduced: int
    #: Spatial loops of more than one iteration: sums may have kept the dimension that they reduce.
    wide: int
    #: Iterations of the last loop that is not reduced; 1 without any.
    columns: int


def rows_first(func: Any) -> RowsFirst | None:
    """Cut a function at the left operand of its last product, or return None.

    The function is unscheduled, with one block for each operator. None if its last reduction is no
    product of an intermediate and a parameter, or the intermediate takes other reductions than to
    one number a row.
    """
    nests = [_nest_of(each) for each in _statements_of(func.body.block)]
    last = max((n for n, each in enumerate(nests) if each.reduced), default=0)
    operand = _operand_of(nests[last], func)
    return None if operand is None else _cut(func, nests, operand, {last})


def rows_before_chain(func: Any) -> RowsFirst | None:
    """Cut a function at the left operand of the first of several products, or return None.

    As `rows_first`, of a chain: products that read no other one read the same rows, as gate and up
    do, and each other one reads an intermediate. Of one product None, too.
    """
    nests = [_nest_of(each) for each in _statements_of(func.body.block)]
    found = {n: each for n in range(len(nests)) if (each := _product(nests[n], func)) is not None}
    firsts = [n for n in found if not found.keys() & set(_needed_for(nests[:n], {found[n]}))]
    operands = {found[n] for n in firsts}
    if len(operands) != 1 or len(found) == len(firsts):
        return None
    return _cut(func, nests, operands.pop(), found.keys())


def _cut(
    func: Any, nests: list[_Nest], operand: Any, products: Collection[int]
) -> RowsFirst | None:
    """Cut a function at what makes an operand; None unless only products reduce behind it.

    None, too, if the operand takes other reductions than to one number a row.
    """
    root = func.body.block
    needed = _needed_for(nests[: min(products)], {operand})
    first = [nests[each] for each in needed]
    rest = {number: each for number, each in enumerate(nests) if number not in needed}
    # One number a row: what reduces to more is a product itself.
    reductions = [each.wide for each in first if each.reduced]
    others = {number for number, each in rest.items() if each.reduced}
    if not reductions or max(reductions) >= len(operand.ty.shape) or others - set(products):
        return None
    read = frozenset().union(*(each.reads for each in rest.values()))
    passed = tuple(each for each in root.alloc_buffers if each in read and _is_made(each, first))
    return RowsFirst(
        func,
        _part_of(func, first, passed, "rows"),
        _part_of(func, [*rest.values()], passed, "product"),
        passed,
    )


def joined(parts: RowsFirst, stream: Any) -> Any:
    """The whole function, with the operand made by another function, `stream`.

    That does what `parts.rows` does, with parameters of the same names. The result is sequential:
    the nests of the stream, then those of the product. A block name that both have is refused.
    """
    known = {str(each.name): each for each in (*parts.rows.params, *parts.passed)}
    images = {each: known[str(each.name)] for each in stream.params}
    body = ir.substitute(stream.body, lambda var: images.get(var, var)).block
    rest = parts.product.body.block
    _check_names(body, rest)
    root = ir.block_like(
        rest,
        body=ir.SeqStmt([*_statements_of(body), *_statements_of(rest)]),
        alloc_buffers=[*parts.passed, *body.alloc_buffers, *rest.alloc_buffers],
    )
    made = ir.with_body(parts.function, realized(root))
    for name, value in dict(stream.attrs or {}).items():
        if made.attrs is None or name not in made.attrs:
            made = made.with_attr(name, value)
    return made


def _statements_of(root: Any) -> list[Any]:
    return list(root.body.seq) if isinstance(root.body, ir.SeqStmt) else [root.body]


def _nest_of(node: Any) -> _Nest:
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
    extents = [ir.constant(each.dom.extent) or 0 for each in iters if not is_reduction(each)]
    return _Nest(
        node,
        frozenset(reads),
        frozenset(writes),
        spatial=len(extents),
        reduced=len(iters) - len(extents),
        wide=sum(extent != 1 for extent in extents),
        columns=extents[-1] if extents else 1,
    )


def _operand_of(nest: _Nest, func: Any) -> Any:
    """The intermediate matrix that a product with a parameter reads; None for anything else."""
    read = nest.reads - nest.writes
    made = [each for each in func.body.block.alloc_buffers if each in read]
    if (nest.spatial, nest.reduced, len(read), len(made)) != (2, 1, 2, 1):
        return None
    return made[0]


def _product(nest: _Nest, func: Any) -> Any:
    """`_operand_of` a product of many columns; None of a sum that keeps its dimension."""
    return _operand_of(nest, func) if nest.columns > 1 else None


def _needed_for(nests: list[_Nest], wanted: Set[Any]) -> list[int]:
    """Indices of the nests that compute some buffers."""
    found: list[int] = []
    for number in reversed(range(len(nests))):
        if nests[number].writes & wanted:
            found.insert(0, number)
            wanted = wanted | nests[number].reads
    return found


def _is_made(buffer: Any, nests: list[_Nest]) -> bool:
    return any(buffer in each.writes for each in nests)


def _part_of(func: Any, nests: list[_Nest], passed: tuple[Any, ...], name: str) -> Any:
    """A function of some of the nests; buffers that pass from one to the other are parameters."""
    root = func.body.block
    used = frozenset().union(*(each.reads | each.writes for each in nests))
    outputs = [each for each in passed if _is_made(each, nests)]
    inputs = [each for each in passed if each in used and each not in outputs]
    given = [each for each in func.params if each in used]
    own = [each for each in root.alloc_buffers if each in used and each not in passed]
    nodes = [each.node for each in nests]
    whole = ir.SeqStmt(nodes) if len(nodes) > 1 else nodes[0]
    block = ir.block_like(root, body=whole, alloc_buffers=own)
    params = [*inputs, *given, *outputs]
    made = ir.PrimFunc(params, realized(block), func.ret_type, func.attrs)
    return made.with_attr("global_symbol", name)


def realized(root: Any) -> Any:
    """The body of a function of a root block."""
    return ir.SBlockRealize([], ir.tirx.const(1, "bool"), root)


def _check_names(stream: Any, rest: Any) -> None:
    """Refuse block names that both functions have: schedules find blocks by name."""
    names = ({str(each.name_hint) for each in _blocks(root)} for root in (stream, rest))
    both = set.intersection(*names)
    if both:
        raise refused(
            f"block '{min(both)}'",
            "a name that a block of the stream has",
            "blocks by names of their own",
            "rename it",
        )


#: Dimensions of what attention makes: sequences, heads, queries, columns of a head.
_DIMENSIONS = 4


def attention_first(func: Any) -> RowsFirst | None:
    """Cut a function at the left operand of its last product, which attention makes.

    The function is unscheduled, with one block for each operator. `rows` of the result makes the
    output of attention, [sequence, head, query, column], and `product` takes it as a matrix, which
    is what is passed. None if the operand is made otherwise, or not by copies of such an output.
    """
    root = func.body.block
    nests = [_nest_of(each) for each in _statements_of(root)]
    last = max((n for n, each in enumerate(nests) if each.reduced), default=0)
    matrix = _operand_of(nests[last], func)
    if matrix is None:
        return None
    source, copies = _source(root, matrix)
    if source is None:
        return None
    needed = _needed_for(nests[:last], frozenset([source]))
    copying = [n for n, each in enumerate(nests) if each.writes & frozenset(copies)]
    first = [nests[each] for each in needed]
    rest = [e for n, e in enumerate(nests) if n not in needed and n not in copying]
    others = frozenset().union(*(each.reads for each in rest))
    # Attention reduces to more than a number for each row, and nobody else reads what it makes.
    wide = any(e.reduced and e.spatial == _DIMENSIONS and e.columns > 1 for e in first)
    made = frozenset().union(*(each.writes for each in first))
    if not wide or (made | frozenset(copies[:-1])) & others:
        return None
    if sum(bool(each.reduced) for each in rest) != 1:
        return None
    passed = (matrix,)
    return RowsFirst(
        func,
        _part_of(func, first, (source,), "rows"),
        _part_of(func, rest, passed, "product"),
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
    stores = {
        block.body.buffer: block
        for block in _blocks(root)
        if isinstance(block.body, ir.BufferStore)
    }
    places = tuple(ir.tirx.Var(name, "int32") for name in ("token", "column"))
    copies: list[Any] = []
    wanted, indices = matrix, list(places)
    while wanted in stores and _is_copy(stores[wanted]):
        store = stores[wanted].body
        indices = _over(store.value.indices, dict(zip(store.indices, indices, strict=True)))
        copies.insert(0, wanted)
        wanted = store.value.source
    if not copies or len(wanted.ty.shape) != _DIMENSIONS:
        return None, []
    return (wanted, copies) if _is_matrix(wanted, matrix, places, indices) else (None, [])


def _over(indices: Iterable[Any], values: Mapping[Any, Any]) -> list[Any]:
    return [ir.substitute(each, lambda var: values.get(var, var)) for each in indices]


def _blocks(root: Any) -> list[Any]:
    found: list[Any] = []
    ir.walk(root.body, (ir.SBlock, found.append))
    return found


def _is_copy(block: Any) -> bool:
    """Whether a block stores elements of another tensor at other places, and does nothing else."""
    plain = all(isinstance(each, ir.Var) for each in block.body.indices)
    moves = isinstance(block.body.value, ir.TensorLoad)
    return plain and moves and not any(map(is_reduction, block.iter_vars))


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
    return all(map(known.can_prove_equal, _over(indices, at), own))


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


def sites_of(func: Any) -> tuple[Site, ...]:
    """The cascades of a function.

    Products behind a cascade reduce what other reductions make, which is no cascade of theirs: of
    attention and its output product that of attention is found, of rows in front of a chain of
    products those of the rows, of rows that are added up too those of the rows.
    """
    parts = attention_first(func)
    if parts is not None:
        return tuple(replace(each, after=parts) for each in detect(parts.rows))
    parts = rows_before_chain(func)
    if parts is not None:
        return tuple(replace(each, function=func) for each in detect(parts.rows))
    sums = column_sums(func)
    if sums is not None:
        return tuple(replace(each, sums=sums) for each in detect(sums.rows))
    return detect(func)


# Finds sums of columns beside a cascade of rows, and cuts such functions in two.
#
# The gradient of a norm's gain is a sum over the rows, of what each of them makes once its own sums
# are known. A stream that keeps the columns of its threads adds as it goes from row to row. So what
# is summed becomes an output of the rows, which is kept and not stored, and what is left adds the
# sums of CTAs: a second cascade, whose rows are columns.


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """A function in two, cut where rows are added up."""

    #: The whole.
    function: Any
    #: A cascade of rows; its last outputs are what is summed, in the order of `sums`.
    rows: Any
    #: The sums, over the rows.
    sums: tuple[Block, ...]
    #: What is made of them.
    after: tuple[Block, ...]

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the outputs of `rows` that are summed."""
        return tuple(map(_term, self.sums))

    def partial(self, groups: int) -> tuple[Any, ...]:
        """Buffers of the sums of groups of rows, in the order of `sums`."""
        return tuple(_partial(each, groups) for each in self.sums)

    def added(self, groups: int) -> tuple[Any, ...]:
        """Functions that add the sums of groups, one of each sum; these are their last input."""
        return tuple(self._added(each, groups) for each in self.sums)

    def _added(self, block: Block, groups: int) -> Any:
        buffer, first = _over_groups(block, groups)
        blocks = [first, *_after(self.after, [block])]
        read = _read(blocks)
        given = [each for each in self.function.params if each in read]
        results = _of(self.function.params, blocks)
        return write_function([*given, buffer], blocks, results, _index_type(blocks))


def column_sums(func: Any) -> ColumnSums | None:
    """Cut a function where rows are added up, or return None.

    The function is unscheduled, with one block for each operator. None if it is not of such blocks,
    or if no sum is over the leading dimensions of a tensor whose rows another reduction takes in,
    and waits for what these make of a row: sums of both kinds side by side are two cascades.
    """
    try:
        blocks = read_blocks(func)
    except PlanRefused:
        return None
    sums = _sums(blocks)
    if not sums or len(set(map(_shape, sums))) > 1:
        return None
    made = set(_buffers(each for each in blocks if each not in sums))
    if not made & _read(sums):
        return None
    after = _after(blocks, sums)
    first = [_as_terms(each) if each in sums else each for each in blocks if each not in after]
    # What is made of sums is no row's, and no row waits for them.
    if not any(each.combine for each in first) or any(each.combine for each in after):
        return None
    # Each sum is added by a function of its own.
    if sum(len(_after(after, [each])) for each in sums) > len(after):
        return None
    terms = [each.buffer for each in first if str(each.buffer.name) in set(map(_term, sums))]
    read = _read(first)
    given = [each for each in func.params if each in read and each not in _buffers(blocks)]
    results = [*_of(func.params, first), *terms]
    rows = write_function(given, first, results, _index_type(blocks))
    return ColumnSums(func, rows, sums, after)


def _sums(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Sums of columns of what the rows' reductions read, and of what is read beside it."""
    columns = {block: of for block in blocks if (of := _by_column(block))}
    known = _read(each for each in blocks if each.combine and each not in columns)
    # Any product of a row and a matrix is a sum of columns, but of a tensor of its own.
    found: set[Block] = set()
    while more := {each for each in columns if columns[each] & known} - found:
        found |= more
        known |= set().union(*(columns[each] for each in more))
    return tuple(each for each in blocks if each in found)


def _by_column(block: Block) -> set[Any]:
    """Tensors whose columns a block adds up; none if it does anything else."""
    if block.combine != "sum" or len(block.coordinates) != 1:
        return set()
    own = (*block.summed, *block.coordinates)
    return {each.source for each in ir.buffer_loads(block.value) if _are(each.indices, own)}


def _are(indices: Iterable[Any], variables: Sequence[Any]) -> bool:
    found = list(indices)
    return len(found) == len(variables) and all(
        one.same_as(other) for one, other in zip(found, variables, strict=True)
    )


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(block.domain[each] for each in (*block.summed, *block.coordinates))


def _term(block: Block) -> str:
    return f"{block.buffer.name}_terms"


def _as_terms(block: Block) -> Block:
    """A sum's block as one that stores what is summed."""
    return block.terms(_term(block), (*block.summed, *block.coordinates))


def _partial(block: Block, groups: int) -> Any:
    shape = [groups, *(block.domain[each] for each in block.coordinates)]
    name = f"{block.buffer.name}_partial"
    return ir.tirx.decl_buffer(shape, str(block.buffer.ty.dtype), name)


def _over_groups(block: Block, groups: int) -> tuple[Any, Block]:
    """A sum's block over sums of groups, with the buffer of these."""
    buffer = _partial(block, groups)
    group = ir.Var("group", str(block.summed[0].ty))
    domain = {**block.extents, group: groups}
    value = ir.tirx.BufferLoad(buffer, [group, *block.coordinates])
    return buffer, replace(block, summed=(group,), domain=domain, value=value)


def _after(blocks: Sequence[Block], sums: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks that read sums, or what is made of them."""
    made = set(_buffers(sums))
    found = []
    for block in blocks:
        if made & block.sources:
            made.add(block.buffer)
            found.append(block)
    return tuple(found)


def _buffers(blocks: Iterable[Block]) -> list[Any]:
    return [each.buffer for each in blocks]


def _read(blocks: Iterable[Block]) -> set[Any]:
    return {source for each in blocks for source in each.sources}


def _of(parameters: Iterable[Any], blocks: Sequence[Block]) -> list[Any]:
    """Parameters that blocks write, in the order of these."""
    made = _buffers(blocks)
    return [each for each in parameters if each in made]


def _index_type(blocks: Sequence[Block]) -> str:
    return str(blocks[0].coordinates[0].ty)
