"""What multiprocessors compute beside products: special functions, and plain arithmetic.

Both run at the clock that products leave, which their measured rate tells: a dense product of
16-bit floats takes 4096 operations of an SM in a cycle (NVIDIA H100 white paper: 989 TFLOP/s of 132
SMs at 1830 MHz).
"""

from __future__ import annotations

from crossfuse.hardware import Device
from crossfuse.planner.cost.rates import Rates

#: Operations of an SM's tensor cores in a cycle, of two bytes an element.
_PER_CYCLE = 4096
#: Results of an SM in a cycle: CUDA programming guide, arithmetic instructions, capability 9.0.
SPECIAL, LANES = 16, 128


def clock(rates: Rates) -> float:
    """Cycles of a microsecond while tensor cores are at work, about 1600."""
    return float(rates.tensor_rate(128, 256, 2)) / _PER_CYCLE


def special_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of exponentials, logarithms and roots on all SMs."""
    return count / (SPECIAL * device.sms * clock(rates))


def lanes_time(count: float, device: Device, rates: Rates) -> float:
    """Microseconds of additions, products and comparisons of float32 on all SMs."""
    return count / (LANES * device.sms * clock(rates))
