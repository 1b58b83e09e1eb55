"""The pass that removes what other passes needed to see, and synchronisations twice in a row."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.distrust_equal_indices import trust_again
from crossfuse.lower.intrinsics import is_barrier, is_sync
from crossfuse.lower.passes import prim_func_pass, was_lowered


def drop_markers() -> Any:
    """Pass: drop ``__syncthreads`` beside a cluster barrier, which is one for the CTA too.

    Indices that were hidden from `ThreadSync` are given back.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; a no-op without cluster barriers.
    """

    def transform(func: Any) -> Any:
        func = trust_again(func) if was_lowered(func) else func
        return ir.with_body(func, ir.mutate(func.body, (ir.SeqStmt, _sequence)))

    return prim_func_pass("DropMarkers", transform)


def _sequence(sequence: Any, mutator: Any) -> Any:
    statements: list[Any] = []
    for each in sequence.seq:
        mutated = mutator.mutate(each)
        statements += list(mutated.seq) if isinstance(mutated, ir.SeqStmt) else [mutated]
    kept: list[Any] = []
    after_barrier = False
    for each in statements:
        if is_barrier(each):
            while kept and is_sync(kept[-1]):
                kept.pop()
            after_barrier = True
        elif is_sync(each) and after_barrier:
            continue
        else:
            after_barrier = False
        kept.append(each)
    return ir.SeqStmt(kept) if len(kept) != 1 else kept[0]
