"""Times between CUDA events, with the weights rotated and the L2 cache cold or hot as asked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Which set of weights each call reads, so that the L2 cache is cold or hot as asked.

#: The sets together exceed this: five times the L2 cache of an H200.
COLD_BYTES = 300 * 10**6
#: More sets than this are not made; tiny weights rely on what is read between the repeats.
MOST_COPIES = 1024


def copies_needed(size: int, calls: int, l2: str) -> int:
    """Sets of weights to make, of `size` bytes each.

    One for a hot cache, and where there are no weights. Else enough to exceed `COLD_BYTES`, and
    where that is more than `calls`, the most calls between two timestamps, a multiple of it, so
    that no call reads a set twice in a row of calls.
    """
    if l2 == "hot" or not size:
        return 1
    enough = COLD_BYTES // size + 1
    if enough <= calls:
        return enough
    return min(-(-enough // calls), max(1, MOST_COPIES // calls)) * calls


def groups(copies: int, calls: int, l2: str) -> tuple[tuple[int, ...], ...]:
    """Indices of the sets that are used between two timestamps, one group after another.

    For a hot cache there is one group, of the same set again and again.
    """
    if l2 == "hot":
        return ((0,) * calls,)
    if copies <= calls:
        # A set comes again after all others, which do not fit the cache.
        return (tuple(number % copies for number in range(calls)),)
    return tuple(
        tuple(range(first, first + calls)) for first in range(0, copies - calls + 1, calls)
    )


#: Read before each cold measurement; reads leave nothing behind that has to be written back.
FLUSH_BYTES = 256 * 2**20
WARMUPS = 3
REPEATS = 15
CALLS = 16
#: Median over least time from which on something else had the machine for half of the repeats: a
#: host that launches late is the usual reason. An undisturbed median is 0.5 % above the least.
DISTURBED = 1.1
#: Measurements of what is disturbed, at most.
ROUNDS = 3
#: Calls before each hot measurement at least.
HEATING_CALLS = 16


@dataclass(frozen=True)
class TimingConditions:
    """How a measurement is made."""

    #: ``"cold"``: weights not in the L2 cache; ``"hot"``: one set of them, left there.
    l2: str = "cold"
    #: ``"graph"``: replayed from a CUDA graph; ``"stream"``: launched one by one.
    protocol: str = "graph"
    #: Times of which the median is taken.
    repeats: int = REPEATS
    #: Computations between two timestamps at most, one after another and each, if cold, on weights
    #: of its own: one graph holds them, and a time is divided by their number.
    calls: int = CALLS


@dataclass(frozen=True)
class Step:
    """The calls between two timestamps."""

    #: Makes all of the calls; gives the output of the last.
    run: Callable[[], Any]
    calls: int
    #: Index of the set that the last of them works on.
    last: int = 0


def steps(how: TimingConditions, bound: Sequence[Callable[[], Any]]) -> list[Step]:
    """Arrange computations into what is timed between timestamps, one step after another.

    There is one of `bound` for each set of weights; each has been called before, so that nothing is
    compiled while it is captured.
    """
    used = groups(len(bound), how.calls, how.l2)[: WARMUPS + how.repeats]
    chosen = [([bound[index] for index in group], group[-1]) for group in used]
    if how.protocol == "stream":
        return [Step(_in_order(group), len(group), last) for group, last in chosen]
    import torch

    pool = torch.cuda.graph_pool_handle()
    return [Step(_captured(group, pool), len(group), last) for group, last in chosen]


def _in_order(group: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    def run() -> Any:
        output = None
        for call in group:
            output = call()
        return output

    return run


def _captured(group: Sequence[Callable[[], Any]], pool: Any) -> Callable[[], Any]:
    """A CUDA graph of the calls; only the last output stays referenced, so others share memory."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = _in_order(group)()

    def run() -> Any:
        graph.replay()
        return output

    return run


def quietest(take: Callable[[], list[float]]) -> list[float]:
    """Take times of one computation until they are undisturbed.

    After `ROUNDS` without success, those with the least median are taken.
    """
    rounds: list[list[float]] = []
    while len(rounds) < ROUNDS:
        rounds.append(take())
        if statistics.median(rounds[-1]) <= DISTURBED * min(map(min, rounds)):
            return rounds[-1]
    return min(rounds, key=statistics.median)


def measure(how: TimingConditions, timed: Sequence[Step], device: str = "cuda") -> list[float]:
    """Time the steps in turn; gives microseconds of one call for each repeat."""
    import torch

    flush = flusher(device) if how.l2 == "cold" else None
    times = []
    for index in range(WARMUPS + how.repeats):
        step = timed[index % len(timed)]
        # Also keeps the GPU busy while the graph is being launched, which is not to be timed.
        if flush is not None:
            flush()
        else:
            _heat(step)
        if how.protocol == "stream":
            # Launching is part of what this protocol times: begin with an idle GPU.
            torch.cuda.synchronize()
        times.append(elapsed(step.run) * 1e3 / step.calls)
    return times[WARMUPS:]


def elapsed(run: Callable[[], Any]) -> float:
    """Milliseconds that a call takes on the GPU."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    found: float = start.elapsed_time(end)
    return found


def _heat(step: Step) -> None:
    for _ in range(max(1, HEATING_CALLS // step.calls)):
        step.run()


def flusher(device: str) -> Callable[[], Any]:
    """A function that evicts from the L2 cache what a computation reads, on the current stream.

    It reads a large buffer and writes nothing: what is left in the cache need not be written back
    during what comes next.
    """
    import torch

    buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    return lambda: buffer.sum()
