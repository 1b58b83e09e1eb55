"""How long sums over GPUs take: ours, of one shot, and NCCL's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Bytes of each GPU's tensor, microseconds of our kernels, and of NCCL's: two H200, CUDA graphs
#: (``benchmarks/results/ranks-h200.txt``).
_TIMES = (
    (8 << 10, 5.4, 10.7),
    (64 << 10, 5.6, 11.6),
    (128 << 10, 6.3, 11.9),
    (512 << 10, 8.7, 13.8),
    (1024 << 10, 10.7, 18.5),
    (2048 << 10, 15.4, 32.2),
)


def ours(size: int, ranks: int) -> float:
    """Microseconds of our sum of `size` bytes: each GPU loads those of all others."""
    return _between([(each, time) for each, time, _ in _TIMES], size * (ranks - 1))


def nccl(size: int) -> float:
    """Microseconds of NCCL's; over more than two GPUs it takes at least as long as over two."""
    return _between([(each, time) for each, _, time in _TIMES], size)


def _between(points: Sequence[tuple[int, float]], size: int) -> float:
    """The line through the two points next to a size; fewer bytes than the first take as long."""
    pairs = [*pairwise(points)]
    (low, begin), (high, end) = next((pair for pair in pairs if size <= pair[1][0]), pairs[-1])
    return begin + max(0, size - low) * (end - begin) / (high - low)
