"""The pass that turns cluster-bound loops and DSM buffers into CTAs, slabs and barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.barrier_plan import BarrierPlan, plan_barriers
from crossfuse.lower.kernel import (
    ClusterKernel,
    Part,
    enclosed,
    is_own,
    parts_of,
    read_kernel,
    root_of,
)
from crossfuse.lower.refusal import Rule
from crossfuse.lower.slabs import Slabs, cluster_barrier, push_of
from crossfuse.lower.tree import Access, accesses, analyzer, coordinate_loop
from crossfuse.lower.verify.stores import check_distinct_stores
from crossfuse.lower.verify.structure import check_limits
from crossfuse.markers import (
    AXES,
    CLUSTER_AXIS,
    DSM_SCOPE,
    DSM_SHUFFLE,
    LOWERED,
    RESIDENT_CTAS,
    cluster_axis,
    is_cluster_function,
    thread_tag,
)

_refused = Rule("dsm_shuffle")


@dataclass(frozen=True, eq=False)
class PrivateRank:
    """A buffer in registers of one CTA, in place of one with a dimension of ranks."""

    buffer: Any
    #: The dimension of the original buffer that was the rank.
    dimension: int

    def without(self, indices: Any, mutator: Any) -> list[Any]:
        """Indices in the new buffer."""
        kept = [mutator.mutate(each) for i, each in enumerate(indices) if i != self.dimension]
        return kept or [ir.tirx.IntImm("int32", 0)]

    @property
    def region(self) -> Any:
        """The whole new buffer."""
        whole = ir.tvm.ir.Range.from_min_extent
        return ir.tirx.BufferRegion(self.buffer, [whole(0, each) for each in self.buffer.ty.shape])


def private_ranks(kernel: ClusterKernel) -> dict[Any, PrivateRank]:
    """Buffers in registers of which each CTA touches the elements of its own rank alone.

    With the dimension of ranks a CTA would hold registers for all ranks, indexed by a variable,
    which nvcc cannot keep in registers. Buffers of `kernel` are compacted.
    """
    uses: dict[Any, list[Access]] = {}
    for access in kernel.uses:
        if str(access.buffer.scope()) == "local":
            uses.setdefault(access.buffer, []).append(access)
    found: dict[Any, PrivateRank] = {}
    for buffer, mine in uses.items():
        for dimension in range(len(buffer.ty.shape)):
            if all(_is_rank(kernel, each, dimension) for each in mine):
                found[buffer] = PrivateRank(_without(buffer, dimension), dimension)
                break
    return found


def _is_rank(kernel: ClusterKernel, access: Access, dimension: int) -> bool:
    """Whether an index is the CTA's rank on an axis as long as the dimension."""
    if access.indices is None:
        return False
    extent = ir.constant(access.buffer.ty.shape[dimension])
    for axis, size in kernel.cluster.items():
        loop = access.cluster_loop(axis) if size == extent != 1 else None
        if loop is not None and is_own(access.indices[dimension], loop, access.loops):
            return True
    return False


def _without(buffer: Any, dimension: int) -> Any:
    shape = [each for i, each in enumerate(buffer.ty.shape) if i != dimension]
    return ir.tirx.decl_buffer(
        shape or [1],
        buffer.ty.dtype,
        str(buffer.name),
        scope="local",
        data_alignment=int(buffer.data_alignment),
        layout=None,
    )


#: TVM's name of the second number of ``__launch_bounds__``.
_LEAST_CTAS = "tirx.launch_bounds_min_blocks_per_sm"
#: Attribute that holds the extent of a cluster axis around a kernel until threads are lowered.
CLUSTER_EXTENT = "crossfuse.cluster_extent"


def cluster_extent(axis: str, extent: int, body: Any) -> Any:
    """Statement: `body` is a kernel whose clusters have `extent` CTAs along `axis`."""
    tag = f"clusterCtaIdx.{axis}"
    variable = ir.Var(tag.replace(".", "_"), "int32")
    index = ir.IterVar(None, variable, ir.IterVar.ThreadIndex, tag)
    return ir.AttrStmt(index, CLUSTER_EXTENT, ir.tirx.IntImm("int32", extent), body)


def bound_registers() -> Any:
    """Pass: tell nvcc how many CTAs of a kernel an SM should hold, if `RESIDENT_CTAS` says so."""

    def transform(func: Any) -> Any:
        if func.attrs is None or RESIDENT_CTAS not in func.attrs:
            return func
        count = ir.tirx.IntImm("int32", int(func.attrs[RESIDENT_CTAS]))

        def bound(node: Any, mutator: Any) -> Any:
            if str(node.attr_key) != "thread_extent":
                return mutator.default_mutate(node)
            # Within the outermost extent, where the kernel begins.
            body = ir.AttrStmt(node.node, _LEAST_CTAS, count, node.body)
            return ir.AttrStmt(node.node, node.attr_key, node.value, body)

        return ir.with_body(func, ir.mutate(func.body, (ir.AttrStmt, bound)))

    return ir.prim_func_pass("BoundRegisters", transform)


def launch_clusters() -> Any:
    """Pass: extents of cluster axes become extents of TVM's own cluster tag.

    It runs after the passes that look at threads: those for reductions over threads and for
    synchronisation know CTAs and threads only, and fail on an extent of another scope.
    """

    def launch(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if str(node.attr_key) != CLUSTER_EXTENT:
            return node
        return ir.AttrStmt(node.node, "thread_extent", node.value, node.body)

    def transform(func: Any) -> Any:
        return ir.with_body(func, ir.mutate(func.body, (ir.AttrStmt, launch)))

    return ir.prim_func_pass("LaunchClusters", transform)


def lower_cluster() -> Any:
    """Pass: cluster-bound loops become CTAs, `shared.dsm` buffers slabs of shared memory.

    Runs on opaque blocks, right after TVM has compacted buffers. For each kernel: ring orders are
    rotated, cluster barriers placed, the rank dimension dropped for the CTA's own slab, and the
    launch grid scaled so that ``blockIdx`` counts CTAs::

        for c in parallel(4):  P[c, e] = ...        (crossfuse.cluster_axis = "x")

        for blockIdx.x in 8 * 4:                    # crossfuse.cluster_extent = 4
            P[e] = ...                              # slab of CTA blockIdx.x % 4
            cluster_barrier()

    Registers of each CTA lose the rank too. Where nothing else needs a barrier, CTAs push words to
    each other and count the bytes that arrive: see `crossfuse.lower.slabs`. Functions without our
    marks pass through untouched.
    """

    def transform(func: Any) -> Any:
        if not is_cluster_function(func):
            return func
        slabs = Slabs(func)
        return ir.with_body(func, _lower_root(root_of(func), slabs)).with_attr(LOWERED, True)

    return ir.prim_func_pass("LowerCluster", transform)


def _lower_root(realize: Any, slabs: Slabs) -> Any:
    """Lower each kernel below the root block."""
    root = realize.block
    held: list[Any] = []
    bodies: list[Any] = []
    for part in parts_of(root):
        lowered = _lower_part(part, slabs)
        bodies += list(part.statements) if lowered is None else [lowered]
        held += [] if lowered is None else part.buffers
    kept = [each for each in root.alloc_buffers if not any(each.same_as(b) for b in held)]
    body = bodies[0] if len(bodies) == 1 else ir.SeqStmt(bodies)
    block = ir.block_like(root, body=body, alloc_buffers=kept)
    return ir.SBlockRealize(realize.iter_values, realize.predicate, block)


def _lower_part(part: Part, slabs: Slabs) -> Any:
    """The lowered statement of a cluster kernel; None for a kernel without clusters."""
    kernel = read_kernel(part.body)
    if not kernel.cluster:
        return None
    # Buffers of the root block would otherwise stand outside the launch.
    body = enclosed(part.body, part.buffers) if part.buffers else part.body
    kernel = read_kernel(rotate_rings(body))
    check_limits(kernel)
    check_distinct_stores(kernel)
    plan = plan_barriers(kernel)
    return _Lowering(kernel, plan, slabs).run()


class _Lowering:
    """Rewrites one kernel; every decision was made in the facts and the plan."""

    def __init__(self, kernel: ClusterKernel, plan: BarrierPlan, slabs: Slabs) -> None:
        self.kernel = kernel
        self.plan = plan
        self.slabs = slabs
        self.push = push_of(kernel, plan)
        self.private = private_ranks(kernel)
        for buffer in self.push.buffers if self.push is not None else ():
            slabs.push(buffer)
        self.loops: list[Any] = []
        self.block_index = {
            axis: ir.Var(f"blockIdx_{axis}", "int32") for axis in AXES if axis in kernel.cluster
        }

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
            place = self.coordinate(axis).astype(str(loop.loop_var.ty))
            lowered = ir.substitute(body, {loop.loop_var: place})
        elif tag.startswith("blockIdx.") and tag[-1] in self.kernel.cluster:
            index = ir.tirx.floordiv(self.block_index[tag[-1]], self.kernel.cluster[tag[-1]])
            lowered = ir.substitute(body, {loop.loop_var: index.astype(str(loop.loop_var.ty))})
        else:
            notes = {k: v for k, v in loop.annotations.items() if k != CLUSTER_AXIS}
            bounds = {"min": mutator.mutate(loop.min), "extent": mutator.mutate(loop.extent)}
            lowered = ir.for_like(loop, body, annotations=notes, **bounds)
        parts = [lowered]
        if loop.loop_var in self.plan.before:
            parts.insert(0, self._meet(loop.loop_var))
        if loop.loop_var in self.plan.after:
            parts.append(cluster_barrier())
        return parts[0] if len(parts) == 1 else ir.SeqStmt(parts)

    def _meet(self, variable: Any) -> Any:
        """Statement before a nest that depends on peers."""
        if self.push is None:
            return cluster_barrier()
        return self.push.begin() if variable.same_as(self.push.sending) else self.push.end()

    def _load(self, load: Any, mutator: Any) -> Any:
        if load.source in self.private:
            private = self.private[load.source]
            return ir.tirx.BufferLoad(private.buffer, private.without(load.indices, mutator))
        if load.source not in self.kernel.buffers:
            return mutator.default_mutate(load)
        buffer, indices = self._locate(load.source, load.indices, mutator)
        return ir.tirx.BufferLoad(buffer, indices)

    def _store(self, store: Any, mutator: Any) -> Any:
        if store.buffer in self.private:
            private = self.private[store.buffer]
            value = mutator.mutate(store.value)
            return ir.BufferStore(private.buffer, value, private.without(store.indices, mutator))
        if store.buffer not in self.kernel.buffers:
            return mutator.default_mutate(store)
        value = mutator.mutate(store.value)
        buffer, indices = self._locate(store.buffer, store.indices, mutator)
        return ir.BufferStore(buffer, value, indices)

    def _locate(self, buffer: Any, indices: Any, mutator: Any) -> tuple[Any, list[Any]]:
        """The CTA's own slab without the rank, or the stand-in with the linear rank.

        Words that peers push are read through the stand-in too.
        """
        axis = self.kernel.buffers[buffer]
        rank, *place = [mutator.mutate(index) for index in indices]
        loop = coordinate_loop(tuple(self.loops), f"cluster.{axis}")
        pushed = self.push is not None and buffer in self.push.buffers
        if not pushed and is_own(indices[0], loop, tuple(self.loops)):
            return self.slabs.own_element(buffer, place)
        return self.slabs.peer_element(buffer, self._linear_rank(axis, rank), place)

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
        mine = self.kernel.buffers
        reads, writes = (
            [new for region in regions for new in self._regions(region)]
            for regions in (block.reads, block.writes)
        )
        block = mutator.default_mutate(ir.block_like(block, reads=reads, writes=writes))
        allocated: list[Any] = []
        for buffer in block.alloc_buffers:
            if buffer in self.private:
                allocated.append(self.private[buffer].buffer)
            else:
                allocated += self.slabs.images(buffer) if buffer in mine else [buffer]
        return ir.block_like(block, alloc_buffers=allocated)

    def _regions(self, region: Any) -> list[Any]:
        if region.source in self.private:
            return [self.private[region.source].region]
        return self.slabs.regions(region) if region.source in self.kernel.buffers else [region]

    def _launch(self, body: Any) -> Any:
        """Wrap the kernel in its grid: blockIdx counts CTAs, an attribute says how they group."""
        if self.push is not None:
            body = enclosed(ir.SeqStmt([self.push.open(), body]), (self.push.barrier,))
        sizes = [(axis, self.kernel.cluster[axis]) for axis in self.block_index]
        for axis, extent in sizes:
            ctas = extent * self.kernel.grid.get(axis, 1)
            body = _thread_loop(f"blockIdx.{axis}", self.block_index[axis], ctas, body)
        for axis, extent in sizes:
            body = cluster_extent(axis, extent, body)
        return body


def _thread_loop(tag: str, variable: Any, extent: int, body: Any) -> Any:
    zero, count = ir.tirx.IntImm("int32", 0), ir.tirx.IntImm("int32", extent)
    thread = ir.IterVar(None, ir.Var("", "int32"), ir.IterVar.ThreadIndex, tag)
    return ir.For(variable, zero, count, ir.ForKind.THREAD_BINDING, body, thread, {})


# Ring order: each CTA starts at its own slice, so that a step reads every slab once.

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
        raise _refused(
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
            raise _refused(
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
            raise _refused(
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
