"""The pass that tells the launch how CTAs group into clusters."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.passes import prim_func_pass
from crossfuse.markers import RESIDENT_CTAS

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
    """Pass: kernels tell the compiler how many CTAs of theirs a multiprocessor shall hold.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; functions without `RESIDENT_CTAS` pass through untouched.
    """

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

    return prim_func_pass("BoundRegisters", transform)


def launch_clusters() -> Any:
    """Pass: extents of cluster axes become extents of TVM's own cluster tag.

    It runs after the passes that look at threads: those for reductions over threads and for
    synchronisation know CTAs and threads only, and fail on an extent of another scope.

    Returns
    -------
    tvm.ir.transform.Pass
        A PrimFunc pass; a no-op without cluster kernels.
    """

    def launch(node: Any, mutator: Any) -> Any:
        node = mutator.default_mutate(node)
        if str(node.attr_key) != CLUSTER_EXTENT:
            return node
        return ir.AttrStmt(node.node, "thread_extent", node.value, node.body)

    def transform(func: Any) -> Any:
        return ir.with_body(func, ir.mutate(func.body, (ir.AttrStmt, launch)))

    return prim_func_pass("LaunchClusters", transform)
