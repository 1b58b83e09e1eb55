"""Global memory is no way between the CTAs of a kernel: one thread touches each element."""

from __future__ import annotations

from typing import Any

from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.refusal import refuse
from crossfuse.lower.tree import Access
from crossfuse.lower.verify.ownership import extents, stray_access


def check_global_memory(kernel: ClusterKernel) -> None:
    """Global stores stand under loops over all CTAs of a cluster; what is stored stays private.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel, its loops as they were scheduled.

    Raises
    ------
    LoweringRefused
        If several CTAs of a cluster would execute a store, or a thread may touch an element that
        another one writes.
    """
    written = {
        each.buffer: None for each in kernel.uses if each.write and each.buffer.scope() == "global"
    }
    for buffer in written:
        mine = [each for each in kernel.uses if each.buffer.same_as(buffer)]
        _check_cluster(kernel, mine)
        # One store alone is the business of check_distinct_stores.
        if len(mine) > 1:
            _check_owner(buffer, mine)


def _check_cluster(kernel: ClusterKernel, mine: list[Access]) -> None:
    for access in mine:
        missing = [
            axis
            for axis, extent in kernel.cluster.items()
            if extent > 1 and access.write and access.cluster_loop(axis) is None
        ]
        if missing:
            raise refuse(
                "global-store",
                f"buffer '{access.buffer.name}'",
                found=f"a store outside every loop of cluster axis {missing[0]}: "
                f"{access.site.text}",
                limit="one CTA stores each element",
                instead="split one of the loops around the store by the cluster size and "
                "cluster_bind the part",
            )


def _check_owner(buffer: Any, mine: list[Access]) -> None:
    tags: dict[str, int | None] = {}
    for access in mine:
        if access.write:
            tags |= extents(access.loops)
    for tag in sorted(tags):
        if tag.startswith("vthread"):
            continue
        stray = stray_access(mine, tag)
        if stray is not None:
            store = next(each for each in mine if each.write)
            raise refuse(
                "global-exchange",
                f"buffer '{buffer.name}'",
                found=f"an element that places along {tag} may share: {stray.site.text}, with "
                f"{store.site.text}",
                limit="global memory is not ordered between the threads of a kernel",
                instead="keep the intermediate in scope shared.dsm (dsm_shuffle), give all "
                "statements on the buffer the same bindings, or make two kernels",
            )
