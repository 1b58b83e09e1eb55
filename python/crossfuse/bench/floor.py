"""The least time in which an H100 could do a workload."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from crossfuse.workload.dtypes import float_type
from crossfuse.workload.spec import WorkloadSpec

#: Bytes per second that an H100 reads from its memory in practice.
BYTES_PER_SECOND = 3.0e12
#: Operations per second of its tensor cores in practice, 2-byte inputs; taken for every type.
FLOPS_PER_SECOND = 790.0e12


@dataclass(frozen=True)
class Floor:
    """What a workload costs at least.

    Attributes
    ----------
    bytes : int
        Every input read once, the output written once.
    flops : int
        Of the matrix products.
    """

    bytes: int
    flops: int

    @property
    def memory_microseconds(self) -> float:
        """Time to move the bytes."""
        return self.bytes / BYTES_PER_SECOND * 1e6

    @property
    def compute_microseconds(self) -> float:
        """Time to do the operations."""
        return self.flops / FLOPS_PER_SECOND * 1e6

    @property
    def microseconds(self) -> float:
        """The longer of the two."""
        return max(self.memory_microseconds, self.compute_microseconds)


def floor(spec: WorkloadSpec) -> Floor:
    """Work out the floor of a workload.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.

    Returns
    -------
    Floor
        Compulsory bytes and operations; the intermediate never leaves the chip.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> round(floor(lookup("S3", M=16)).microseconds, 2)
    90.26
    """
    read = sum(map(prod, spec.inputs.values())) * float_type(spec.dtype).size
    written = prod(spec.output) * float_type(spec.out).size
    return Floor(bytes=read + written, flops=spec.flops)


def weight_bytes(spec: WorkloadSpec) -> int:
    """Bytes of all weights of a workload: every input but the first.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.

    Returns
    -------
    int
        What one pass reads of them.
    """
    _, *weights = spec.inputs.values()
    return sum(map(prod, weights)) * float_type(spec.dtype).size
