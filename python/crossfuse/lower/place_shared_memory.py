"""The pass that puts all shared buffers of a cluster kernel into one planned allocation."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.hardware import MAX_SHARED_BYTES
from crossfuse.lower.lower_cluster import was_lowered
from crossfuse.lower.passes import prim_func_pass
from crossfuse.lower.shared_memory_plan import (
    ALIGNMENT,
    Placement,
    SharedMemoryPlan,
    plan_shared_memory,
)

ARENA = "crossfuse_shared"
#: Function attribute with the plan: buffer name -> offset, size, first and last interval.
SHARED_MEMORY = "crossfuse.shared_memory"


def place_shared_memory() -> Any:
    """Pass: every shared buffer becomes a view of one dynamic allocation, by the plan.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; functions without our marks keep TVM's own allocation.

    Raises
    ------
    LoweringRefused
        If the plan exceeds the shared memory of a CTA.
    """

    def transform(func: Any) -> Any:
        if not was_lowered(func):
            return func
        body, placements = _kernels(func.body)
        notes = {each.name: [each.offset, each.size, each.first, each.last] for each in placements}
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
    plan, offsets = plan_shared_memory(launch)
    if not offsets:
        return launch, plan
    check_budget(plan)
    arena = ir.tirx.decl_buffer(
        (plan.total,), "uint8", ARENA, scope="shared.dyn", data_alignment=ALIGNMENT
    )
    views = {buffer: _view(buffer, arena) for buffer in offsets}
    shift = {buffer: offsets[buffer] // _element(buffer) for buffer in offsets}

    def load(node: Any, mutator: Any) -> Any:
        if node.source not in views:
            return mutator.default_mutate(node)
        index = _moved(mutator.mutate(node.indices[0]), shift[node.source])
        return ir.tirx.BufferLoad(views[node.source], [index])

    def store(node: Any, mutator: Any) -> Any:
        if node.buffer not in views:
            return mutator.default_mutate(node)
        index = _moved(mutator.mutate(node.indices[0]), shift[node.buffer])
        return ir.BufferStore(views[node.buffer], mutator.mutate(node.value), [index])

    def allocate(node: Any, _mutator: Any) -> Any:
        if node.buffer not in views:
            return node
        return ir.DeclBuffer(views[node.buffer], data=arena.data)

    body = ir.mutate(
        launch.body, (ir.TensorLoad, load), (ir.BufferStore, store), (ir.AllocBuffer, allocate)
    )
    body = ir.SeqStmt([ir.AllocBuffer(arena), *(body.seq if _is_seq(body) else [body])])
    return ir.AttrStmt(launch.node, launch.attr_key, launch.value, body), plan


def _is_seq(body: Any) -> bool:
    return isinstance(body, ir.SeqStmt)


def _element(buffer: Any) -> int:
    dtype = ir.tvm.DataType(str(buffer.ty.dtype))
    return int(dtype.bits // 8 * dtype.lanes)


def _view(buffer: Any, arena: Any) -> Any:
    return ir.tirx.decl_buffer(
        buffer.ty.shape, buffer.ty.dtype, buffer.name, data=arena.data, scope="shared.dyn"
    )


def _moved(index: Any, elements: int) -> Any:
    if elements == 0:
        return index
    if isinstance(index, ir.tirx.Ramp):
        return ir.tirx.Ramp(index.base + elements, index.stride, index.lanes)
    return index + elements


def check_budget(plan: SharedMemoryPlan) -> None:
    """Refuse a plan that no CTA can hold.

    Raises
    ------
    LoweringRefused
        With every buffer and its bytes.
    """
    if plan.total <= MAX_SHARED_BYTES:
        return
    sizes = ", ".join(f"'{each.name}' {each.size}" for each in plan.placements)
    raise refuse(
        LoweringRefused,
        "shared-memory",
        "kernel",
        found=f"{plan.total} bytes ({sizes})",
        limit=f"{MAX_SHARED_BYTES} bytes of shared memory in a CTA",
        instead="use smaller tiles, a larger cluster, or stage parts of a slice (a dsm_shuffle "
        "loop inside the slice loop)",
    )
