"""What a block that merges states says: what it reduces, and how two states become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.markers import MERGE_EQUAL


@dataclass(frozen=True, eq=False)
class MergeBlock:
    """A block whose body binds the right state, computes, and stores.

    Attributes
    ----------
    realize : tvm.s_tir.SBlockRealize
        The block with what its iterators are bound to.
    reduced : tvm.tirx.IterVar
        The iterator that is reduced.
    of : tuple[tvm.ir.TensorLoad, ...]
        The right state, number by number.
    right : tuple[tvm.tirx.Var, ...]
        What it is bound to.
    computed : tuple[tvm.tirx.Bind | tvm.tirx.BufferStore, ...]
        What else is bound, or stored to buffers of the block itself, in order.
    into : tuple[tvm.tirx.BufferStore, ...]
        Stores of the merged state; loads from their buffers are the left state.
    equal : tuple[int, ...]
        For each number its value in all states that are merged, or 0; see `MERGE_EQUAL`.
    """

    realize: Any
    reduced: Any
    of: tuple[Any, ...]
    right: tuple[Any, ...]
    computed: tuple[Any, ...]
    into: tuple[Any, ...]
    equal: tuple[int, ...] = ()

    @property
    def block(self) -> Any:
        """The block."""
        return self.realize.block


def read_merge(realize: Any) -> MergeBlock:
    """Read a block marked as a merge.

    Parameters
    ----------
    realize : tvm.s_tir.SBlockRealize
        The block, as `crossfuse.cascade.rewrite.merging.merge` writes it.

    Returns
    -------
    MergeBlock
        Its parts.

    Raises
    ------
    LoweringRefused
        If the block has another form.
    """
    block = realize.block
    body = list(block.body.seq) if isinstance(block.body, ir.SeqStmt) else [block.body]
    stores = [
        each
        for each in body
        if isinstance(each, ir.BufferStore) and each.buffer not in block.alloc_buffers
    ]
    right, computed = body[: len(stores)], body[len(stores) : len(body) - len(stores)]
    reduced = [each for each in block.iter_vars if int(each.iter_type) == ir.IterVar.CommReduce]
    ordered = len(body) >= 2 * len(stores) > 0 and all(
        one.same_as(other) for one, other in zip(body[-len(stores) :], stores, strict=True)
    )
    ordered = ordered and all(isinstance(each, ir.Bind) and _is_load(each.value) for each in right)
    ordered = ordered and all(isinstance(each, ir.Bind | ir.BufferStore) for each in computed)
    if len(reduced) != 1 or not ordered:
        raise refuse(
            "merge",
            f"block '{block.name_hint}'",
            found=f"{len(body)} statements, {len(stores)} stores among them, and {len(reduced)} "
            "reduced iterators",
            limit="bindings of as many loads as there are stores, bindings and stores to buffers "
            "of the block, then the stores; one iterator that is reduced",
            instead="leave the block as the rewriting made it",
        )
    return MergeBlock(
        realize,
        reduced[0],
        tuple(each.value for each in right),
        tuple(each.var for each in right),
        tuple(computed),
        tuple(stores),
        tuple(map(int, block.annotations.get(MERGE_EQUAL, [0] * len(stores)))),
    )


def _is_load(value: Any) -> bool:
    return isinstance(value, ir.TensorLoad)


def is_largest(merge: MergeBlock) -> bool:
    """Whether a block merges one float32 as the larger of two, from zero on."""
    if len(merge.into) != 1 or len(merge.computed) != 1 or str(merge.of[0].ty) != "float32":
        return False
    (store,), (made,) = merge.into, merge.computed
    init = merge.block.init
    zero = isinstance(init, ir.BufferStore) and isinstance(init.value, ir.tirx.FloatImm)
    if not zero or float(init.value.value) != 0 or not isinstance(made, ir.Bind):
        return False
    if not isinstance(made.value, ir.tirx.Max) or not store.value.same_as(made.var):
        return False
    sides = (made.value.a, made.value.b)
    own = any(isinstance(e, ir.TensorLoad) and e.source.same_as(store.buffer) for e in sides)
    return own and any(each.same_as(merge.right[0]) for each in sides)
