"""The roofline: the least time in which a GPU could do a workload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from crossfuse.hardware import DEVICES, Device, device
from crossfuse.planner.cost.rates import rates_of
from crossfuse.workload.dtypes import Operand, float_type
from crossfuse.workload.spec import WorkloadSpec

#: What an H100 reads from its memory in practice, bytes per second, and what its tensor cores do,
#: operations per second of 2-byte inputs (taken for 4-byte ones too). Others have these in the
#: ratio of their records to the H100's.
BYTES_PER_SECOND, FLOPS_PER_SECOND = 3.0e12, 790.0e12


@dataclass(frozen=True)
class Roofs:
    """Rates that a GPU reaches in practice, the two roofs of the roofline."""

    #: Reads from HBM.
    bytes_per_second: float = BYTES_PER_SECOND
    #: Of the tensor cores on 2-byte inputs; 1-byte inputs go twice as fast.
    flops_per_second: float = FLOPS_PER_SECOND


@dataclass(frozen=True)
class Floor:
    """What a workload costs at least, and the time of that."""

    #: Every input read once, the output written once.
    bytes: int
    #: Of the matrix products.
    flops: int
    roofs: Roofs = Roofs()
    #: Whether the products are of 1-byte inputs.
    eight_bits: bool = False

    @property
    def memory_microseconds(self) -> float:
        """Time to move the bytes."""
        return self.bytes / self.roofs.bytes_per_second * 1e6

    @property
    def compute_microseconds(self) -> float:
        """Time of the operations."""
        return self.flops / self.roofs.flops_per_second / (2 if self.eight_bits else 1) * 1e6

    @property
    def microseconds(self) -> float:
        """The longer of the two times."""
        return max(self.memory_microseconds, self.compute_microseconds)


@lru_cache(maxsize=8)
def roofs_of(target: Device) -> Roofs:
    """Rates of a device, scaled from those of the H100 by the ratio of their calibration records.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> round(roofs_of(device("nvidia-h200")).bytes_per_second / 1e12, 2)
    4.38
    """
    h100 = DEVICES["nvidia-h100"]
    here, there = rates_of(target), rates_of(h100)
    memory = here.measured.hbm_read / there.measured.hbm_read
    compute = here.tensor_rate(128, 256, 2) * target.sms / there.tensor_rate(128, 256, 2) / h100.sms
    return Roofs(BYTES_PER_SECOND * memory, FLOPS_PER_SECOND * float(compute))


def floor(spec: WorkloadSpec, target: Device | None = None) -> Floor:
    """Work out the roofline of a workload; the intermediate never leaves the chip.

    The dense tensor cores of the H100 SXM5 are rated at 989.4 TFLOP/s on bfloat16 and 1978.9, twice
    as many, on 8-bit floats (NVIDIA, "H100 Tensor Core GPU Architecture", 2022). Of the former the
    chip reaches about 80 % in practice; the roof for 8-bit floats is twice that. Without a target
    it is the GPU of this machine, or an H100.

    Examples
    --------
    >>> from crossfuse.workload import lookup
    >>> round(floor(lookup("S3", M=16), device("nvidia-h100")).microseconds, 2)
    90.26
    """
    read = _bytes(spec.operands)
    written = prod(spec.output) * float_type(spec.out).size
    eight_bits = float_type(spec.dtype).size == 1
    return Floor(read + written, spec.flops, roofs_of(device(target)), eight_bits)


def weight_bytes(spec: WorkloadSpec) -> int:
    """Bytes that one computation reads of weights, the right-hand sides of the products."""
    return _bytes(spec.weight_operands)


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(each.elements * float_type(each.dtype).size for each in operands)
