"""Flags of keys, such as a mask of padding, which are the same for all rows.

A thread that loaded those of its columns by itself would load a byte for each of them: that took a
third of the time of attention of one token. So the threads of a warp load a flag each, of 32
neighbouring keys, and vote: each keeps the word, and tests bits of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.stream.program import RowSteps, ranges

#: Keys of a word: threads of a warp.
VOTERS = 32
_VOTE = """\
__device__ __forceinline__ unsigned crossfuse_vote(bool flag) {
  return __ballot_sync(0xffffffffu, flag);
}
"""
_COMPARISONS = (ir.tirx.EQ, ir.tirx.NE, ir.tirx.LT, ir.tirx.LE, ir.tirx.GT, ir.tirx.GE)
#: Expressions that may be true or false.
_FLAGS = (ir.TensorLoad, ir.tirx.And, ir.tirx.Or, ir.tirx.Not, *_COMPARISONS)


def vote(flag: Any) -> Any:
    """Flags of 32 keys, one of each thread."""
    return ir.cuda_func_call("crossfuse_vote", flag, source_code=_VOTE, return_type="uint32")


def with_flags(value: Any, program: RowSteps, name: Callable[[Any], Any]) -> Any:
    """An expression of elements with something in the place of each of its largest flags."""

    def visit(part: Any, mutator: Any) -> Any:
        return name(part) if _is_flag(part, program) else mutator.default_mutate(part)

    return ir.mutate(value, *((kind, visit) for kind in _FLAGS))


def _is_flag(part: Any, program: RowSteps) -> bool:
    """Whether an expression is true or false of a key, whatever the row, by what is loaded."""
    if str(part.ty) != "bool" or ir.mentions(part, program.row):
        return False
    loads = ir.nodes(part, ir.TensorLoad)
    stored = all(ir.is_global(each.source) for each in loads)
    return stored and any(ir.mentions(each, program.key) for each in loads)


def load_within(load: Any, program: RowSteps) -> Any:
    """A load of a parameter; beyond it, where nothing counts, of its first or last element."""
    bounded = ranges(program)
    indices = []
    for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
        index = index if bounded.can_prove(index >= 0) else ir.script.max(index, 0)
        inside = bounded.can_prove(index < extent)
        indices.append(index if inside else ir.script.min(index, extent - 1))
    return load.source[tuple(indices)]
