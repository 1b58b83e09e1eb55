"""Global memory is no way between the CTAs of a kernel: each element has one writer."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, refuse
from crossfuse.lower.kernel import ClusterKernel, statements
from crossfuse.schedule.markers import cluster_axis


def check_global_memory(kernel: ClusterKernel) -> None:
    """Global stores stand under a cluster-bound loop, and are read back under the same one only.

    Raises
    ------
    LoweringRefused
        If every CTA of a cluster would execute a store, or a nest reads what another nest wrote.
    """
    writers: dict[Any, Any] = {}
    found = list(statements(kernel.body))
    for statement, loops in found:
        if not isinstance(statement, ir.BufferStore) or statement.buffer.scope() != "global":
            continue
        nest = _nest(loops)
        if nest is None and kernel.size > 1:
            raise refuse(
                LoweringRefused,
                "global-store",
                f"buffer '{statement.buffer.name}'",
                found=f"a store outside every cluster-bound loop: {_text(statement)}",
                limit="one CTA stores each element",
                instead="split one of the loops around the store by the cluster size and "
                "cluster_bind the part",
            )
        writers[statement.buffer] = nest
    for statement, loops in found:
        for load in _loads(statement):
            nest, writer = _nest(loops), writers.get(load.source)
            if writer is not None and (nest is None or not nest.loop_var.same_as(writer.loop_var)):
                raise refuse(
                    LoweringRefused,
                    "global-exchange",
                    f"buffer '{load.source.name}'",
                    found=f"a read in one cluster nest of what another wrote: {_text(statement)}",
                    limit="global memory is not ordered between the CTAs of a kernel",
                    instead="keep the intermediate in scope shared.dsm (dsm_shuffle), or make two "
                    "kernels",
                )


def _nest(loops: Any) -> Any:
    return next((loop for loop in loops if cluster_axis(loop) is not None), None)


def _loads(statement: Any) -> list[Any]:
    loads: list[Any] = []
    ir.walk(statement, (ir.TensorLoad, loads.append))
    return loads


def _text(statement: Any) -> str:
    return str(statement.script()).strip().splitlines()[-1].strip()
