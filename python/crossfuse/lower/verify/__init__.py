"""Checks on a kernel before it is lowered: what would be a wrong kernel is refused here."""

from __future__ import annotations

from crossfuse.lower.kernel import ClusterKernel
from crossfuse.lower.verify.distinct_stores import check_distinct_stores
from crossfuse.lower.verify.global_memory import check_global_memory
from crossfuse.lower.verify.limits import check_limits
from crossfuse.lower.verify.private_buffers import check_private_buffers


def verify_kernel(kernel: ClusterKernel) -> None:
    """Run every check on a kernel.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel, ring orders rotated.

    Raises
    ------
    LoweringRefused
        By the first check that fails.
    """
    check_limits(kernel)
    check_private_buffers(kernel)
    check_global_memory(kernel)
    check_distinct_stores(kernel)
