"""Checks before a kernel is lowered: schedules that would become wrong kernels are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossfuse.lower.kernel import ClusterKernel, parts_of, read_kernel, root_of
from crossfuse.lower.passes import prim_func_pass, was_lowered
from crossfuse.lower.verify.stores import (
    check_distinct_stores,
    check_global_memory,
    check_private_buffers,
)
from crossfuse.lower.verify.structure import (
    check_limits,
    check_structure,
    check_vectors,
    check_virtual_threads,
)
from crossfuse.markers import is_cluster_function


def _checking(name: str, applies: Callable[[Any], bool], check: Callable[[Any], None]) -> Any:
    """Pass: check functions to which that applies, and leave them as they are."""

    def transform(func: Any) -> Any:
        if applies(func):
            check(func)
        return func

    return prim_func_pass(name, transform)


def verify_structure() -> Any:
    """Pass: check a scheduled function before TVM renames and moves its loops."""
    return _checking("VerifyStructure", is_cluster_function, check_structure)


def verify_ownership() -> Any:
    """Pass: check who touches what, after allocations are placed and before loops are merged."""
    return _checking("VerifyOwnership", is_cluster_function, _check_ownership)


def _check_ownership(func: Any) -> None:
    for part in parts_of(root_of(func).block):
        kernel = read_kernel(part.body, compacted=False)
        if kernel.cluster:
            check_virtual_threads(kernel)
            check_private_buffers(kernel, part)
            check_global_memory(kernel)


def verify_vectors() -> Any:
    """Pass: check that every vector has a CUDA type, after the last rewrite."""
    return _checking("VerifyVectors", was_lowered, check_vectors)


def verify_kernel(kernel: ClusterKernel) -> None:
    """Check a kernel whose loops are merged, buffers compacted and ring orders rotated."""
    check_limits(kernel)
    check_distinct_stores(kernel)
