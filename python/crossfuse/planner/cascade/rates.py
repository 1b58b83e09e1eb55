"""Throughput of SMs beside products: special functions, and plain arithmetic.

Both run at the clock that products leave. The measured rate of products tells how low it falls: a
dense product of 16-bit floats takes 4096 operations of an SM in a cycle (NVIDIA H100 white paper:
989 TFLOP/s of 132 SMs at 1830 MHz).
"""

from __future__ import annotations

from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates

#: Operations of an SM's tensor cores in a cycle, of two bytes an element.
_PER_CYCLE = 4096
#: Cycles of a microsecond without load: what `nvidia-smi` says of an H100 SXM, and it held 1980 MHz
#: in softmax, decoding and short attention.
BOOST = 1980.0
#: Results of an SM in a cycle: CUDA programming guide, arithmetic instructions, capability 9.0.
SPECIAL, LANES = 16, 128


def clock(rates: Rates, *, dense: float = 0.0) -> float:
    """Cycles per microsecond under load; `dense` is the part of the time with tensor cores at work.

    With tensor cores at work all the time it falls to about 1600.
    """
    loaded = float(rates.tensor_rate(128, 256, 2)) / _PER_CYCLE
    return BOOST - (BOOST - loaded) * dense


def special_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of exponentials, logarithms and roots on all SMs."""
    return count / (SPECIAL * device.sms * clock(rates))


def lanes_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of additions, products and comparisons of float32 on all SMs."""
    return count / (LANES * device.sms * clock(rates))
