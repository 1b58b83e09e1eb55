"""The pass that turns cluster-bound loops and DSM buffers into CTAs, slabs and barriers."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.barrier_plan import BarrierPlan, plan_barriers
from crossfuse.lower.intrinsics import cluster_barrier
from crossfuse.lower.kernel import ClusterKernel, is_own, read_kernel
from crossfuse.lower.passes import prim_func_pass
from crossfuse.lower.rotate_ring import rotate_rings
from crossfuse.lower.verify import verify_kernel
from crossfuse.schedule.markers import (
    AXES,
    CLUSTER_AXIS,
    DSM_SCOPE,
    cluster_axis,
    is_cluster_function,
    thread_tag,
)

#: Scope of the stand-in through which peers' slabs are addressed until loops are vectorised.
PEERS_SCOPE = "shared.dsm"
#: Elements between the slabs of two ranks in a stand-in: larger than any slab, a power of two, so
#: that rank and offset are told apart again after flattening and vectorising.
RANK_STRIDE = 1 << 22
PEERS_SUFFIX = "_peers"
#: Function attribute that tells the later passes that this one ran.
LOWERED = "crossfuse.lowered"


def was_lowered(func: Any) -> bool:
    """Whether `lower_cluster` rewrote a function."""
    return func.attrs is not None and LOWERED in func.attrs


def lower_cluster() -> Any:
    """Pass: cluster-bound loops become CTAs, `shared.dsm` buffers slabs of shared memory.

    Runs on opaque blocks, right after TVM has compacted buffers. For each kernel: ring orders are
    rotated, cluster barriers placed, the rank dimension dropped for the CTA's own slab, and the
    launch grid scaled so that ``blockIdx`` counts CTAs::

        for c in parallel(4):  P[c, e] = ...        (crossfuse.cluster_axis = "x")

        for blockIdx.x in 8 * 4, clusterCtaIdx.x in 4:
            P[e] = ...                              # slab of CTA blockIdx.x % 4
            cluster_barrier()

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; functions without our marks pass through untouched.
    """

    def transform(func: Any) -> Any:
        if not is_cluster_function(func):
            return func
        return ir.with_body(func, _lower_root(func.body)).with_attr(LOWERED, True)

    return prim_func_pass("LowerCluster", transform)


def _lower_root(realize: Any) -> Any:
    """Lower each kernel below the root block."""
    root = realize.block
    slabs = [each for each in root.alloc_buffers if each.scope() == DSM_SCOPE]
    if slabs or not isinstance(root.body, ir.SeqStmt):
        body = _lower_kernel(_enclose(root.body, root.alloc_buffers) if slabs else root.body)
        allocated = [] if slabs else root.alloc_buffers
    else:
        body = ir.SeqStmt([_lower_kernel(each) for each in root.body.seq])
        allocated = root.alloc_buffers
    block = ir.block_like(root, body=body, alloc_buffers=allocated)
    return ir.SBlockRealize(realize.iter_values, realize.predicate, block)


def _enclose(body: Any, allocated: Any) -> Any:
    """A block of its own for buffers that would otherwise stand outside the launch."""
    block = ir.SBlock([], [], [], "", body, None, allocated, [], {})
    return ir.SBlockRealize([], ir.tirx.IntImm("bool", 1), block)


def _lower_kernel(body: Any) -> Any:
    kernel = read_kernel(body)
    if not kernel.cluster:
        return body
    kernel = read_kernel(rotate_rings(body))
    verify_kernel(kernel)
    plan = plan_barriers(kernel)
    return _Lowering(kernel, plan).run()


class _Lowering:
    """Rewrites one kernel. Everything it decides by is in the facts and the plan."""

    def __init__(self, kernel: ClusterKernel, plan: BarrierPlan) -> None:
        self.kernel = kernel
        self.plan = plan
        self.loops: list[Any] = []
        self.block_index = {
            axis: ir.Var(f"blockIdx_{axis}", "int32") for axis in AXES if axis in kernel.cluster
        }
        self.own = {buffer: _own_slab(buffer) for buffer in kernel.buffers}
        self.peers = {buffer: _stand_in(buffer) for buffer in kernel.buffers}

    def run(self) -> Any:
        body = ir.mutate(
            self.kernel.body,
            (ir.For, self._loop),
            (ir.TensorLoad, self._load),
            (ir.BufferStore, self._store),
            (ir.SBlock, self._block),
        )
        return self._launch(body)

    def coordinate(self, axis: str) -> Any:
        """Coordinate of the CTA in its cluster."""
        return ir.tirx.floormod(self.block_index[axis], self.kernel.cluster[axis])

    def _loop(self, loop: Any, mutator: Any) -> Any:
        self.loops.append(loop)
        body = mutator.mutate(loop.body)
        self.loops.pop()
        axis, tag = cluster_axis(loop), thread_tag(loop)
        if axis is not None:
            lowered = _replace(body, loop.loop_var, self.coordinate(axis))
        elif tag.startswith("blockIdx.") and tag[-1] in self.kernel.cluster:
            index = ir.tirx.floordiv(self.block_index[tag[-1]], self.kernel.cluster[tag[-1]])
            lowered = _replace(body, loop.loop_var, index)
        else:
            notes = {k: v for k, v in loop.annotations.items() if k != CLUSTER_AXIS}
            lowered = ir.for_like(loop, body, annotations=notes)
        parts = [lowered]
        if loop.loop_var in self.plan.before:
            parts.insert(0, cluster_barrier())
        if loop.loop_var in self.plan.after:
            parts.append(cluster_barrier())
        return parts[0] if len(parts) == 1 else ir.SeqStmt(parts)

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source not in self.own:
            return mutator.default_mutate(load)
        buffer, indices = self._locate(load.source, load.indices, mutator)
        return ir.tirx.BufferLoad(buffer, indices)

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer not in self.own:
            return mutator.default_mutate(store)
        value = mutator.mutate(store.value)
        buffer, indices = self._locate(store.buffer, store.indices, mutator)
        return ir.BufferStore(buffer, value, indices)

    def _locate(self, buffer: Any, indices: Any, mutator: Any) -> tuple[Any, list[Any]]:
        """The CTA's own slab without the rank, or the stand-in with the linear rank."""
        axis = self.kernel.buffers[buffer]
        moved = [mutator.mutate(index) for index in indices]
        loop = next(each for each in self.loops if cluster_axis(each) == axis)
        if is_own(indices[0], loop, self.loops):
            return self.own[buffer], moved[1:]
        offset = _row_major(moved[1:], buffer.ty.shape[1:])
        return self.peers[buffer], [self._linear_rank(axis, moved[0]), offset]

    def _linear_rank(self, axis: str, rank: Any) -> Any:
        """Rank in the cluster of the CTA at `rank` along `axis` and at our place on the others."""
        linear: Any = None
        for name in reversed(AXES):
            if name not in self.kernel.cluster:
                continue
            coordinate = rank if name == axis else self.coordinate(name)
            extent = self.kernel.cluster[name]
            linear = coordinate if linear is None else linear * extent + coordinate
        return linear

    def _block(self, block: Any, mutator: Any) -> Any:
        block = mutator.default_mutate(block)
        allocated: list[Any] = []
        for buffer in block.alloc_buffers:
            if buffer in self.own:
                allocated += [self.own[buffer], self.peers[buffer]]
            else:
                allocated.append(buffer)
        # Regions name the buffers that are gone; nothing reads them any more.
        return ir.block_like(block, alloc_buffers=allocated, reads=[], writes=[])

    def _launch(self, body: Any) -> Any:
        """Wrap the kernel in its grid: blockIdx counts CTAs, clusterCtaIdx says how they group."""
        for axis, extent in self.kernel.cluster.items():
            ctas = extent * self.kernel.grid.get(axis, 1)
            body = _thread_loop(f"blockIdx.{axis}", self.block_index[axis], ctas, body)
        for axis, extent in self.kernel.cluster.items():
            tag = f"clusterCtaIdx.{axis}"
            body = _thread_loop(tag, ir.Var(tag.replace(".", "_"), "int32"), extent, body)
        return body


def _own_slab(buffer: Any) -> Any:
    shape = list(buffer.ty.shape)[1:] or [1]
    return ir.tirx.decl_buffer(
        shape, buffer.ty.dtype, buffer.name, scope="shared.dyn", data_alignment=16
    )


def _stand_in(buffer: Any) -> Any:
    shape = [buffer.ty.shape[0], RANK_STRIDE]
    name = f"{buffer.name}{PEERS_SUFFIX}"
    return ir.tirx.decl_buffer(shape, buffer.ty.dtype, name, scope=PEERS_SCOPE)


def _row_major(indices: list[Any], shape: Any) -> Any:
    offset: Any = ir.tirx.IntImm("int32", 0)
    for index, extent in zip(indices, shape, strict=True):
        offset = offset * extent + index
    return offset


def _replace(body: Any, variable: Any, value: Any) -> Any:
    return ir.substitute(body, lambda var: value if var.same_as(variable) else var)


def _thread_loop(tag: str, variable: Any, extent: int, body: Any) -> Any:
    zero, count = ir.tirx.IntImm("int32", 0), ir.tirx.IntImm("int32", extent)
    thread = ir.IterVar(None, ir.Var("", "int32"), ir.IterVar.ThreadIndex, tag)
    return ir.For(variable, zero, count, ir.ForKind.THREAD_BINDING, body, thread, {})
