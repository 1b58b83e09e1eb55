"""How long collectives over GPUs take, ours and NCCL's, and products in parts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from crossfuse.markers import MOST_EXCHANGING
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.kernels.shape import Shape, largest_divisor


@dataclass(frozen=True)
class CollectiveTimes:
    """What was measured over two H200 in CUDA graphs (``benchmarks/results/ranks-h200.txt``)."""

    #: Bytes of each GPU's tensor, microseconds of our kernels, and of NCCL's.
    points: tuple[tuple[int, float, float], ...]
    #: Whether GPUs load only a slice of the others' tensors.
    sliced: bool = False

    def kernels(self, size: int, ranks: int) -> float:
        """Microseconds of ours for tensors of `size` bytes: each GPU loads from all others."""
        loaded = size * (ranks - 1) * (2 / ranks if self.sliced else 1)
        return _between([(each, time) for each, time, _ in self.points], loaded)

    def nccl(self, size: int) -> float:
        """Microseconds of NCCL's; over more than two GPUs at least as many as over two."""
        return _between([(each, time) for each, _, time in self.points], size)


def _between(points: Sequence[tuple[int, float]], size: float) -> float:
    """The line through the two points next to a size; fewer bytes than the first take as long."""
    pairs = [*pairwise(points)]
    (low, begin), (high, end) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return begin + max(0, size - low) * (end - begin) / (high - low)


# How the threads of a kernel share a tensor.

#: Bytes that a thread loads at a time.
_LOAD = 16
#: Threads of a CTA, and parts of 16 bytes up to which they are taken, measured on two H200.
_THREADS = ((256, 1 << 13), (512, 1 << 15))
_MOST_THREADS = 1024
#: CTAs that are enough. If extents allow neither as many nor one for each part, it takes long.
_ENOUGH_CTAS = 64
#: Threads of a CTA at least, and parts up to which fewer do.
_WARP, _FEW_PARTS = 32, 1 << 12


@dataclass(frozen=True)
class Shares:
    """Equal parts of a tensor."""

    #: Elements that a thread takes at a time.
    vector: int
    threads: int
    #: What a CTA does one behind the other.
    steps: int
    ctas: int

    @property
    def spread(self) -> bool:
        """Whether enough CTAs share the parts, or each has one alone."""
        return self.steps == 1 or self.ctas >= _ENOUGH_CTAS

    @property
    def pay(self) -> bool:
        """Whether these are fast; what was measured is so."""
        parts = self.ctas * self.steps * self.threads
        return self.spread and (self.threads >= _WARP or parts <= _FEW_PARTS)


@lru_cache(maxsize=1024)
def shares(elements: int, item: int, sms: int, threads: int | None = None) -> Shares:
    """How CTAs divide elements of `item` bytes, all at the same time.

    Each has the most threads with which enough CTAs share the parts, of as many as are usual or
    wanted; if there are none, it may have more than usual.
    """
    vector = largest_divisor(elements, _LOAD // item)
    parts = elements // vector
    usual = next((each for each, most in _THREADS if parts <= most), _MOST_THREADS)
    wanted = threads or usual
    widths = [*range(wanted, 0, -1), *range(wanted + 1, (threads or _MOST_THREADS) + 1)]
    every = []
    for width in widths:
        if parts % width == 0:
            ctas = largest_divisor(parts // width, min(sms, MOST_EXCHANGING))
            every.append(Shares(vector, width, parts // width // ctas, ctas))
    return next((each for each in every if each.spread), every[0])


_KIB, _MIB = 1 << 10, 1 << 20

ALL_REDUCE = CollectiveTimes(
    (
        (8 * _KIB, 3.9, 10.7),
        (32 * _KIB, 4.0, 10.2),
        (128 * _KIB, 4.2, 10.5),
        (256 * _KIB, 4.7, 11.5),
        (512 * _KIB, 5.7, 13.0),
        (1 * _MIB, 7.3, 16.5),
        (2 * _MIB, 12.1, 28.7),
        (4 * _MIB, 18.4, 33.7),
        (8 * _MIB, 32.5, 47.2),
        (16 * _MIB, 63.6, 75.0),
        (32 * _MIB, 122.9, 140.8),
        (64 * _MIB, 242.0, 250.3),
    )
)

ALL_GATHER = CollectiveTimes(
    (
        (32 * _KIB, 4.2, 9.5),
        (128 * _KIB, 4.4, 9.9),
        (256 * _KIB, 4.9, 11.2),
        (512 * _KIB, 5.7, 13.5),
        (1 * _MIB, 7.6, 18.5),
        (2 * _MIB, 12.1, 27.4),
        (4 * _MIB, 18.4, 37.1),
        (8 * _MIB, 32.9, 55.1),
        (16 * _MIB, 64.9, 90.7),
        (32 * _MIB, 124.5, 155.8),
        (64 * _MIB, 244.1, 287.9),
    )
)

REDUCE_SCATTER = CollectiveTimes(
    (
        (32 * _KIB, 4.3, 9.3),
        (128 * _KIB, 4.4, 9.6),
        (256 * _KIB, 4.6, 10.0),
        (512 * _KIB, 5.0, 11.0),
        (1 * _MIB, 6.0, 12.8),
        (2 * _MIB, 7.8, 17.3),
        (4 * _MIB, 12.4, 24.2),
        (8 * _MIB, 20.5, 32.9),
        (16 * _MIB, 37.4, 52.0),
        (32 * _MIB, 72.8, 92.6),
        (64 * _MIB, 140.5, 164.8),
    ),
    sliced=True,
)

ALL_TO_ALL = CollectiveTimes(
    (
        (16 * _KIB, 4.4, 10.5),
        (128 * _KIB, 4.6, 10.8),
        (512 * _KIB, 5.2, 12.1),
        (1 * _MIB, 6.3, 14.9),
        (2 * _MIB, 8.1, 16.8),
        (4 * _MIB, 12.6, 21.2),
        (8 * _MIB, 20.8, 30.6),
        (16 * _MIB, 39.2, 50.7),
        (32 * _MIB, 74.6, 82.3),
        (64 * _MIB, 143.1, 137.9),
    ),
    sliced=True,
)


# Products whose operand is collected, or whose result is scattered, rank by rank: copy engines move
# one part while the product of another is computed.

#: Bytes of a GPU's tensor that its copy engines write to another's memory in a microsecond.
_COPIED = 370_000.0
#: What kernels that wait for ranks, and the fork and join of a stream, add to products.
_AROUND = 5.0


def gathered_in_parts(part: float, size: int, ranks: int) -> float:
    """Microseconds of all-gather and product, where a rank's rows take `part` to multiply."""
    copies = (ranks - 1) * size / _COPIED
    return max(part, copies) + (ranks - 1) * part + _AROUND


def scattered_in_parts(part: float, size: int, ranks: int, rates: Rates) -> float:
    """Microseconds of product and reduce-scatter of `size` bytes; `part` as `gathered_in_parts`."""
    copy = size / ranks / _COPIED
    added = (1 + 1 / ranks) * size / rates.measured.hbm_read
    return (ranks - 1) * max(part, copy) + max(part, copy) + added + _AROUND


#: By how much tensor cores are faster than `eager` knows them, which was fitted to products one
#: behind the other: those were timed with pauses, in which clocks recover.
_COOL = 1.25


def product(rows: int, columns: int, depth: int, item: int, rates: Rates, sms: int) -> float:
    """Microseconds of cuBLAS for a product."""

    def time(rows: int) -> float:
        shape = Shape(rows, columns, depth, 0, item=item, out=item)
        return float(eager(shape, rates, sms).microseconds)

    return max(time(1), time(rows) / _COOL)
