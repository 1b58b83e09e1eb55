"""Streams of tiles: cascades of reductions between two products, as in attention.

`recover/` reads a `StreamProgram` (`program`) off the scheduled function, `plan/` decides tiles,
stages and shared memory, `kernel` composes the parts: one warpgroup loads, the others multiply,
each 64 rows, with the state of their rows in registers; or, of wide sums, one scores and others
add, each to some columns of the same 64 rows (`columns`). Where CTAs share keys, their states meet
by `merge`.
"""

from crossfuse.lower.hopper.stream.kernel import emit_stream
from crossfuse.lower.hopper.stream.merge import emit_merge, plan_merge
from crossfuse.lower.hopper.stream.plan.kernel import plan_stream
from crossfuse.lower.hopper.stream.recover.function import is_stream, recover_streams

__all__ = [
    "emit_merge",
    "emit_stream",
    "is_stream",
    "plan_merge",
    "plan_stream",
    "recover_streams",
]
