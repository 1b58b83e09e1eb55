"""The blocks of a function, one for each buffer that it writes, over the buffer's coordinates.

They are read off a function, and written as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import te

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.scheduled import carried, combiner_of, is_reduction
from crossfuse.errors import PlanRefused, Rule

refused = Rule(PlanRefused, "extract")

# Refusals of blocks that do not say plainly what they compute.

#: What to do with a function that says no more what it computes.
LOWERED = "extract the chain before the function is lowered"


_WHOLE = "write each buffer by one block, all of it"


@dataclass(frozen=True, eq=False)
class Block:
    """A block: ``buffer[coordinates] = value``, or a reduction of values over `summed`."""

    name: str
    buffer: Any
    #: Variables of the elements, one for each dimension of the buffer.
    coordinates: tuple[Any, ...]
    #: Variables that are reduced.
    summed: tuple[Any, ...]
    #: Extents of both kinds of variables.
    domain: Mapping[Any, int]
    #: An expression in both kinds.
    value: Any
    #: ``"sum"``, ``"product"``, ``"max"`` or ``"min"``; empty if the block is element-wise.
    combine: str
    #: What a reduction starts from; None if the block is element-wise.
    initial: Any = None

    @property
    def where(self) -> str:
        """The block's name in messages."""
        return f"block '{self.name}'"

    @property
    def buffers(self) -> tuple[Any, ...]:
        """All buffers that it writes."""
        return (self.buffer,)

    @property
    def sources(self) -> frozenset[Any]:
        """All buffers that its value reads."""
        return frozenset(each.source for each in ir.buffer_loads(self.value))

    @property
    def extents(self) -> dict[Any, int]:
        """Extents of the coordinates."""
        return {each: self.domain[each] for each in self.coordinates}

    def terms(self, name: str, variables: tuple[Any, ...]) -> Block:
        """The block of a name that stores what this one reduces, over its variables in an order."""
        shape = [self.domain[each] for each in variables]
        buffer = ir.tirx.decl_buffer(shape, str(self.value.ty), name)
        stored = {"name": name, "buffer": buffer, "coordinates": variables}
        return replace(self, **stored, summed=(), combine="", initial=None)


#: Reads a block of several stores, or of a call: the loops around it, and its realisation.
Other = Callable[[tuple[Any, ...], Any], list[Block]]


def read_blocks(func: Any, other: Other | None = None) -> list[Block]:
    """Read all blocks of an s_tir function in program order.

    `other` reads blocks that loop, store more than once or call; without it they raise
    `PlanRefused`. So do statements other than loops around blocks, extents that are not constant,
    buffers that a block writes in part, and reductions by unknown operators.
    """
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    _collect(func.body, (), leaves, other is not None)
    found: list[Block] = []
    for loops, realize in leaves:
        if other is None or isinstance(realize.block.body, ir.BufferStore):
            found.append(read_block(loops, realize))
        else:
            found += other(loops, realize)
    return found


@dataclass(frozen=True, eq=False)
class Flow:
    """The blocks of a function in the order of their data, and what comes in and goes out."""

    blocks: tuple[Block, ...]
    #: The block that writes each buffer.
    made: Mapping[Any, Block]
    #: Parameters that nothing writes.
    inputs: tuple[Any, ...]
    #: Parameters that blocks write.
    outputs: tuple[Any, ...]


def read_flow(
    func: Any, rule: Rule[Any] = refused, read: Callable[[Any], Sequence[Block]] = read_blocks
) -> Flow:
    """Read an s_tir function whose buffers are written by one block each, before they are read.

    Others are refused by a rule, and so is whatever `read` refuses.
    """
    try:
        return _flow(func, tuple(read(func)))
    except PlanRefused as error:
        raise rule.error(replace(error.refusal, rule=rule.name)) from error


def _flow(func: Any, blocks: tuple[Block, ...]) -> Flow:
    made: dict[Any, Block] = {}
    for block in blocks:
        for buffer in block.buffers:
            if buffer in made:
                found = f"blocks '{made[buffer].name}' and '{block.name}' that write it"
                where, instead = f"buffer '{buffer.name}'", "write it by one block"
                raise refused(where, found, "one block for each buffer", instead)
            made[buffer] = block
    buffers = [each for each in func.params if ir.is_buffer_var(each)]
    inputs = tuple(each for each in buffers if each not in made)
    outputs = tuple(each for each in buffers if each in made)
    if not outputs:
        raise refused("function", "no output", "an output", "store the result to a parameter")
    known = set(inputs)
    for block in blocks:
        for source in dict.fromkeys(each.source for each in ir.buffer_loads(block.value)):
            where = f"{block.where}, buffer '{source.name}'"
            if source not in known and source not in made:
                instead = "write it before it is read"
                raise refused(where, "a buffer that nothing writes", "written buffers", instead)
            if source not in known:
                limit, instead = "blocks in the order of their data", "order the blocks"
                raise refused(where, "a read before a write", limit, instead)
        known.update(block.buffers)
    return Flow(blocks, made, inputs, outputs)


def read_block(loops: tuple[Any, ...], realize: Any) -> Block:
    """Read a block of one store over the coordinates of its buffer; refuses as `read_blocks`."""
    node, store = realize.block, realize.block.body
    combine = _combiner(node, f"block '{node.name_hint}'")
    placed = placement(loops, realize, store)
    value = store.value
    if combine:
        value = value.b if carried(store).same_as(value.a) else value.a
    (value,) = access.replaced([value], placed.inside, {})
    return Block(
        node.name_hint,
        store.buffer,
        placed.coordinates,
        placed.summed,
        placed.domain,
        value,
        combine,
        initial=node.init.value if combine else None,
    )


def _collect(node: Any, loops: tuple[Any, ...], leaves: list[Any], every: bool) -> None:
    """Gather realisations of blocks with their loops: of one store; with `every`, of all kinds."""
    leaf = (ir.BufferStore, ir.Evaluate) if every else (ir.BufferStore,)
    if isinstance(node, ir.SeqStmt):
        for each in node.seq:
            _collect(each, loops, leaves, every)
    elif isinstance(node, ir.For):
        _collect(node.body, (*loops, node), leaves, every)
    elif isinstance(node, ir.SBlockRealize) and isinstance(node.block.body, leaf):
        leaves.append((loops, node))
    elif isinstance(node, ir.SBlockRealize) and not len(node.block.iter_vars):
        check_plain(node.block)
        _collect(node.block.body, loops, leaves, every)
    elif isinstance(node, ir.SBlockRealize) and every:
        leaves.append((loops, node))
    else:
        block = isinstance(node, ir.SBlockRealize)
        where = f"block '{node.block.name_hint}'" if block else "function"
        inside = node.block.body if block else node
        found = f"a statement {type(inside).__name__}"
        raise refused(where, found, "loops around blocks of one store each", LOWERED)


def _combiner(node: Any, where: str) -> str:
    """The reduction operator of a block as in `Block.combine`; refuses any other reduction."""
    combine = combiner_of(node)
    store, loops = node.body, [each for each in node.iter_vars if is_reduction(each)]
    again = combine is None and _reads(store.value, store.buffer)
    same = combine and _same(carried(store).indices, store.indices)
    if again or (combine and not same) or (combine is None and (loops or node.init is not None)):
        limit = "element-wise blocks, and updates by +, *, max or min from an initial value"
        instead = "write reductions so, with T.init"
        raise refused(f"{where}, buffer '{store.buffer.name}'", str(store.value), limit, instead)
    if combine and not _starts_neutral(node, combine):
        found = f"an initial value {node.init.value if combine else ''}"
        raise refused(where, found, "sums that start at 0", "add the value after the sum")
    return combine or ""


def _starts_neutral(node: Any, combine: str) -> bool:
    init = node.init
    constant = isinstance(init, ir.BufferStore) and not ir.buffer_loads(init.value)
    if combine != "sum":
        return constant
    return constant and float(getattr(init.value, "value", 1)) == 0


def _reads(expression: Any, buffer: Any) -> bool:
    return any(each.source.same_as(buffer) for each in ir.buffer_loads(expression))


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        ir.tvm_ffi.structural_equal(a, b) for a, b in zip(one, other, strict=True)
    )


# Which elements of a buffer a block writes, and that it writes each of them once.


@dataclass(frozen=True, eq=False)
class Placement:
    """Which elements of a buffer a block writes; `Block` has the first three fields too."""

    coordinates: tuple[Any, ...]
    summed: tuple[Any, ...]
    domain: Mapping[Any, int]
    #: The block's own variables, except reduced ones, in terms of the coordinates.
    inside: Mapping[Any, Any]


def placement(loops: tuple[Any, ...], realize: Any, store: Any) -> Placement:
    """Work out which elements a block's store writes, given the loops around the block.

    What does not write each element of the buffer once raises `PlanRefused`, as in `read_blocks`.
    """
    node = realize.block
    where = f"block '{node.name_hint}'"
    check_plain(node)
    domain = {each.var: _extent(each, where) for each in node.iter_vars}
    _check_bindings(loops, realize, domain, where)
    summed = tuple(each.var for each in node.iter_vars if is_reduction(each))
    coordinates, inside = _coordinates(store, where, summed, domain)
    extents = dict(zip(coordinates, shape_of(store.buffer, where), strict=True))
    extents |= {var: domain[var] for var in summed}
    return Placement(coordinates, summed, extents, inside)


def shape_of(buffer: Any, where: str) -> tuple[int, ...]:
    """Extents of a buffer; `PlanRefused` if one is not constant."""
    shape = buffer.ty.shape
    return tuple(_constant(each, f"{where}, buffer '{buffer.name}'", "extent") for each in shape)


def check_plain(block: Any) -> None:
    """Refuse a block that sees buffers through views, with `PlanRefused` as `placement`."""
    if len(block.match_buffers):
        name = block.match_buffers[0].buffer.name
        where = f"block '{block.name_hint}', buffer '{name}'"
        raise refused(where, "a view by match_buffer", "buffers as they are", LOWERED)


def _extent(each: Any, where: str) -> int:
    where = f"{where}, loop '{each.var.name}'"
    first = _constant(each.dom.min, where, "first value")
    if first:
        raise refused(where, f"a loop from {first}", "loops from 0", "shift the loop and indices")
    return _constant(each.dom.extent, where, "extent")


def _constant(value: Any, where: str, what: str) -> int:
    number = ir.constant(value)
    if number is None:
        instead = "build the function for one number of rows; plans are made for each"
        raise refused(where, f"{what} {value}", "constant extents", instead)
    return number


def _check_bindings(loops: tuple[Any, ...], realize: Any, domain: Any, where: str) -> None:
    """Refuse loops that do not run each iteration of the block exactly once."""
    counts = {}
    for loop in loops:
        named = f"{where}, loop '{loop.loop_var.name}'"
        if ir.constant(loop.min) != 0:
            raise refused(named, f"a loop from {loop.min}", "loops from 0", "shift the loop")
        counts[loop.loop_var] = _constant(loop.extent, named, "extent")
    predicate = None if ir.constant(realize.predicate) == 1 else realize.predicate
    if access.inverse(list(realize.iter_values), domain, counts, predicate) is None:
        found = ", ".join(f"{var.name} = {value}" for var, value in _bound(realize))
        instead = "extract the chain from the function before it is scheduled"
        raise refused(where, found, "loops that run each iteration of a block once", instead)


def _bound(realize: Any) -> list[tuple[Any, Any]]:
    names = (each.var for each in realize.block.iter_vars)
    return list(zip(names, realize.iter_values, strict=True))


def _coordinates(
    store: Any, where: str, summed: tuple[Any, ...], domain: Mapping[Any, int]
) -> tuple[tuple[Any, ...], dict[Any, Any]]:
    """New variables for the buffer's dimensions, and the block's own variables in terms of them."""
    shape = shape_of(store.buffer, where)
    spatial = {var: extent for var, extent in domain.items() if var not in summed}
    # As wide as the loops, so that no conversion stands in the way of simpler indices.
    wide = any(str(var.ty) == "int64" for var in domain)
    dtype = "int64" if wide else "int32"
    names = tuple(ir.Var(f"i{each}", dtype) for each in range(len(shape)))
    extents = dict(zip(names, shape, strict=True))
    indices = list(store.indices)
    if not all(access.is_affine(each) for each in indices):
        inside = None
    else:
        inside = access.inverse(indices, extents, spatial)
    if inside is None:
        place = ", ".join(str(each) for each in indices)
        found = f"a store to [{place}] of {list(shape)}"
        where = f"{where}, buffer '{store.buffer.name}'"
        raise refused(where, found, "each element of the buffer once, at affine indices", _WHOLE)
    return names, inside


# Loops in the order of what a block stores, whatever order they were written in.


def in_output_order(func: Any) -> Any:
    """A function whose blocks loop over what they store, then over what they reduce.

    Rules divide the loops of a product as rows, columns and what is summed. Only nests of plain
    loops around one block are reordered, whose loops are the block's variables one by one, and the
    indices of its output some of these. The function itself is returned if all are in order.
    """
    changed: list[Any] = []

    def nest(loop: Any, mutator: Any) -> Any:
        loops, inside = [loop], loop.body
        while isinstance(inside, ir.For):
            loops.append(inside)
            inside = inside.body
        order = _order(loops, inside) if isinstance(inside, ir.SBlockRealize) else None
        if order is None:
            return mutator.default_mutate(loop)
        around = {each.loop_var: each for each in loops}
        wanted = [around[inside.iter_values[each]] for each in order]
        in_order = all(a.same_as(b) for a, b in zip(wanted, loops, strict=True))
        if in_order and order == sorted(order):
            return loop
        changed.append(inside)
        block = inside.block
        variables = [block.iter_vars[each] for each in order]
        values = [inside.iter_values[each] for each in order]
        made: Any = ir.block_like(block, iter_vars=variables)
        made = ir.SBlockRealize(values, inside.predicate, made)
        for each in reversed(wanted):
            made = ir.for_like(each, made)
        return made

    body = ir.mutate(func.body, (ir.For, nest))
    return ir.with_body(func, body) if changed else func


def _order(loops: list[Any], realize: Any) -> list[int] | None:
    """The order of a block's variables by its output; None if they are not its loops one by one."""
    block, values = realize.block, list(realize.iter_values)
    plain = all(_is_plain(each) for each in loops) and isinstance(block.body, ir.BufferStore)
    vars_of_loops = {each.loop_var for each in loops}
    if not plain or len(values) != len(loops) or vars_of_loops != set(values):
        return None
    places = {each.var: at for at, each in enumerate(block.iter_vars)}
    stored = [places[each] for each in block.body.indices if each in places]
    summed = [at for at, each in enumerate(block.iter_vars) if is_reduction(each)]
    order = [*stored, *summed]
    return order if sorted(order) == list(range(len(places))) else None


def _is_plain(loop: Any) -> bool:
    serial = int(loop.kind) == int(ir.ForKind.SERIAL)
    return serial and not loop.annotations and loop.thread_binding is None


# Writes blocks as an s_tir function.

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x * y,
    "max": lambda x, y: ir.tirx.max(x, y),
    "min": lambda x, y: ir.tirx.min(x, y),
}


def write_function(
    parameters: Sequence[Any], blocks: Sequence[Block], results: Sequence[Any], dtype: str
) -> Any:
    """A function of `parameters` that stores buffers `results`, which blocks of it write.

    All are buffers; `blocks` are in the order of their data, and `dtype` is that of loops.
    """
    tensors: dict[Any, Any] = {}
    for each in parameters:
        shape = _extents((int(extent) for extent in each.ty.shape), dtype)
        tensors[each] = te.placeholder(shape, str(each.ty.dtype), str(each.name))
    for block in blocks:
        tensors[block.buffer] = _computed(block, tensors, dtype)
    func = te.create_prim_func([tensors[each] for each in (*parameters, *results)])
    return func.with_attr("global_symbol", "main")


def _extents(shape: Any, dtype: str) -> list[Any]:
    return [ir.tirx.IntImm(dtype, int(each)) for each in shape]


def _computed(block: Block, tensors: Mapping[Any, Any], dtype: str) -> Any:
    zero = ir.tirx.IntImm(dtype, 0)
    axes = {
        var: te.reduce_axis((zero, ir.tirx.IntImm(dtype, block.domain[var])), str(var.name))
        for var in block.summed
    }

    def element(*places: Any) -> Any:
        images = dict(zip(block.coordinates, places, strict=True))
        images |= {var: axis.var for var, axis in axes.items()}
        (value,) = substituted([block.value], images)
        value = ir.mutate(value, (ir.TensorLoad, _reading(tensors)))
        return _reduced(block, value, list(axes.values())) if block.combine else value

    shape = _extents((block.domain[each] for each in block.coordinates), dtype)
    return te.compute(shape, element, name=str(block.buffer.name))


def _reading(tensors: Mapping[Any, Any]) -> Callable[[Any, Any], Any]:
    def read(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        return tensors[load.source](*load.indices)

    return read


def _reduced(block: Block, value: Any, axes: Sequence[Any]) -> Any:
    """A reduction; one from what the block starts from, which may be -inf or the least number."""
    operator = _OPERATORS[block.combine]
    reduce = te.comm_reducer(operator, lambda dtype: block.initial, block.combine)
    return reduce(value, axis=axes) if axes else operator(block.initial, value)


def substituted(expressions: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
    """Expressions with others in the place of variables, whatever the width of these."""
    images = {var: _as_wide(value, str(var.ty)) for var, value in values.items()}
    return [ir.substitute(each, images) for each in expressions]


def _as_wide(value: Any, dtype: str) -> Any:
    if str(value.ty) == dtype:
        return value
    number = ir.constant(value)
    return ir.tirx.Cast(dtype, value) if number is None else ir.tirx.IntImm(dtype, number)
