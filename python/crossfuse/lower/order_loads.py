"""Keeps loads of vectors from global memory in program order.

ptxas puts a load where its number is needed if that takes fewer registers: of eight loads of a
thread, five of them under conditions, it left two behind what is computed from the one before, and
a CTA waited for memory three times instead of once. It keeps the order of relaxed loads.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import body_pass
from crossfuse.markers import FAST

#: Types and numbers of elements that one load of 16 bytes takes.
VECTORS = {("bfloat16", 8), ("float16", 8)}
_LOAD = """\
__device__ __forceinline__ uint4 crossfuse_load_in_order(const void* place) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(place) : "memory");
  return words;
}
"""


def load_in_order(source: Any, indices: list[Any], dtype: str, lanes: int | None) -> Any:
    """A load of 16 bytes from a buffer; ptxas keeps the order of such loads."""
    return ir.cuda_func_call(
        "crossfuse_load_in_order",
        source.ptr_to(indices),
        source_code=_LOAD,
        return_type=f"{dtype}x{lanes}",
    )


def order_loads() -> Any:
    """Pass: where vectors are loaded under conditions, those outside loops are loaded in order.

    ::

        if step < last:                     if step < last:
            A[8:16] = X[...]                    A[8:16] = load_in_order(&X[...])

    In a loop ptxas starts loads of the next iteration while it computes, which an order forbids. It
    runs after loops are unrolled, on functions marked `FAST`.
    """

    def ordered(body: Any) -> Any:
        if not _guarded(body):
            return body
        return ir.mutate(body, (ir.For, lambda loop, _: loop), (ir.BufferStore, _ordered))

    return body_pass("OrderLoads", FAST, ordered)


def _guarded(body: Any) -> bool:
    """Whether a vector is loaded into registers under a condition, outside loops."""
    nothing = ir.tirx.Evaluate(0)
    straight = ir.mutate(body, (ir.For, lambda node, mutator: nothing))
    guarded = (ir.buffer_stores(each) for each in ir.nodes(straight, ir.IfThenElse))
    return any(_is_load(store) for stores in guarded for store in stores)


def _ordered(store: Any, mutator: Any) -> Any:
    if not _is_load(store):
        return mutator.default_mutate(store)
    ramp, source = store.value.indices[0], store.value.source
    lanes = int(ramp.lanes)
    words = load_in_order(source, [ramp.base], str(source.ty.dtype), lanes)
    return ir.BufferStore(store.buffer, words, store.indices)


def _is_load(store: Any) -> bool:
    """Whether a store fills 16 bytes of registers from contiguous elements in global memory."""
    value = store.value
    if store.buffer.scope() != "local" or not isinstance(value, ir.TensorLoad):
        return False
    if value.source.scope() != "global" or len(value.indices) != 1:
        return False
    ramp = value.indices[0]
    if not isinstance(ramp, ir.tirx.Ramp) or ir.constant(ramp.stride) != 1:
        return False
    return (str(value.source.ty.dtype), int(ramp.lanes)) in VECTORS
