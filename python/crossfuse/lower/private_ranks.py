"""Registers of CTAs, which have a place for each rank until every CTA has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.kernel import ClusterKernel, is_own
from crossfuse.lower.tree import Access


@dataclass(frozen=True, eq=False)
class PrivateRank:
    """A buffer in registers whose dimension of ranks is dropped.

    Attributes
    ----------
    buffer : tvm.tirx.Buffer
        The buffer of one CTA.
    dimension : int
        Which dimension of the old one told the rank.
    """

    buffer: Any
    dimension: int

    def without(self, indices: Any, mutator: Any) -> list[Any]:
        """Indices in the new buffer."""
        kept = [mutator.mutate(each) for i, each in enumerate(indices) if i != self.dimension]
        return kept or [ir.tirx.IntImm("int32", 0)]

    @property
    def region(self) -> Any:
        """All of the new buffer."""
        whole = ir.tvm.ir.Range.from_min_extent
        return ir.tirx.BufferRegion(self.buffer, [whole(0, each) for each in self.buffer.ty.shape])


def private_ranks(kernel: ClusterKernel) -> dict[Any, PrivateRank]:
    """Find buffers in registers of which each CTA touches the elements of its own rank alone.

    With that dimension a CTA would have registers for all ranks, at places that are no numbers,
    and so no registers.

    Parameters
    ----------
    kernel : ClusterKernel
        Facts of the kernel, its buffers compacted.

    Returns
    -------
    dict
        What stands for each of these buffers.
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
    """Whether an index is the rank of the CTA on an axis as long as the dimension."""
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
