"""How long collectives over GPUs take, ours and NCCL's, and products in parts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

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
#: Threads of a CTA, and parts of 16 bytes up to which they are taken, measured on two H200. Each of
#: the CTAs is counted in the memory of all peers, by an atomic operation on a word: there are few,
#: and multiprocessors are left to other kernels that wait for peers.
_THREADS = ((256, 1 << 12), (512, 1 << 15))
_MOST_THREADS = 1024
#: CTAs at most, two of the most threads for each of 132 multiprocessors: each waits for all ranks
#: and is counted in their memory. If extents allow no more than the fewest, there are as many as
#: there are parts.
_MOST_CTAS, _FEWEST_CTAS = 264, 64
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
    def pay(self) -> bool:
        """Whether there are no more CTAs than are fast, of whole warps; what was measured is so."""
        parts = self.ctas * self.steps * self.threads
        return self.ctas <= 2 * _MOST_CTAS and (self.threads >= _WARP or parts <= _FEW_PARTS)


@lru_cache(maxsize=1024)
def shares(elements: int, item: int, threads: int | None = None) -> Shares:
    """How a kernel divides elements of `item` bytes among CTAs of at most as many threads."""
    vector = largest_divisor(elements, _LOAD // item)
    parts = elements // vector
    usual = next((each for each, most in _THREADS if parts <= most), _MOST_THREADS)
    width = largest_divisor(parts, threads or usual)
    turns = parts // width
    kept = largest_divisor(turns, _MOST_CTAS)
    ctas = kept if kept >= _FEWEST_CTAS else turns
    return Shares(vector, width, turns // ctas, ctas)


_KIB, _MIB = 1 << 10, 1 << 20

ALL_REDUCE = CollectiveTimes(
    (
        (8 * _KIB, 5.4, 10.7),
        (64 * _KIB, 5.6, 11.6),
        (128 * _KIB, 6.2, 10.0),
        (512 * _KIB, 8.4, 12.2),
        (1 * _MIB, 10.6, 16.5),
        (2 * _MIB, 15.4, 28.4),
        (4 * _MIB, 25.3, 33.5),
        (8 * _MIB, 39.2, 46.8),
        (16 * _MIB, 68.5, 75.2),
        (32 * _MIB, 128.1, 136.3),
        (64 * _MIB, 245.3, 246.1),
    )
)

ALL_GATHER = CollectiveTimes(
    (
        (64 * _KIB, 5.7, 8.8),
        (128 * _KIB, 6.6, 9.3),
        (512 * _KIB, 8.6, 12.8),
        (1 * _MIB, 10.8, 18.3),
        (2 * _MIB, 15.4, 27.0),
        (4 * _MIB, 25.4, 36.6),
        (8 * _MIB, 39.7, 55.4),
        (16 * _MIB, 70.5, 90.8),
        (32 * _MIB, 130.4, 157.0),
        (64 * _MIB, 248.2, 288.3),
    )
)

REDUCE_SCATTER = CollectiveTimes(
    (
        (128 * _KIB, 6.4, 9.2),
        (512 * _KIB, 7.4, 10.4),
        (1 * _MIB, 8.8, 12.4),
        (2 * _MIB, 11.1, 16.8),
        (4 * _MIB, 15.9, 24.0),
        (8 * _MIB, 26.5, 32.6),
        (16 * _MIB, 42.7, 51.6),
        (32 * _MIB, 79.0, 92.8),
        (64 * _MIB, 144.4, 165.9),
    ),
    sliced=True,
)


# Products whose operand is collected, or whose result is scattered, rank by rank: copy engines move
# one part while the product of another is computed.

#: Bytes of a GPU's tensor that its copy engines write to another's memory in a microsecond.
_COPIED = 370_000.0
#: What kernels that wait for ranks, and the fork and join of a stream, add to products.
_AROUND = 6.0


def gathered_in_parts(part: float, size: int, ranks: int) -> float:
    """Microseconds of all-gather and product, where a rank's rows take `part` to multiply."""
    copies = (ranks - 1) * size / _COPIED
    return max(part, copies) + (ranks - 1) * part + _AROUND


def scattered_in_parts(part: float, size: int, ranks: int, rates: Rates) -> float:
    """Microseconds of product and reduce-scatter of `size` bytes; `part` as `gathered_in_parts`."""
    copy = size / ranks / _COPIED
    added = (1 + 1 / ranks) * size / rates.measured.hbm_read
    return (ranks - 1) * max(part, copy) + max(part, copy) + added + _AROUND


def product(rows: int, columns: int, depth: int, item: int, rates: Rates, sms: int) -> float:
    """Microseconds of cuBLAS for a product."""
    shape = Shape(rows, columns, depth, 0, item=item, out=item)
    return float(eager(shape, rates, sms).microseconds)
