"""Ring order: each CTA starts at its own slice, so that a step reads every slab once."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access, accesses, analyzer
from crossfuse.markers import DSM_SCOPE, DSM_SHUFFLE, cluster_axis, thread_tag

#: Operators whose operands may be taken in any order.
_COMMUTATIVE = (ir.tirx.Add, ir.tirx.Mul, ir.tirx.Max, ir.tirx.Min)


def rotate_rings(body: Any) -> Any:
    """Rotate the slice loop of every ring stage by the rank of the CTA.

    ``for r in range(n): f(r)`` inside the cluster-bound loop ``z`` becomes ``for r in range(n):
    f((r + z) % n)``. The loop is a reduction, so its iterations commute. Refused if the rank of the
    staged slice is not one serial loop, the reduction is initialised inside that loop, or the order
    of its iterations matters.
    """
    rotations: dict[Any, tuple[Any, int]] = {}
    for access in accesses(body):
        if access.buffer.scope() == DSM_SCOPE and access.read and access.indices:
            block = _ring_block(access)
            if block is not None:
                _add(rotations, block, access)
    return _rotate(body, rotations) if rotations else body


def _ring_block(access: Access) -> Any:
    """The block around an access that is annotated as a ring stage, or None."""
    for node in reversed(access.site.path):
        if isinstance(node, ir.SBlock) and str(node.annotations.get(DSM_SHUFFLE, "")) == "ring":
            return node
    return None


def _add(rotations: dict[Any, tuple[Any, int]], block: Any, access: Access) -> None:
    size = ir.constant(access.buffer.ty.shape[0])
    if size == 1:
        return
    assert access.indices is not None
    loops = access.loops
    rank = analyzer(loops).simplify(access.indices[0])
    cluster = [each for each in loops if cluster_axis(each) and ir.constant(each.extent) == size]
    slices = next((each for each in loops if each.loop_var.same_as(rank)), None)
    if (
        slices is None
        or not cluster
        or ir.constant(slices.extent) != size
        or thread_tag(slices)
        or cluster_axis(slices) is not None
        or not _inside(slices, cluster[-1])
    ):
        raise refuse(
            "dsm_shuffle",
            f"block '{block.name_hint}'",
            found=f"slice {rank} of {size}",
            limit="a ring walks over the slices by one serial loop inside the cluster-bound loop",
            instead="keep the slice loop whole, or call dsm_shuffle with ring=False",
        )
    _check_no_init(slices, block)
    _check_order(slices, block)
    rotations[slices.loop_var] = (cluster[-1].loop_var, int(size or 1))


def _inside(loop: Any, outer: Any) -> bool:
    inner = ir.nodes(outer.body, ir.For)
    return any(each.loop_var.same_as(loop.loop_var) for each in inner)


def _check_no_init(loop: Any, block: Any) -> None:
    for node in ir.nodes(loop.body, ir.IfThenElse):
        if ir.mentions(node.condition, loop.loop_var):
            raise refuse(
                "dsm_shuffle",
                f"block '{block.name_hint}', loop '{loop.loop_var.name}'",
                found=f"an initialisation inside the ring: if {node.condition}",
                limit="the order of a ring depends on the rank, so its first step is not step 0",
                instead="call sch.decompose_reduction(consumer, slice_loop) before lowering",
            )


def _check_order(loop: Any, block: Any) -> None:
    """Refuse a loop that carries values other than by a commutative update."""
    blocks = ir.nodes(loop.body, ir.SBlock)
    # Allocated anew in every iteration.
    local = {buffer for each in blocks for buffer in each.alloc_buffers}
    for access in accesses(loop.body):
        if not access.write or access.buffer in local:
            continue
        if not _by_slice(access, loop) and not _is_update(access):
            raise refuse(
                "dsm_shuffle",
                f"block '{block.name_hint}', loop '{loop.loop_var.name}'",
                found=f"a statement whose order matters: {access.site.text}",
                limit="the steps of a ring commute: each adds to the result, or writes a part of "
                "its own",
                instead="call dsm_shuffle with ring=False",
            )


def _by_slice(access: Access, loop: Any) -> bool:
    """Whether iterations write distinct elements, as a digit of an index shows."""
    count = ir.constant(loop.extent)
    known = analyzer((*access.loops, loop))
    for index in access.indices or ():
        terms = ir.sym.detect_linear_equation(known.simplify(index), [loop.loop_var])
        scale = ir.constant(known.simplify(terms[0])) if terms else None
        if not scale or count is None:
            continue
        digit = ir.tirx.floormod(ir.tirx.floordiv(index, scale), count)
        if known.can_prove_equal(digit, loop.loop_var):
            return True
    return False


def _is_update(access: Access) -> bool:
    """Whether a store is ``X[i] = X[i] + value``, or the like with *, max or min."""
    store = access.site.node
    if not isinstance(store, ir.BufferStore) or not isinstance(store.value, _COMMUTATIVE):
        return False
    for mine, other in ((store.value.a, store.value.b), (store.value.b, store.value.a)):
        if (
            isinstance(mine, ir.TensorLoad)
            and mine.source.same_as(store.buffer)
            and ir.tvm_ffi.structural_equal(list(mine.indices), list(store.indices))
            and not ir.mentions(other, store.buffer)
        ):
            return True
    return False


def _rotate(body: Any, rotations: dict[Any, tuple[Any, int]]) -> Any:
    def rotate(loop: Any, mutator: Any) -> Any:
        loop = mutator.default_mutate(loop)
        if loop.loop_var not in rotations:
            return loop
        rank, size = rotations[loop.loop_var]
        step = loop.loop_var
        rotated = ir.tirx.floormod(step + rank.astype(str(step.ty)), size)
        return ir.for_like(loop, ir.substitute(loop.body, {step: rotated}))

    return ir.mutate(body, (ir.For, rotate))
