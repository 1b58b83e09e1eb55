"""Keeps arithmetic in its place, ahead of a wait."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.statements import run
from crossfuse.lower.hopper.stream.body import StreamBody
from crossfuse.lower.hopper.stream.program.parts import Kind
from crossfuse.lower.hopper.stream.rows import RowState

# ptxas puts arithmetic off until a wait is over, unless an access to memory in between wants it.
_PIN = """\
__device__ __forceinline__ void crossfuse_pin(float x, void* address) {
  unsigned to = (unsigned)__cvta_generic_to_shared(address);
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" \
:: "f"(x), "r"(to) : "memory");
}
"""


def pin_sums(body: StreamBody, rows: RowState) -> None:
    """Make what is summed before what stands behind this place is waited for.

    Parameters
    ----------
    body : StreamBody
        The kernel.
    rows : RowState
        Sums of a tile.
    """
    address = body.region("scratch")(0)
    for step in body.plan.program.steps:
        if step.kind is Kind.SUM:
            both = [rows.register(step.target, half) for half in range(2)]
            run(ir.cuda_func_call("crossfuse_pin", both[0] + both[1], address, source_code=_PIN))
