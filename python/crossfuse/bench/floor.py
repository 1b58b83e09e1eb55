"""The least time in which an H100 could do a workload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from crossfuse.workload.dtypes import float_type
from crossfuse.workload.operand import Operand
from crossfuse.workload.spec import WorkloadSpec

#: Bytes per second that an H100 reads from its memory in practice.
BYTES_PER_SECOND = 3.0e12
#: Operations per second of its tensor cores in practice, 2-byte inputs; taken for 4-byte ones too.
FLOPS_PER_SECOND = 790.0e12
#: The same for 1-byte inputs, of which a tensor core takes twice as many in a cycle.
FP8_FLOPS_PER_SECOND = 2 * FLOPS_PER_SECOND


@dataclass(frozen=True)
class Floor:
    """What a workload costs at least.

    Attributes
    ----------
    bytes : int
        Every input read once, the output written once.
    flops : int
        Of the matrix products.
    flops_per_second : float
        What the tensor cores do of them in practice.
    """

    bytes: int
    flops: int
    flops_per_second: float = FLOPS_PER_SECOND

    @property
    def memory_microseconds(self) -> float:
        """Time to move the bytes."""
        return self.bytes / BYTES_PER_SECOND * 1e6

    @property
    def compute_microseconds(self) -> float:
        """Time to do the operations."""
        return self.flops / self.flops_per_second * 1e6

    @property
    def microseconds(self) -> float:
        """The longer of the two."""
        return max(self.memory_microseconds, self.compute_microseconds)


def floor(spec: WorkloadSpec) -> Floor:
    """Work out the floor of a workload.

    The dense tensor cores of the H100 SXM5 are rated at 989.4 TFLOP/s on bfloat16 and 1978.9, twice
    as many, on 8-bit floats (NVIDIA, "H100 Tensor Core GPU Architecture", 2022). Of the former the
    chip reaches about 80 % in practice; the roof for 8-bit floats is twice that.

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
    read = _bytes(spec.operands)
    written = prod(spec.output) * float_type(spec.out).size
    eight_bits = float_type(spec.dtype).size == 1
    roof = FP8_FLOPS_PER_SECOND if eight_bits else FLOPS_PER_SECOND
    return Floor(bytes=read + written, flops=spec.flops, flops_per_second=roof)


def weight_bytes(spec: WorkloadSpec) -> int:
    """Bytes of all weights of a workload: the right-hand sides of its products.

    Parameters
    ----------
    spec : WorkloadSpec
        What is computed.

    Returns
    -------
    int
        What one pass reads of them.
    """
    return _bytes(spec.weight_operands)


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(each.elements * float_type(each.dtype).size for each in operands)
