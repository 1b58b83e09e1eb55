"""How CTAs share the tensor of a collective, and how long products in parts beside one take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from crossfuse.markers import MOST_EXCHANGING
from crossfuse.planner.cost.estimate import eager
from crossfuse.planner.cost.rank_rates import RankRates
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.kernels.shape import Shape, largest_divisor

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


# Products whose operand is collected, or whose result is scattered, rank by rank: copy engines move
# one part while the product of another is computed.

#: What kernels that wait for ranks, and the fork and join of a stream, add to products; and each
#: rank more than two, by four H200.
_AROUND, _AROUND_MORE = 5.0, 10.0


def gathered_in_parts(part: float, size: int, between: RankRates) -> float:
    """Microseconds of all-gather and product, where a rank's rows take `part` to multiply."""
    ranks = between.ranks
    copies = (ranks - 1) * size / between.copied
    return max(part, copies) + (ranks - 1) * part + _around(ranks)


def scattered_in_parts(part: float, size: int, between: RankRates, rates: Rates) -> float:
    """Microseconds of product and reduce-scatter of `size` bytes; `part` as `gathered_in_parts`."""
    ranks = between.ranks
    copy = size / ranks / between.copied
    added = (1 + 1 / ranks) * size / rates.measured.hbm_read
    return (ranks - 1) * max(part, copy) + max(part, copy) + added + _around(ranks)


def _around(ranks: int) -> float:
    return _AROUND + max(0, ranks - 2) * _AROUND_MORE


#: By how much tensor cores are faster than `eager` knows them, which was fitted to products one
#: behind the other: those were timed with pauses, in which clocks recover.
_COOL = 1.25


def product(rows: int, columns: int, depth: int, item: int, rates: Rates, sms: int) -> float:
    """Microseconds of cuBLAS for a product."""

    def time(rows: int) -> float:
        shape = Shape(rows, columns, depth, 0, item=item, out=item)
        return float(eager(shape, rates, sms).microseconds)

    return max(time(1), time(rows) / _COOL)
