"""Reads the nest that makes the rows of a left operand off a scheduled function."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.hardware import WARP, WARPGROUP
from crossfuse.lower.buffers import VECTORS, load_in_order
from crossfuse.lower.hopper.rows.program import ChunkLoop, RowProgram, scaled_rows
from crossfuse.lower.pipeline import block_passes, fast_exponentials
from crossfuse.lower.refusal import Rule
from crossfuse.lower.tree import coordinate
from crossfuse.markers import CHUNKS, FAST, GRID_STAGE

_refused_chunks = Rule(
    "rows", instead="schedule as schedule_rows_gemm does, or make whole rows: leave the chunk out"
)
_refused = Rule(
    "rows",
    instead="schedule as schedule_rows_gemm does, or leave grid_stage out and make the rows in a "
    "kernel of their own",
)

# The loop over chunks of a row, read off the statements that make it.


def is_chunk_loop(loop: Any) -> bool:
    """Whether a loop goes through chunks of a row."""
    return CHUNKS in loop.annotations


def read_chunks(body: Any, row: Any, lane: Any, factors: Any) -> tuple[Any, ChunkLoop]:
    """Read the loop over chunks, last of a row's statements; returns it, and what is known of it.

    Refuses anything behind the loop, and chunks that read more than elements of one matrix.
    `factors` is the matrix that sums of the product are corrected by.
    """
    *before, loop = ir.sequence(body)
    if not isinstance(loop, ir.For) or not is_chunk_loop(loop):
        raise _refused_chunks(
            "rows", "statements behind the loop over chunks", "a loop, and nothing else"
        )
    carried = tuple(each.buffer for each in before if isinstance(each, ir.AllocBuffer))
    others = [each for each in before if not isinstance(each, ir.AllocBuffer)]
    size, count = int(loop.annotations[CHUNKS]), ir.constant(loop.extent)
    source = _source(loop, row, lane, size)
    begin = ir.SeqStmt(others) if len(others) > 1 else others[0]
    return loop, ChunkLoop(loop.loop_var, count or 0, size, begin, carried, source, factors)


def _source(loop: Any, row: Any, lane: Any, size: int) -> Any:
    """The one matrix that a chunk reads, of which it may read only its own elements."""
    given = ir.global_loads(loop.body)
    sources = list(dict.fromkeys(each.source for each in given))
    name = f"loop '{loop.loop_var.name}'"
    if len(sources) != 1 or len(sources[0].ty.shape) != 2:
        names = ", ".join(f"'{each.name}'" for each in sources)
        raise _refused_chunks(name, f"loads of {names}", "loads of one matrix, which has the rows")
    known = known_in(loop, lane)
    for each in given:
        place = known.simplify(each.indices[1] - loop.loop_var * size)
        bound = known.const_int_bound(place)
        inside = bound.min_value >= 0 and bound.max_value < size
        if not each.indices[0].same_as(row) or not inside:
            raise _refused_chunks(
                name,
                f"a load of '{each.source.name}{list(each.indices)}'",
                f"elements of the row in the {size} of the chunk",
            )
    return sources[0]


def known_in(body: Any, lane: Any) -> Any:
    """An analyzer that knows the ranges of all loops of some statements, and of lanes."""
    known = ir.ranged((lane, 0, WARP))
    for each in ir.nodes(body, ir.For):
        known.bind(each.loop_var, ir.tvm.ir.Range.from_min_extent(each.min, each.extent))
    return known


# Loads of a row, all in front of what is computed: they take as long as one then.


def loads_first(statement: Any, known: tuple[Any, ...]) -> Any:
    """Move what copies from global memory to registers in front of what computes.

    nvcc does not, as what merges the states of threads is volatile. ptxas keeps the order of
    relaxed loads; other ones it would put behind what it computes, so of these what is needed last
    is loaded first. Copies that are not the first to use their registers, or that depend on more
    than the variables `known` in front of the statements, stay where they are.
    """
    if not isinstance(statement, ir.SeqStmt):
        return statement
    stored = {each.buffer for each in ir.buffer_stores(statement)}
    first: list[Any] = []
    rest: list[Any] = []
    used: set[Any] = set()
    for each in statement.seq:
        if _is_copy(each, stored, known, used):
            first.append(each)
        else:
            rest.append(each)
            used |= {load.source for load in ir.buffer_loads(each)}
            used |= {store.buffer for store in ir.buffer_stores(each)}
    declared = [each for each in rest if isinstance(each, ir.AllocBuffer)]
    others = [each for each in rest if not isinstance(each, ir.AllocBuffer)]
    return ir.SeqStmt([*declared, *_loads(first), *others])


def _loads(copies: list[Any]) -> list[Any]:
    """Copies in the order in which their loads are issued."""
    made = [(each, _in_order(each)) for each in copies]
    relaxed = [new for old, new in made if not new.same_as(old)]
    return [*(old for old, new in reversed(made) if new.same_as(old)), *relaxed]


def _in_order(node: Any) -> Any:
    """A copy with relaxed loads where a thread loads 16 bytes of 16-bit elements side by side."""

    def load(loop: Any, mutator: Any) -> Any:
        store = loop.body
        if loop.kind != ir.ForKind.VECTORIZED or not isinstance(store, ir.BufferStore):
            return mutator.default_mutate(loop)
        source, lanes = store.value, ir.constant(loop.extent)
        dtype = str(store.buffer.ty.dtype)
        if not isinstance(source, ir.TensorLoad) or (dtype, lanes) not in VECTORS:
            return mutator.default_mutate(loop)
        to, place = (
            [ir.at_zero(index, loop.loop_var) for index in each.indices] for each in (store, source)
        )
        words = load_in_order(source.source, place, dtype, lanes)
        return ir.BufferStore(store.buffer, words, [*to[:-1], ir.tirx.Ramp(to[-1], 1, lanes)])

    return ir.mutate(node, (ir.For, load))


def _is_copy(node: Any, stored: set[Any], known: tuple[Any, ...], used: set[Any]) -> bool:
    """Whether a loop loads from memory that the row does not store, to registers not yet used."""
    if not isinstance(node, (ir.For, ir.IfThenElse)):
        return False
    loads, stores = ir.buffer_loads(node), ir.buffer_stores(node)
    buffers = {*(each.source for each in loads), *(each.buffer for each in stores)}
    free = {*known, *buffers, *(each.loop_var for each in ir.nodes(node, ir.For))}
    return (
        set(ir.variables(node)) <= free
        and all(ir.is_global(e.source) and e.source not in stored for e in loads)
        and all(str(e.buffer.scope()) == "local" and e.buffer not in used for e in stores)
    )


_EXTENT = "thread_extent"
_ALL_REDUCE = "tirx.tvm_thread_allreduce"


def read_rows(func: Any, nest: Any) -> RowProgram:
    """Read the nest that makes the rows of a left operand.

    It is a loop over rows, bound to ``blockIdx.x``. In it a warp of threads, or a warpgroup, makes
    a row, with what it keeps in scope ``local``, and stores it by a block that `grid_stage` was
    called for. The loop or tensor that has another form is refused by name.
    """
    buffer, beside, factors = _stored(nest)
    threads = _threads(nest, int(buffer.ty.shape[0]), factors is not None)
    body, bound = _without_blocks(func, nest)
    _check_merges(body)
    row, lane = bound["blockIdx.x"], bound["threadIdx.x"]
    fast = func.attrs is not None and FAST in func.attrs
    if factors is None:
        staged = _check_memory(body, (buffer, *beside), row, threads)
        scaled = None
        if threads == WARPGROUP:
            scaled = scaled_rows(body, buffer, row)
            body = loads_first(body, (row, lane))
        made = RowProgram(buffer, row, lane, body, fast, beside, _read(body, row))
        return replace(made, threads=threads, staged=staged, scaled=scaled)
    loop, chunks = read_chunks(body, row, lane, factors)
    _check_memory(body, (buffer, *beside), row, threads, (factors, loop.loop_var))
    read = _read(loop.body, row)
    return RowProgram(buffer, row, lane, loop.body, fast, beside, read, chunks)


def _stored(nest: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """The matrix that the nest stores for later ones, vectors beside it, and factors of chunks."""
    blocks = ir.nodes(nest, ir.SBlock)
    stored = [r.source for each in blocks if GRID_STAGE in each.annotations for r in each.writes]
    # Of each chunk a row: a matrix of as many rows as there are chunks.
    factors = next((each for each in stored if _is_by_chunk(nest, each)), None)
    stored = [each for each in stored if not each.same_as(factors)]
    matrices = [each for each in stored if len(each.ty.shape) == 2 and not _is_column(each)]
    beside = tuple(each for each in stored if len(each.ty.shape) == 1 or _is_column(each))
    if len(matrices) != 1 or len(stored) != 1 + len(beside):
        names = ", ".join(f"'{each.name}'" for each in stored) or "nothing"
        raise _refused(
            f"block '{blocks[-1].name_hint}'",
            f"a nest of rows that passes on {names}",
            "one matrix, and numbers of rows, stored by a block that grid_stage was called for",
        )
    return matrices[0], beside, factors


def _is_column(buffer: Any) -> bool:
    """Whether a matrix has one number of each row, such as a scale that keeps its extents."""
    return len(buffer.ty.shape) == 2 and int(buffer.ty.shape[1]) == 1


def _is_by_chunk(nest: Any, buffer: Any) -> bool:
    """Whether what a nest stores of a matrix is numbered by chunks, and then by rows."""
    loops = [each.loop_var for each in ir.nodes(nest, ir.For) if is_chunk_loop(each)]
    values: dict[Any, Any] = {}
    for each in ir.nodes(nest, ir.SBlockRealize):
        variables = (axis.var for axis in each.block.iter_vars)
        values |= dict(zip(variables, each.iter_values, strict=True))
    stores = (each for each in ir.buffer_stores(nest) if each.buffer.same_as(buffer))
    firsts = (each.indices[0] for each in stores)
    return any(ir.among(values.get(first, first), loops) for first in firsts)


def _read(body: Any, row: Any) -> tuple[Any, ...]:
    """Tensors in global memory of which a row needs its own part, or all of a vector."""
    own = (
        each.source
        for each in ir.global_loads(body)
        if len(each.indices) == 1 or (len(each.indices) == 2 and each.indices[0].same_as(row))
    )
    return tuple(dict.fromkeys(own))


def _threads(nest: Any, rows: int, by_chunks: bool) -> int:
    """Threads that make a row: a warp or a warpgroup; refuses rows that do not go over CTAs."""
    kinds = {WARP: f"{WARP} threads of a warp"}
    if not by_chunks:
        kinds[WARPGROUP] = f"{WARPGROUP} of a warpgroup"
    loops = [each for each in ir.nodes(nest, ir.For) if coordinate(each)]
    over = {ir.constant(each.extent) for each in loops if coordinate(each) == "threadIdx.x"}
    threads = next((each for each in kinds if over == {each}), WARP)
    limits = {"blockIdx.x": rows, "threadIdx.x": threads}
    for each in loops:
        tag, extent = coordinate(each), ir.constant(each.extent)
        if limits.get(tag) != extent:
            raise _refused(
                f"loop '{each.loop_var.name}'",
                f"{extent} iterations bound to {tag}",
                f"{rows} rows bound to blockIdx.x, and the {' or '.join(kinds.values())} to "
                "threadIdx.x",
            )
    return threads


def _without_blocks(func: Any, nest: Any) -> tuple[Any, dict[str, Any]]:
    """Statements of the nest without blocks and bound loops, and the variables of these by tag."""
    root = func.body.block
    used = set(ir.variables(nest))
    given = [each for each in (*func.params, *root.alloc_buffers) if each in used]
    memory = list(filter(ir.is_global, given))
    own = [each for each in root.alloc_buffers if each in used and each not in memory]
    block = ir.block_like(root, body=nest, alloc_buffers=own)
    body = ir.SBlockRealize([], ir.tirx.const(1, "bool"), block)
    alone = ir.PrimFunc(memory, body, func.ret_type, func.attrs).with_attr("global_symbol", "rows")
    passes = [*block_passes(), fast_exponentials()]
    module = ir.tvm.ir.transform.Sequential(passes)(ir.IRModule({"rows": alone}))
    bound: dict[str, Any] = {}

    def unbind(node: Any, mutator: Any) -> Any:
        inner = mutator.default_mutate(node)
        if str(node.attr_key) != _EXTENT:
            return inner
        bound[str(node.node.thread_tag)] = node.node.var
        return inner.body

    return ir.mutate(module["rows"].body, (ir.AttrStmt, unbind)), bound


def _check_merges(body: Any) -> None:
    """Refuse TVM's own reductions over threads, which its lowering does for whole CTAs alone."""
    for each in ir.nodes(body, ir.Call):
        if each.op.same_as(ir.Op.get(_ALL_REDUCE)):
            raise _refused(
                "loop bound to threadIdx.x",
                "a reduction over threads that is TVM's own",
                "merges, which are blocks with the annotation crossfuse.merge",
            )


def _check_memory(
    body: Any,
    passed: tuple[Any, ...],
    row: Any,
    threads: int,
    factors: tuple[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """Refuse a row that stores more than itself, and anything but registers for what it needs.

    With `factors`, its chunk's own factor may be stored too. Returns the buffers in shared memory
    that warps of a warpgroup pass one another.
    """
    held = ir.nodes(body, ir.AllocBuffer)
    passing = [each.buffer for each in held if str(each.buffer.scope()) == "shared"]
    if threads == WARP or any(ir.tvm.DataType(str(e.ty.dtype)).bits != 32 for e in passing):
        passing = []
    for each in held:
        if str(each.buffer.scope()) != "local" and each.buffer not in passing:
            raise _refused(
                f"buffer '{each.buffer.name}'",
                f"scope {each.buffer.scope()}",
                "registers: the rings of the product have the shared memory",
            )
    for each in ir.buffer_stores(body):
        if not ir.is_global(each.buffer):
            continue
        own = ir.among(each.buffer, passed)
        first = each.indices[0]
        if factors is not None and each.buffer.same_as(factors[0]):
            own, first = first.same_as(factors[1]), each.indices[1]
        if not own or not (first.same_as(row) or int(each.buffer.ty.shape[0]) == 1):
            raise _refused(
                f"buffer '{each.buffer.name}'",
                f"a store to '{each.buffer.name}{list(each.indices)}' for row {row.name}",
                f"elements of {', '.join(repr(str(e.name)) for e in passed)} in the row itself, of "
                "which alone a flag tells",
            )
    return tuple(passing)
