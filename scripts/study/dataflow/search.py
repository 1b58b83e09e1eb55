"""A search through groups of candidates: each is analysed and scored, the best few are returned."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import numpy as np

from crossfuse.calls import AtLeastOne, checked
from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.kernels.shape import ceil_div
from study.dataflow.movement import Machine, Movement, arrivals, movement, through_l2
from study.dataflow.published import LoopSchedule
from study.dataflow.relaxations import Group, candidates_of
from study.dataflow.schedules import Residency
from study.dataflow.tiling import PIECE, Tiling
from study.dataflow.volume import nests

# Roofline as a simple cost model: bytes of each level over its bandwidth, and the largest of them.


@dataclass(frozen=True)
class Roof:
    """Roofline: levels overlap entirely, and each runs at its bandwidth (Chimera's objective)."""

    #: Bytes in a microsecond of all SMs together, by level of
    #: `study.dataflow.movement.MEMORIES`; levels that are absent cost nothing.
    bandwidths: Mapping[str, float]

    def score(self, moved: Movement, group: Group, tiling: Tiling) -> np.ndarray:
        """Microseconds of each candidate, for `study.dataflow.search.search`."""
        times = [moved.total(level) / width for level, width in self.bandwidths.items()]
        return np.maximum.reduce([np.asarray(each) for each in np.broadcast_arrays(*times)])


# Lower bounds by which candidates are skipped; each of them leaves a best one in.
#
# ```
# idle loop     a dim is walked in one step. The schedule with this dim spatial moves no more on any
#               level and holds no more, so that the candidate is left out if that one is there.
# least bytes   what goes through L2 and into shared memory, or what memory must move at least, over
#               the bandwidths, is more than the time of the best few so far.
# ```
#
# The third one is in `study.dataflow.relaxations`: extents that another one makes needless
# are left out before anything is combined.

#: Keeps nothing, which does not matter to what goes through L2 and into shared memory.
_ANY = Machine(0)


@dataclass(frozen=True)
class Bound:
    """A reason to leave candidates out."""

    #: Name to count by.
    name: str
    #: Of (Group, Tiling) to an array of numbers that the score is nowhere below; infinite for
    #: candidates that another one stands for. Each is asked of what those before it left in.
    stages: tuple[Callable[[Group, Tiling], np.ndarray], ...]

    def least(self, group: Group, tiling: Tiling) -> np.ndarray:
        """Bound of all stages for the same candidates."""
        return np.maximum.reduce([each(group, tiling) for each in self.stages])


def least_bytes(chain: Chain, roof: Roof) -> Bound:
    """Bound the time by what each level moves at least.

    From memory every input and the output come once. Traffic through L2 and into shared memory is
    that of `movement`, of which it costs only a part. A machine that spills, or that has to read
    partial sums back, moves more.
    """
    compulsory = sum(
        -(-chain.elements(each.name) * each.item // each.repeats)
        for each in chain.tensors
        if each.role != "intermediate"
    )
    hbm = compulsory / roof.bandwidths["hbm"] if "hbm" in roof.bandwidths else 0.0

    def memory(group: Group, tiling: Tiling) -> np.ndarray:
        return np.full(candidates_of(tiling), hbm)

    def l2(group: Group, tiling: Tiling) -> np.ndarray:
        made = nests(chain, group.schedule, tiling, group.residency)["cluster"]
        moved = through_l2(chain, made, group.residency, _ANY)
        return np.asarray(sum(moved.values()) / roof.bandwidths["l2"])

    def shared(group: Group, tiling: Tiling) -> np.ndarray:
        made = nests(chain, group.schedule, tiling, group.residency)["cta"]
        moved = arrivals(chain, made, group.residency, tiling.cluster)
        return np.asarray(sum(moved.values()) / roof.bandwidths["shared"])

    levels = {"l2": l2, "shared": shared}
    known = tuple(each for level, each in levels.items() if level in roof.bandwidths)
    return Bound("least bytes", (memory, *known))


def idle_loops(chain: Chain, groups: Sequence[Group]) -> Bound:
    """Leave out candidates that walk a dim in one step, if they are there with the dim spatial.

    What has room in a schedule has room in the one with the dim spatial too, as nothing is held for
    longer there, so that a group of the relaxation with that schedule has the same candidate.
    """
    present = {(each.relaxation, each.schedule) for each in groups}

    def least(group: Group, tiling: Tiling) -> np.ndarray:
        idle: np.ndarray = np.zeros(candidates_of(tiling), dtype=bool)
        for dim in group.schedule.order:
            if (group.relaxation, spatial_twin(group.schedule, dim, chain)) in present:
                wide = tiling.block[dim] * tiling.cluster.get(dim, 1)
                idle = idle | np.asarray(ceil_div(chain.extents[dim], wide) == 1)
        return np.where(idle, np.inf, -np.inf)

    return Bound("idle loop", (least,))


def spatial_twin(schedule: LoopSchedule, dim: str, chain: Chain) -> LoopSchedule:
    """Make the schedule with a dim spatial that this one walks."""
    spatial = {*schedule.spatial, dim}
    return LoopSchedule(
        tuple(each for each in chain.extents if each in spatial),
        tuple(each for each in schedule.order if each != dim),
    )


#: Lower is better. One number for each candidate, of what it moves and of what it is.
Score: TypeAlias = "Callable[[Movement, Group, Tiling], np.ndarray]"
_SCORED = "scored"


@dataclass(frozen=True)
class Candidate:
    """One way to run a chain."""

    #: As the caller scored it.
    score: float
    #: Of its group.
    relaxation: str
    schedule: LoopSchedule
    residency: Residency
    #: Of plain integers.
    tiling: Tiling


@dataclass(frozen=True)
class Found:
    """Result of a search."""

    #: Best first. Equal scores are in the order of the groups.
    best: tuple[Candidate, ...]
    #: Number of candidates that were analysed.
    scored: int
    #: Number of candidates that each bound left out, by its name.
    bounded: Mapping[str, int]


@checked
def search(
    chain: Chain,
    groups: Sequence[Group],
    score: Score,
    machine: Machine,
    *,
    keep: AtLeastOne = 8,
    bounds: Sequence[Bound] = (),
    threads: AtLeastOne = 2,
    piece: AtLeastOne = PIECE,
) -> Found:
    """Score all candidates and keep the best.

    Parameters
    ----------
    chain : Chain
        What is computed.
    groups : Sequence[Group]
        The candidates.
    score : Callable
        Of (Movement, Group, Tiling) to an array: the cost model. Called from several threads.
    machine : Machine
        See `study.dataflow.movement.movement`.
    keep : int
        Candidates to return at most.
    bounds : Sequence[Bound]
        Candidates that one of them puts behind the best `keep` so far are not analysed.
    threads : int
        That work at the same time; numpy lets go of the interpreter.
    piece : int
        Candidates that are analysed at once.

    Returns
    -------
    Found
        Its `best` is the same for any number of threads. How many candidates a bound left out is
        not, as it depends on what was found before.

    Raises
    ------
    PlanRefused
        If there is no candidate.

    Examples
    --------
    >>> from crossfuse.hardware import device
    >>> from crossfuse.planner.chain.build import matrix_chain
    >>> from study.dataflow.relaxations import relaxation, groups_of
    >>> chain = matrix_chain(64, [32, 64, 32])  # M, then K, N and L
    >>> groups = groups_of(chain, device("nvidia-h100"), relaxation("published"))
    >>> machine = Machine(l2_bytes=50 * 2**20)
    >>> found = search(chain, groups, lambda moved, *_: moved.total("l2"), machine, keep=1)
    >>> found.best[0].score  # bytes: all tensors once, the intermediate not at all
    16384.0
    """
    if not any(each.size for each in groups):
        raise refuse(
            PlanRefused,
            "search",
            "groups",
            found="no candidates",
            limit="at least one",
            instead="pass groups that rules have left candidates in",
        )
    top, queue = _Top(keep), _Queue(groups, piece)
    stages = [(each.name, stage) for each in bounds for stage in each.stages]

    def run() -> Counter[str]:
        counts: Counter[str] = Counter()
        for order, group, tiling in queue:
            places = np.arange(candidates_of(tiling))
            for name, stage in stages:
                # Equal scores may win by their order, so that only worse ones go, and those that
                # another candidate stands for, even while there is no limit yet.
                least = stage(group, tiling)
                stay = np.flatnonzero((least <= top.limit) & (least < np.inf))
                counts[name] += candidates_of(tiling) - len(stay)
                if len(stay) < len(places):
                    places, tiling = places[stay], tiling.at(stay)
                if not len(stay):
                    break
            else:
                moved = movement(chain, group.schedule, tiling, group.residency, machine)
                scores = np.broadcast_to(score(moved, group, tiling), (len(places),))
                top.add(order, group, tiling, places, scores)
                counts[_SCORED] += len(places)
        return counts

    with ThreadPoolExecutor(threads) as pool:
        parts = [each.result() for each in [pool.submit(run) for _ in range(threads)]]
    total = sum(parts, Counter[str]())
    return Found(top.best(), total[_SCORED], {each.name: total[each.name] for each in bounds})


class _Queue:
    """Pieces for several threads; each makes its own, when it comes to it.

    They come in a fixed shuffled order: bounds leave more out when good candidates came early.
    """

    def __init__(self, groups: Iterable[Group], piece: int) -> None:
        self._lock, self._piece = Lock(), piece
        places = [
            (group, batch, start)
            for group in groups
            for batch in group.batches
            for start in range(0, batch.size, piece)
        ]
        order = np.random.default_rng(0).permutation(len(places))
        self._places = iter([(int(each), places[each]) for each in order])

    def __iter__(self) -> Iterator[tuple[int, Group, Tiling]]:
        while True:
            with self._lock:
                place = next(self._places, None)
            if place is None:
                return
            order, (group, batch, start) = place
            yield order, group, batch.piece(start, self._piece)


class _Top:
    """The best few so far. The place in the order of candidates breaks ties."""

    def __init__(self, keep: int) -> None:
        self._keep, self._lock = keep, Lock()
        self._best: list[tuple[float, int, int, Candidate]] = []
        self.limit = float("inf")

    def add(
        self, order: int, group: Group, tiling: Tiling, places: np.ndarray, scores: np.ndarray
    ) -> None:
        """Merge the scores of a piece."""
        few = np.flatnonzero(scores <= self.limit)
        if len(few) > self._keep:
            # Among equals the first ones count, which a partial sort does not keep.
            last = np.partition(scores[few], self._keep - 1)[self._keep - 1]
            better = few[scores[few] < last]
            equal = few[scores[few] == last][: self._keep - len(better)]
            few = np.concatenate([better, equal])
        found = [
            (float(scores[each]), order, int(places[each]), _one(group, tiling, int(each), scores))
            for each in few
        ]
        with self._lock:
            merged = [*self._best, *found]
            self._best = heapq.nsmallest(self._keep, merged, key=lambda each: each[:3])
            if len(self._best) == self._keep:
                self.limit = self._best[-1][0]

    def best(self) -> tuple[Candidate, ...]:
        return tuple(each[-1] for each in self._best)


def _one(group: Group, tiling: Tiling, index: int, scores: np.ndarray) -> Candidate:
    block = {dim: int(np.asarray(each)[index]) for dim, each in tiling.block.items()}
    cluster = {dim: int(np.asarray(each)[index]) for dim, each in tiling.cluster.items()}
    score = float(scores[index])
    return Candidate(
        score, group.relaxation, group.schedule, group.residency, Tiling(block, cluster)
    )
