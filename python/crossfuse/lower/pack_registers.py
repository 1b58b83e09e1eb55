"""Passes for registers that vectors are loaded to: two bfloat16 in one, loads in program order.

A local array of bfloat16 that is loaded by vectors becomes 16-bit values in nvcc, each of which
takes a register of 32 bits. As an array of 32-bit words it takes half as many, and each number is
one instruction away: a bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import body_pass
from crossfuse.markers import FAST

_NARROW, _WORD = "bfloat16", "uint32"
#: A word as it is: no warp has a number of more than 16 bits, but neither nvcc nor ptxas knows, and
#: words with different numbers are different ones to them.
_OPAQUE = """\
__device__ __forceinline__ unsigned crossfuse_opaque(unsigned word, unsigned number) {
  unsigned warp;
  asm("mov.u32 %0, %%warpid;" : "=r"(warp));
  return word ^ ((warp >> 16) * number);
}
"""


def pack_registers() -> Any:
    """Pass: local arrays of bfloat16 become arrays of words.

    An array qualifies if vectors of an even number of elements are stored to it at even places, and
    if its elements are loaded one by one, at constant places, to be float32::

        A[0:8] = X[...]                 W[0:4] = reinterpret("uint32x4", X[...])
        float32(A[2])                   reinterpret("float32", W[1] << 16)
        float32(A[3])                   reinterpret("float32", W[1] & 0xFFFF0000)
        B[0:8] = A[8:16]                V[i] = opaque(W[i + 4]), for each of the four

    Copies separate what is computed from A from what is computed from B: nvcc would else keep
    float32 numbers of the one for the other, which take twice as many registers as words. It runs
    after loops are unrolled, on functions marked `FAST`.
    """
    return body_pass("PackRegisters", FAST, _packed)


def _packed(body: Any) -> Any:
    words = {each: _words(each) for each in _candidates(body)}
    if not words:
        return body

    numbers: dict[Any, int] = {}

    def cast(node: Any, mutator: Any) -> Any:
        if not _is_element(node) or node.value.source not in words:
            return mutator.default_mutate(node)
        place = ir.constant(node.value.indices[0]) or 0
        word = words[node.value.source][place // 2]
        high = ir.tirx.const(0xFFFF0000, _WORD)
        bits = ir.tirx.bitwise_and(word, high) if place % 2 else word << 16
        return ir.tirx.reinterpret("float32", bits)

    def store(node: Any, mutator: Any) -> Any:
        if node.buffer in words and _is_copy(node) and node.value.source in words:
            number = numbers.setdefault(node.buffer, 1 + 2 * len(numbers))
            return _opaque(words[node.buffer], node.indices[0], words, node.value, number)
        node = mutator.default_mutate(node)
        if node.buffer not in words:
            return node
        ramp = node.indices[0]
        lanes = int(ramp.lanes) // 2
        value = ir.tirx.reinterpret(f"{_WORD}x{lanes}" if lanes > 1 else _WORD, node.value)
        first = (ir.constant(ramp.base) or 0) // 2
        place = ir.tirx.Ramp(ir.tirx.IntImm("int32", first), 1, lanes) if lanes > 1 else first
        return ir.BufferStore(words[node.buffer], value, [place])

    def allocate(node: Any, mutator: Any) -> Any:
        if node.buffer not in words:
            return mutator.default_mutate(node)
        return ir.AllocBuffer(words[node.buffer])

    return ir.mutate(
        body, (ir.tirx.Cast, cast), (ir.BufferStore, store), (ir.AllocBuffer, allocate)
    )


def _is_copy(store: Any) -> bool:
    """Whether a store copies a vector from one array to another, or within one."""
    return isinstance(store.value, ir.TensorLoad) and _is_vector(store.value.indices)


def _is_vector(indices: Any) -> bool:
    """Whether indices are an even number of contiguous elements from a constant, even place."""
    ramp = indices[0]
    if not isinstance(ramp, ir.tirx.Ramp) or ir.constant(ramp.stride) != 1:
        return False
    start = ir.constant(ramp.base)
    return start is not None and start % 2 == 0 and int(ramp.lanes) % 2 == 0


def _opaque(into: Any, ramp: Any, words: dict[Any, Any], value: Any, number: int) -> Any:
    """Statements: copy a vector between arrays word by word, each with a number of its own."""
    of, first = words[value.source], (ir.constant(ramp.base) or 0) // 2
    other = (ir.constant(value.indices[0].base) or 0) // 2
    copies = []
    for i in range(int(ramp.lanes) // 2):
        word = of[ir.tirx.IntImm("int32", other + i)]
        apart = ir.tirx.const(number, _WORD)
        call = ir.cuda_func_call(
            "crossfuse_opaque", word, apart, source_code=_OPAQUE, return_type=_WORD
        )
        copies.append(ir.BufferStore(into, call, [ir.tirx.IntImm("int32", first + i)]))
    return ir.SeqStmt(copies) if len(copies) > 1 else copies[0]


def _words(buffer: Any) -> Any:
    size = ir.constant(buffer.ty.shape[0]) or 0
    return ir.tirx.decl_buffer([size // 2], _WORD, f"{buffer.name}_words", scope="local")


def _candidates(body: Any) -> list[Any]:
    """Arrays all of whose uses can be packed."""
    allocated: list[Any] = []
    stored: dict[Any, int] = {}
    refused: set[Any] = set()
    elements: dict[Any, int] = {}
    uses: dict[Any, int] = {}
    copies: list[tuple[Any, Any]] = []

    def visit_allocation(node: Any) -> None:
        kind = node.buffer.ty
        if str(kind.dtype) == _NARROW and node.buffer.scope() == "local" and len(kind.shape) == 1:
            allocated.append(node.buffer)

    def visit_store(node: Any) -> None:
        stored[node.buffer] = stored.get(node.buffer, 0) + 1
        if not _is_vector(node.indices):
            refused.add(node.buffer)
        elif _is_copy(node):
            copies.append((node.value.source, node.buffer))

    def visit_cast(node: Any) -> None:
        if _is_element(node) and ir.constant(node.value.indices[0]) is not None:
            elements[node.value.source] = elements.get(node.value.source, 0) + 1

    def visit_variable(node: Any) -> None:
        uses[node] = uses.get(node, 0) + 1

    ir.walk(
        body,
        (ir.AllocBuffer, visit_allocation),
        (ir.BufferStore, visit_store),
        (ir.tirx.Cast, visit_cast),
        (ir.Var, visit_variable),
    )
    for source, _ in copies:
        stored[source] = stored.get(source, 0) + 1
    found = [
        each
        for each in allocated
        if each not in refused
        and (each in elements or any(source.same_as(each) for source, _ in copies))
        and stored.get(each, 0) + elements.get(each, 0) + _declarations(body, each)
        == uses.get(each, 0)
    ]
    while True:
        # What is copied as a vector into something that is not packed is not packed either.
        apart = [source for source, into in copies if source in found and into not in found]
        if not apart:
            return found
        found = [each for each in found if each not in apart]


def _declarations(body: Any, buffer: Any) -> int:
    """How often a walk visits an allocation's own buffer."""
    count: list[Any] = []

    def visit(node: Any) -> None:
        if node.buffer.same_as(buffer):
            ir.walk(node, (ir.Var, lambda var: count.append(var) if var.same_as(buffer) else None))

    ir.walk(body, (ir.AllocBuffer, visit))
    return len(count)


def _is_element(node: Any) -> bool:
    return (
        str(node.ty) == "float32"
        and isinstance(node.value, ir.TensorLoad)
        and str(node.value.ty) == _NARROW
        and len(node.value.indices) == 1
    )


# Keeps loads of vectors from global memory in program order.
#
# ptxas puts a load where its number is needed if that takes fewer registers: of eight loads of a
# thread, five of them under conditions, it left two behind what is computed from the one before,
# and a CTA waited for memory three times instead of once. It keeps the order of relaxed loads.

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
