"""Ring order: each CTA starts at its own slice, so that a step reads every slab once."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.lower.kernel import dsm_accesses, statements
from crossfuse.schedule.markers import DSM_SHUFFLE, cluster_axis


def rotate_rings(body: Any) -> Any:
    """Rotate the slice loop of every ring stage by the rank of the CTA.

    ``for r in range(n): f(r)`` inside the cluster-bound loop ``z`` becomes
    ``for r in range(n): f((r + z) % n)``. The loop is a reduction, so its iterations commute.

    Raises
    ------
    LoweringRefused
        If the rank of the staged slice is not one serial loop, or the reduction is initialised
        inside that loop.
    """
    rotations: dict[Any, tuple[Any, int]] = {}

    def visit(block: Any) -> None:
        if str(block.annotations.get(DSM_SHUFFLE, "")) == "ring":
            for access in dsm_accesses(block.body):
                if not access.write:
                    _add(rotations, body, block, access)

    ir.walk(body, (ir.SBlock, visit))
    return _rotate(body, rotations) if rotations else body


def _add(rotations: dict[Any, tuple[Any, int]], body: Any, block: Any, access: Any) -> None:
    around = _loops_around(body, block)
    size = ir.constant(access.buffer.ty.shape[0])
    if size == 1:
        return
    cluster = [each for each in around if cluster_axis(each) and ir.constant(each.extent) == size]
    analyzer = ir.sym.Analyzer()
    for loop in access.loops:
        analyzer.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    rank = analyzer.simplify(access.indices[0])
    loop = next((each for each in around if each.loop_var.same_as(rank)), None)
    if loop is None or not cluster or ir.constant(loop.extent) != size:
        raise refuse(
            LoweringRefused,
            "dsm_shuffle",
            f"block '{block.name_hint}'",
            found=f"slice {rank} of {size}",
            limit="a ring walks over the slices by one serial loop inside the cluster-bound loop",
            instead="keep the slice loop whole, or call dsm_shuffle with ring=False",
        )
    _check_no_init(loop, block)
    rotations[loop.loop_var] = (cluster[-1].loop_var, int(size or 1))


def _loops_around(body: Any, block: Any) -> tuple[Any, ...]:
    inside: list[Any] = []
    ir.walk(block.body, (ir.BufferStore, inside.append))
    for statement, loops in statements(body):
        if any(statement.same_as(each) for each in inside):
            return loops
    return ()


def _check_no_init(loop: Any, block: Any) -> None:
    def visit(node: Any) -> None:
        if any(var.same_as(loop.loop_var) for var in ir.variables(node.condition)):
            raise refuse(
                LoweringRefused,
                "dsm_shuffle",
                f"block '{block.name_hint}', loop '{loop.loop_var.name}'",
                found=f"an initialisation inside the ring: if {node.condition}",
                limit="the order of a ring depends on the rank, so its first step is not step 0",
                instead="call sch.decompose_reduction(consumer, slice_loop) before lowering",
            )

    ir.walk(loop.body, (ir.IfThenElse, visit))


def _rotate(body: Any, rotations: dict[Any, tuple[Any, int]]) -> Any:
    def rotate(loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        if loop.loop_var not in rotations:
            return loop
        rank, size = rotations[loop.loop_var]
        step = loop.loop_var
        rotated = ir.tirx.floormod(step + rank, size)
        inner = ir.substitute(loop.body, lambda var: rotated if var.same_as(step) else var)
        return ir.for_like(loop, inner)

    return ir.mutate(body, (ir.For, rotate))
