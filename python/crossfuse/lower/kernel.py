"""Facts about the cluster kernels of a function, read off its opaque-block form.

The passes of this folder run after TVM has compacted buffers: block iteration variables are gone,
every index is an expression of loop variables, and a `shared.dsm` buffer has shape
(CTAs, tile...) exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, RefusedError, refuse
from crossfuse.schedule.markers import AXES, DSM_SCOPE, NAIVE_TAGS, cluster_axis, thread_tag


@dataclass(frozen=True)
class Access:
    """One load or store of a `shared.dsm` buffer, with the loops around it.

    Attributes
    ----------
    buffer, indices : Any
        What is accessed; ``indices[0]`` is the rank.
    write : bool
        Store or load.
    loops : tuple
        Enclosing loops, outermost first.
    text : str
        The statement, for messages.
    """

    buffer: Any
    indices: tuple[Any, ...]
    write: bool
    loops: tuple[Any, ...]
    text: str

    def cluster_loop(self, axis: str) -> Any:
        """The enclosing loop bound to a cluster axis, or None."""
        return next((loop for loop in self.loops if cluster_axis(loop) == axis), None)


@dataclass(frozen=True)
class ClusterKernel:
    """One kernel of a function.

    Attributes
    ----------
    body : Any
        Its statement.
    cluster, grid : dict[str, int]
        Extents by axis: CTAs in the cluster, and iterations of the ``blockIdx`` loops (clusters
        along the axis where the axis has a cluster extent).
    buffers : dict
        Cluster axis of each `shared.dsm` buffer.
    accesses : tuple[Access, ...]
        Every access to such a buffer, in program order.
    """

    body: Any
    cluster: dict[str, int] = field(default_factory=dict)
    grid: dict[str, int] = field(default_factory=dict)
    buffers: dict[Any, str] = field(default_factory=dict)
    accesses: tuple[Access, ...] = ()

    @property
    def size(self) -> int:
        """CTAs in one cluster."""
        size = 1
        for extent in self.cluster.values():
            size *= extent
        return size


def read_kernel(body: Any) -> ClusterKernel:
    """Collect the facts of one kernel.

    Raises
    ------
    LoweringRefused
        If the function uses TVM's own cluster tag, extents disagree, or a `shared.dsm` buffer is
        not used as one slab a CTA.
    """
    cluster: dict[str, int] = {}
    grid: dict[str, int] = {}

    def visit(loop: Any) -> None:
        tag = thread_tag(loop)
        if tag in NAIVE_TAGS:
            raise _naive(loop, tag)
        axis = cluster_axis(loop)
        if axis is not None:
            _agree(cluster, axis, loop, f"cluster axis {axis}")
        elif tag.startswith("blockIdx."):
            _agree(grid, tag[-1], loop, tag)

    ir.walk(body, (ir.For, visit))
    accesses = tuple(dsm_accesses(body))
    buffers: dict[Any, str] = {}
    for access in accesses:
        if access.buffer not in buffers:
            buffers[access.buffer] = _axis(access.buffer, accesses, cluster)
    return ClusterKernel(body, cluster, grid, buffers, accesses)


def dsm_accesses(body: Any) -> list[Access]:
    """Accesses to `shared.dsm` buffers below `body`, in program order."""
    found: list[Access] = []
    for store_or_expression, loops in statements(body):
        text = str(store_or_expression.script()).strip().splitlines()[-1].strip()

        def add(node: Any, indices: Any, write: bool, loops: Any = loops, text: str = text) -> None:
            if node.scope() == DSM_SCOPE:
                found.append(Access(node, tuple(indices), write, loops, text))

        loads: list[Any] = []
        ir.walk(store_or_expression, (ir.TensorLoad, loads.append))
        for load in loads:
            add(load.source, load.indices, False)
        if isinstance(store_or_expression, ir.BufferStore):
            add(store_or_expression.buffer, store_or_expression.indices, True)
    return found


def statements(body: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Leaf statements (stores, evaluated calls) with the loops around them, in program order."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    def visit(node: Any, loops: tuple[Any, ...]) -> None:
        for child, around in children(node):
            visit(child, loops + around)
        if isinstance(node, (ir.BufferStore, ir.Evaluate)):
            found.append((node, loops))

    visit(body, ())
    return found


def children(node: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Statements directly inside a statement, each with the loop that encloses it, if any."""
    if isinstance(node, ir.SeqStmt):
        return [(each, ()) for each in node.seq]
    if isinstance(node, ir.For):
        return [(node.body, (node,))]
    if isinstance(node, ir.SBlockRealize):
        return [(node.block, ())]
    if isinstance(node, ir.SBlock):
        init = [] if node.init is None else [(node.init, ())]
        return [*init, (node.body, ())]
    if isinstance(node, ir.IfThenElse):
        other = [] if node.else_case is None else [(node.else_case, ())]
        return [(node.then_case, ()), *other]
    if hasattr(node, "body"):
        return [(node.body, ())]
    return []


def own_rank(access: Access, axis: str) -> bool:
    """Whether the accessed rank is provably that of the executing CTA on `axis`."""
    loop = access.cluster_loop(axis)
    return loop is not None and is_own(access.indices[0], loop, access.loops)


def is_own(rank: Any, cluster_loop: Any, loops: Any) -> bool:
    """Whether `rank` provably equals the variable of `cluster_loop`."""
    analyzer = ir.sym.Analyzer()
    for loop in loops:
        analyzer.bind(loop.loop_var, ir.tvm.ir.Range.from_min_extent(loop.min, loop.extent))
    return bool(analyzer.can_prove_equal(rank, cluster_loop.loop_var))


def _axis(buffer: Any, accesses: tuple[Access, ...], cluster: dict[str, int]) -> str:
    """The cluster axis along which a buffer's slabs lie, told by the accesses to own slabs."""
    mine = [access for access in accesses if access.buffer.same_as(buffer)]
    extent = ir.constant(buffer.ty.shape[0])
    for axis in AXES:
        if cluster.get(axis) == extent and any(own_rank(access, axis) for access in mine):
            _check_enclosed(buffer, mine, axis)
            return axis
    raise refuse(
        LoweringRefused,
        "shared.dsm",
        f"buffer '{buffer.name}'",
        found=f"a leading extent of {extent} and no access by a CTA to its own slab, in "
        + (mine[0].text if mine else "no statement"),
        limit="one slab for each CTA of a cluster axis "
        f"({', '.join(f'{a}={n}' for a, n in cluster.items()) or 'none is bound'})",
        instead="cluster_bind the loop over the leading dimension; dsm_reduce and dsm_shuffle do",
    )


def _check_enclosed(buffer: Any, accesses: list[Access], axis: str) -> None:
    for access in accesses:
        if access.cluster_loop(axis) is None:
            raise refuse(
                LoweringRefused,
                "shared.dsm",
                f"buffer '{buffer.name}'",
                found=f"an access outside every loop bound to cluster axis {axis}: {access.text}",
                limit="slabs are accessed by the CTAs that run the cluster-bound loop",
                instead="cluster_bind a loop around the statement",
            )


def _agree(extents: dict[str, int], axis: str, loop: Any, what: str) -> None:
    extent = ir.constant(loop.extent)
    if extent is None or extents.setdefault(axis, extent) != extent:
        raise refuse(
            LoweringRefused,
            what,
            f"loop '{loop.loop_var.name}'",
            found=f"extent {loop.extent}",
            limit=f"extent {extents.get(axis, 'constant')}, as another loop on it has",
            instead="split both loops by the same factor",
        )


def _naive(loop: Any, tag: str) -> RefusedError:
    return refuse(
        LoweringRefused,
        "cluster-binding",
        f"loop '{loop.loop_var.name}'",
        found=f"a plain bind to {tag}",
        limit="TVM launches too few CTAs for it and gives each the shared tiles of all",
        instead=f'call sch.cluster_bind(loop, axis="{tag[-1]}") instead of sch.bind(loop, "{tag}")',
    )
