"""The blocks of a function, one for each buffer that it writes, over the buffer's coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access
from crossfuse.blocks.access import carried, combiner_of, is_reduction
from crossfuse.blocks.placement import LOWERED, check_plain, placement, refused


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
    #: For each dimension of the buffer, the strides of the coordinates that make it up; empty where
    #: each has one coordinate. See `crossfuse.planner.extract.reads`.
    strides: tuple[tuple[int, ...], ...] = ()
    #: What a reduction starts from; None if the block is element-wise.
    initial: Any = None

    @property
    def where(self) -> str:
        """The block's name in messages."""
        return f"block '{self.name}'"


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
