"""What a block that merges states says: what it reduces, and how two states become one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse


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
    computed : tuple[tvm.tirx.Bind, ...]
        What else is bound, in order.
    into : tuple[tvm.tirx.BufferStore, ...]
        Stores of the merged state; loads from their buffers are the left state.
    """

    realize: Any
    reduced: Any
    of: tuple[Any, ...]
    right: tuple[Any, ...]
    computed: tuple[Any, ...]
    into: tuple[Any, ...]

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
    binds = [each for each in body if isinstance(each, ir.Bind)]
    stores = [each for each in body if isinstance(each, ir.BufferStore)]
    reduced = [each for each in block.iter_vars if int(each.iter_type) == ir.IterVar.CommReduce]
    right = binds[: len(stores)]
    wanted = [*binds, *stores]
    ordered = len(right) == len(stores) > 0 and len(body) == len(wanted)
    ordered = ordered and all(one.same_as(other) for one, other in zip(body, wanted, strict=True))
    if len(reduced) != 1 or not ordered or not all(_is_load(each.value) for each in right):
        raise refuse(
            "merge",
            f"block '{block.name_hint}'",
            found=f"{len(binds)} bindings, {len(stores)} stores, {len(body)} statements and "
            f"{len(reduced)} reduced iterators",
            limit="bindings of as many loads as there are stores, other bindings, then the stores; "
            "one iterator that is reduced",
            instead="leave the block as the rewriting made it",
        )
    return MergeBlock(
        realize,
        reduced[0],
        tuple(each.value for each in right),
        tuple(each.var for each in right),
        tuple(binds[len(stores) :]),
        tuple(stores),
    )


def _is_load(value: Any) -> bool:
    return isinstance(value, ir.TensorLoad)
