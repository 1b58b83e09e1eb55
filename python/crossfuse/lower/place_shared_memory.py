"""The pass that puts all shared buffers of a cluster kernel into one planned allocation."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.image import Placement, SharedMemoryPlan, check_budget
from crossfuse.lower.passes import prim_func_pass, unused, was_lowered
from crossfuse.lower.refusal import refuse
from crossfuse.lower.slabs import is_barrier, is_sync
from crossfuse.lower.tree import buffer_behind, children, evaluated, is_call, is_executed, text_of
from crossfuse.markers import SHARED_SCOPES

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

    return prim_func_pass("PlaceSharedMemory", transform)


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
