"""Passes for registers that vectors are loaded to: two bfloat16 in one, loads in program order.

A local array of bfloat16 that is loaded by vectors becomes 16-bit values in nvcc, each of which
takes a register of 32 bits. As an array of 32-bit words it takes half as many, and each number is
one instruction away: a bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import Placement, SharedMemoryPlan, check_budget
from crossfuse.lower.refusal import refuse
from crossfuse.lower.slabs import is_barrier, is_sync, unused
from crossfuse.lower.tree import buffer_behind, children, evaluated, is_call, is_executed, text_of
from crossfuse.markers import FAST, SHARED_SCOPES, was_lowered

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
    return ir.body_pass("PackRegisters", FAST, _packed)


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

    return ir.body_pass("OrderLoads", FAST, ordered)


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


# The pass that puts all shared buffers of a cluster kernel into one planned allocation.


# Where each shared buffer of a cluster kernel lies in the CTA's dynamic shared memory.
#
# TVM's own merging pass recycles memory between buffers without a synchronisation between the last
# access to one and the first to the other, and it does not know that peers read a slab until the
# next cluster barrier. Here two buffers share bytes only if a cluster barrier lies between their
# uses, in every CTA.

#: Bytes; a bulk access wants 128, and buffers that want more say so.
ALIGNMENT = 128


def plan_shared_memory(body: Any) -> tuple[SharedMemoryPlan, dict[Any, int]]:
    """Place the shared buffers allocated below `body`, with a byte offset for each variable.

    Greedy by size, first fit among the buffers whose intervals overlap. Buffers are flat, and
    cluster barriers calls.
    """
    intervals = _Intervals(body).found
    order = sorted(intervals, key=lambda each: (-size_in_bytes(each), str(each.name)))
    placements: list[Placement] = []
    offsets: dict[Any, int] = {}
    for buffer in order:
        first, last = intervals[buffer]
        size = size_in_bytes(buffer)
        rivals = [each for each in placements if each.first <= last and first <= each.last]
        offsets[buffer] = first_fit(size, alignment(buffer), rivals)
        placements.append(Placement(str(buffer.name), offsets[buffer], size, first, last))
    total = max((each.offset + each.size for each in placements), default=0)
    return SharedMemoryPlan(tuple(placements), total), offsets


def first_fit(size: int, align: int, rivals: list[Placement]) -> int:
    """Lowest aligned offset at which `size` bytes are clear of all `rivals`."""
    offset = 0
    for rival in sorted(rivals, key=lambda each: each.offset):
        if offset + size <= rival.offset:
            break
        end = rival.offset + rival.size
        offset = max(offset, (end + align - 1) // align * align)
    return offset


def alignment(buffer: Any) -> int:
    """Bytes to which the start of a buffer is aligned."""
    return max(ALIGNMENT, int(buffer.data_alignment))


def element_bits(buffer: Any) -> int:
    """Bits of one element, all lanes of a vector together."""
    dtype = ir.tvm.DataType(str(buffer.ty.dtype))
    return int(dtype.bits * dtype.lanes)


def size_in_bytes(buffer: Any) -> int:
    """Bytes of a buffer of constant shape."""
    bits = element_bits(buffer)
    for extent in buffer.ty.shape:
        bits *= int(extent)
    return (bits + 7) // 8


class _Intervals:
    """Numbers the intervals between cluster barriers, and finds in which of them a buffer is used.

    `found` maps each allocated shared buffer to the first and last number. A loop with a barrier is
    one interval, as the end of an iteration runs into the start of the next. A barrier that may not
    be executed, in a conditional or a loop of unknown extent, separates nothing outside.
    """

    def __init__(self, body: Any) -> None:
        self.found: dict[Any, tuple[int, int]] = {}
        allocated = (each.buffer for each in ir.nodes(body, ir.AllocBuffer))
        self.owners = {each: each for each in allocated if str(each.scope()) in SHARED_SCOPES}
        self.now = 0
        self._visit(body)

    def _visit(self, node: Any) -> None:
        if isinstance(node, ir.AllocBuffer):
            return
        if is_barrier(node):
            self.now += 1
            return
        if isinstance(node, (ir.DeclBuffer, ir.Bind)):
            self._alias(node)
        start = self.now
        for expression in (*evaluated(node), *_subjects(node)):
            self._touch(expression, start, start)
        for child in children(node):
            self._visit(child)
        if self.now > start and isinstance(node, (ir.For, ir.tirx.While, ir.IfThenElse)):
            self._touch(node, start, self.now)
            if not is_executed(node):
                self.now = start

    def _alias(self, node: Any) -> None:
        """Treat a view, or a pointer bound to a variable, as the buffer it points to."""
        made, source = (
            (node.buffer, node.data) if isinstance(node, ir.DeclBuffer) else (node.var, node.value)
        )
        if isinstance(node, ir.Bind) and not _is_pointer(made):
            return
        for variable in ir.variables(source):
            if variable in self.owners:
                self.owners[made] = self.owners[variable]

    def _touch(self, node: Any, first: int, last: int) -> None:
        for variable in ir.variables(node):
            if variable in self.owners:
                buffer = self.owners[variable]
                low, high = self.found.get(buffer, (first, last))
                self.found[buffer] = (min(low, first), max(high, last))


def _subjects(node: Any) -> list[Any]:
    """Buffers that a statement names without evaluating an expression of them."""
    return [node.buffer] if isinstance(node, ir.BufferStore) else []


def _is_pointer(variable: Any) -> bool:
    return not isinstance(variable.ty, ir.tvm.ir.PrimType)


ARENA = "crossfuse_shared"
#: Function attribute with the plan: buffer name -> offset, size, first and last interval.
SHARED_MEMORY = "crossfuse.shared_memory"


def place_shared_memory() -> Any:
    """Pass: every shared buffer becomes a view of one dynamic allocation, by the plan.

    Functions without our marks keep TVM's own allocation. Refused if the plan exceeds the shared
    memory of a CTA.
    """

    def transform(func: Any) -> Any:
        if not was_lowered(func):
            return func
        body, placements = _kernels(func.body)
        notes: dict[str, list[int]] = {}
        for each in placements:
            # Some have one name, such as stages of one operand in two nests.
            name = unused(each.name, notes)
            notes[name] = [each.offset, each.size, each.first, each.last]
        return ir.with_body(func, body).with_attr(SHARED_MEMORY, notes)

    return ir.prim_func_pass("PlaceSharedMemory", transform)


def _kernels(body: Any) -> tuple[Any, list[Placement]]:
    """Place the buffers of each launch on its own."""
    placements: list[Placement] = []

    def visit(launch: Any, mutator: Any) -> Any:
        if launch.attr_key != "thread_extent":
            return mutator.default_mutate(launch)
        placed, plan = _place(launch)
        placements.extend(plan.placements)
        return placed

    return ir.mutate(body, (ir.AttrStmt, visit)), placements


def _place(launch: Any) -> tuple[Any, SharedMemoryPlan]:
    _check_warps(launch)
    plan, offsets = plan_shared_memory(launch)
    if not offsets:
        return launch, plan
    check_budget(plan)
    align = max(ALIGNMENT, *(alignment(buffer) for buffer in offsets))
    arena = ir.tirx.decl_buffer(
        (plan.total,), "uint8", ARENA, scope="shared.dyn", data_alignment=align
    )
    body = _Views(arena, offsets).rewrite(launch.body)
    statements = body.seq if isinstance(body, ir.SeqStmt) else [body]
    body = ir.SeqStmt([ir.AllocBuffer(arena), *statements])
    return ir.AttrStmt(launch.node, launch.attr_key, launch.value, body), plan


def _check_warps(launch: Any) -> None:
    """Refuse reductions over a number of threads for which TVM relies on warps in lockstep.

    Its threads then exchange values through shared memory with a warp synchronisation between,
    which CUDA's code generator leaves out: correct up to compute capability 6, a race since.
    """
    for node in ir.nodes(launch, ir.AttrStmt):
        if str(node.attr_key) != "reduce_scope":
            continue
        if any(is_sync(each, ("warp",)) for each in ir.nodes(node.body, ir.Evaluate)):
            raise refuse(
                "thread-reduction",
                "kernel",
                found="a reduction over threads that TVM lowers without synchronising warps",
                limit="reductions by warp shuffles",
                instead="bind a multiple of 32 threads, or a power of two below, to the reduction "
                "loop",
            )


class _Views:
    """Replaces buffers by views of the arena; an element moves by the buffer's offset."""

    def __init__(self, arena: Any, offsets: dict[Any, int]) -> None:
        self.arena = arena
        self.offsets = dict(offsets)
        self.views = {buffer: self._view(buffer) for buffer in offsets}

    def rewrite(self, body: Any) -> Any:
        body = ir.mutate(
            body,
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.AllocBuffer, self._allocate),
            (ir.DeclBuffer, self._declare),
            (ir.Call, self._call),
            (ir.AttrStmt, self._attribute),
        )
        for variable in ir.variables(body):
            if variable in self.views:
                raise _unmoved(body, variable)
        return body

    def _view(self, buffer: Any) -> Any:
        return ir.tirx.decl_buffer(
            buffer.ty.shape,
            buffer.ty.dtype,
            buffer.name,
            data=self.arena.data,
            scope="shared.dyn",
        )

    def _shift(self, buffer: Any) -> int:
        return self.offsets[buffer] * 8 // element_bits(buffer)

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source not in self.views:
            return mutator.default_mutate(load)
        index = _moved(mutator.mutate(load.indices[0]), self._shift(load.source))
        return ir.tirx.BufferLoad(self.views[load.source], [index])

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer not in self.views:
            return mutator.default_mutate(store)
        index = _moved(mutator.mutate(store.indices[0]), self._shift(store.buffer))
        return ir.BufferStore(self.views[store.buffer], mutator.mutate(store.value), [index])

    def _allocate(self, node: Any, _mutator: Any) -> Any:
        if node.buffer not in self.views:
            return node
        return ir.DeclBuffer(self.views[node.buffer], data=self.arena.data)

    def _declare(self, node: Any, mutator: Any) -> Any:
        """A view of a buffer becomes one of the arena, moved by the same bytes."""
        data = node.data
        if not is_call(data, "tirx.buffer_data") or data.args[0] not in self.views:
            return mutator.default_mutate(node)
        self.offsets[node.buffer] = self.offsets[data.args[0]]
        self.views[node.buffer] = self._view(node.buffer)
        return ir.DeclBuffer(self.views[node.buffer], data=self.arena.data)

    def _call(self, call: Any, mutator: Any) -> Any:
        if is_call(call, "tirx.tvm_access_ptr") and buffer_behind(call.args[1]) in self.views:
            kind, pointer, offset, extent, mask = call.args
            buffer = buffer_behind(pointer)
            dtype = ir.tvm.DataType(str(kind.ty))
            shift = self.offsets[buffer] * 8 // int(dtype.bits * dtype.lanes)
            moved = _moved(mutator.mutate(offset), shift)
            view = self.views[buffer]
            source = view if pointer.same_as(buffer) else view.data
            arguments = [kind, source, moved, mutator.mutate(extent), mask]
            return ir.Call(call.op, arguments, ret_ty=call.ty)
        if is_call(call, "tirx.buffer_data") and call.args[0] in self.views:
            buffer = call.args[0]
            start = ir.tirx.BufferLoad(self.views[buffer], [self._shift(buffer)])
            return ir.tirx.address_of(start)
        return mutator.default_mutate(call)

    def _attribute(self, node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if isinstance(node.node, ir.Var) and node.node in self.views:
            return ir.AttrStmt(self.views[node.node], node.attr_key, node.value, node.body)
        return node


def _moved(index: Any, elements: int) -> Any:
    if elements == 0:
        return index
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(_moved(index.base, elements), index.stride, index.lanes)
    lanes = ir.tvm.DataType(str(index.ty)).lanes
    step = ir.tirx.const(elements, str(index.ty).split("x", maxsplit=1)[0])
    return index + (step if lanes == 1 else ir.tirx.Broadcast(step, lanes))


def _unmoved(body: Any, buffer: Any) -> Exception:
    statements = (
        node for kind in (ir.Evaluate, ir.Bind, ir.AttrStmt) for node in ir.nodes(body, kind)
    )
    use = next((each for each in statements if ir.mentions(each, buffer)), None)
    return refuse(
        "shared-memory",
        f"buffer '{buffer.name}'",
        found=f"a use that cannot be moved: {buffer.name if use is None else text_of(use)}",
        limit="loads, stores, views and pointers of elements",
        instead="pass the buffer to calls as access_ptr or address_of",
    )
