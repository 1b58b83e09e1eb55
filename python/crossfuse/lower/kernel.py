"""Facts about the cluster kernels of a function, read off its opaque-block form.

The passes of this folder run after TVM has compacted buffers: block iteration variables are gone,
every index is an expression of loop variables, and a `shared.dsm` buffer has shape
(CTAs, tile...) exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import RefusedError
from crossfuse.lower.refusal import Rule, refuse
from crossfuse.lower.tree import Access, accesses, analyzer
from crossfuse.markers import AXES, DSM_SCOPE, cluster_axis, thread_tag

_refused = Rule("shared.dsm")


@dataclass(frozen=True)
class ClusterKernel:
    """What the passes need to know about one kernel."""

    body: Any
    #: CTAs in the cluster, by axis.
    cluster: dict[str, int] = field(default_factory=dict)
    #: Iterations of the ``blockIdx`` loops by axis: clusters along an axis that has a cluster
    #: extent, else CTAs.
    grid: dict[str, int] = field(default_factory=dict)
    #: Extents of the ``threadIdx`` loops, by axis.
    threads: dict[str, int] = field(default_factory=dict)
    #: Cluster axis of each `shared.dsm` buffer.
    buffers: dict[Any, str] = field(default_factory=dict)
    #: Every use of any buffer, in program order.
    uses: tuple[Access, ...] = ()

    @property
    def size(self) -> int:
        """Number of CTAs in one cluster."""
        size = 1
        for extent in self.cluster.values():
            size *= extent
        return size

    @property
    def accesses(self) -> tuple[Access, ...]:
        """Uses of `shared.dsm` buffers; ``indices[0]`` is the rank."""
        return tuple(each for each in self.uses if each.buffer in self.buffers)


@dataclass(frozen=True)
class Part:
    """Statements of the root block that make one kernel."""

    statements: tuple[Any, ...]
    #: Buffers of the root block that live in the kernel's CTAs.
    buffers: tuple[Any, ...]

    @property
    def body(self) -> Any:
        """The statements as one."""
        only, *others = self.statements
        return ir.SeqStmt(list(self.statements)) if others else only


def root_of(func: Any) -> Any:
    """The root block of a function, as a statement; made for a function that has no blocks."""
    if isinstance(func.body, ir.SBlockRealize):
        return func.body
    return enclosed(func.body, (), "root")


def enclosed(body: Any, allocated: tuple[Any, ...], name: str = "") -> Any:
    """Statement: an opaque block around `body` that allocates buffers."""
    block = ir.SBlock([], [], [], name, body, None, list(allocated), [], {})
    return ir.SBlockRealize([], ir.tirx.IntImm("bool", 1), block)


def parts_of(root: Any) -> tuple[Part, ...]:
    """Split the root block into kernels.

    Each statement of the root block is a launch of its own, unless a buffer that lives in CTAs
    connects it with others: they and all statements between them are one kernel.
    """
    body = root.body
    statements = list(body.seq) if isinstance(body, ir.SeqStmt) else [body]
    inside = [buffer for buffer in root.alloc_buffers if buffer.scope() != "global"]
    users = {
        buffer: [i for i, each in enumerate(statements) if ir.mentions(each, buffer)]
        for buffer in inside
    }
    spans = [(min(found), max(found)) for found in users.values() if found]
    parts: list[Part] = []
    first = 0
    while first < len(statements):
        last = _reach(first, spans)
        group = tuple(statements[first : last + 1])
        held = tuple(b for b in inside if any(first <= i <= last for i in users[b]))
        parts.append(Part(group, held))
        first = last + 1
    return tuple(parts)


def _reach(first: int, spans: list[tuple[int, int]]) -> int:
    """Last statement that is connected with statement `first` or one after it."""
    last = first
    while True:
        reached = max([last, *(end for start, end in spans if first <= start <= last)])
        if reached == last:
            return last
        last = reached


def read_kernel(body: Any, *, compacted: bool = True) -> ClusterKernel:
    """Collect the facts of one kernel.

    Before buffers are `compacted` to their final shapes, a rank is one modulo the cluster size, and
    a buffer that is no slab of any axis is accepted. Refused if extents disagree, or a `shared.dsm`
    buffer is not used as one slab per CTA.
    """
    cluster: dict[str, int] = {}
    grid: dict[str, int] = {}
    threads: dict[str, int] = {}
    for loop in ir.nodes(body, ir.For):
        tag = thread_tag(loop)
        axis = cluster_axis(loop)
        if axis is not None:
            _agree(cluster, axis, loop, f"cluster axis {axis}")
        elif tag.startswith("blockIdx."):
            _agree(grid, tag[-1], loop, tag)
        elif tag.startswith("threadIdx."):
            _agree(threads, tag[-1], loop, tag)
    uses = tuple(accesses(body))
    slabs: dict[Any, list[Access]] = {}
    for access in uses:
        if access.buffer.scope() == DSM_SCOPE:
            slabs.setdefault(access.buffer, []).append(access)
    buffers: dict[Any, str] = {}
    for buffer, mine in slabs.items():
        _check_indexed(mine)
        axis = _slab_axis(buffer, mine, cluster, compacted)
        if axis is not None:
            buffers[buffer] = axis
        elif compacted:
            raise _no_axis(buffer, mine, cluster)
    return ClusterKernel(body, cluster, grid, threads, buffers, uses)


def own_rank(access: Access, axis: str, *, modulo: int | None = None) -> bool:
    """Whether the accessed rank is provably that of the executing CTA on `axis`."""
    loop = access.cluster_loop(axis)
    if loop is None or access.indices is None:
        return False
    rank = access.indices[0]
    return is_own(ir.tirx.floormod(rank, modulo) if modulo else rank, loop, access.loops)


def is_own(rank: Any, cluster_loop: Any, loops: tuple[Any, ...]) -> bool:
    """Whether `rank` provably equals the variable of `cluster_loop`."""
    return bool(analyzer(loops).can_prove_equal(rank, cluster_loop.loop_var))


def _check_indexed(mine: list[Access]) -> None:
    for access in mine:
        if access.indices is None:
            raise _refused(
                f"buffer '{access.buffer.name}'",
                found=f"a pointer to a slab or a view of it: {access.site.text}",
                limit="loads and stores of elements: a pointer does not say which CTA it means",
                instead="copy between the slab and a shared or local buffer by a block of loops, "
                "and use the pointer or the tensor intrinsic on that buffer",
            )


def _slab_axis(
    buffer: Any, mine: list[Access], cluster: dict[str, int], compacted: bool
) -> str | None:
    """The cluster axis along which a buffer's slabs lie, inferred from accesses to own slabs."""
    extent = ir.constant(buffer.ty.shape[0])
    for axis in AXES:
        size = cluster.get(axis)
        if size is None or (compacted and size != extent):
            continue
        if any(own_rank(access, axis, modulo=None if compacted else size) for access in mine):
            _check_enclosed(buffer, mine, axis)
            return axis
    return None


def _no_axis(buffer: Any, mine: list[Access], cluster: dict[str, int]) -> RefusedError:
    return _refused(
        f"buffer '{buffer.name}'",
        found=f"a leading extent of {buffer.ty.shape[0]} and no access by a CTA to its own slab, "
        f"in {mine[0].site.text}",
        limit="one slab for each CTA of a cluster axis "
        f"({', '.join(f'{a}={n}' for a, n in cluster.items()) or 'none is bound'})",
        instead="cluster_bind the loop over the leading dimension, as dsm_reduce and dsm_shuffle "
        "do, or give a buffer that stays within a CTA the scope shared.dyn",
    )


def _check_enclosed(buffer: Any, mine: list[Access], axis: str) -> None:
    for access in mine:
        if access.cluster_loop(axis) is None:
            raise _refused(
                f"buffer '{buffer.name}'",
                found=f"an access outside every loop bound to cluster axis {axis}: "
                + access.site.text,
                limit="slabs are accessed by the CTAs that run the cluster-bound loop",
                instead="cluster_bind a loop around the statement",
            )


def _agree(extents: dict[str, int], axis: str, loop: Any, what: str) -> None:
    extent = ir.constant(loop.extent)
    if extent is None or extents.setdefault(axis, extent) != extent:
        raise refuse(
            what,
            f"loop '{loop.loop_var.name}'",
            found=f"extent {loop.extent}",
            limit=f"extent {extents.get(axis, 'constant')}, as another loop on it has",
            instead="split both loops by the same factor",
        )
