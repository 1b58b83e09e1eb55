"""Times of what several GPUs do together, in CUDA graphs, and the record of these."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.planner.cost.rank_rates import Points, RankRates
from crossfuse.torch.collectives import COLLECTIVES, Collective
from crossfuse.torch.ranks import Connection, PeerRanks, connect_ranks

#: Calls in a graph, replays of each, and seconds between two of these, in which clocks recover.
_CALLS, _REPLAYS, _PAUSE = 8, 6, 0.05
#: Bytes of each GPU's tensor that are measured.
_SIZES = tuple(each << 10 for each in (32, 128, 512, 1024, 4096, 16384, 65536))
_COPIED = 16 << 20
#: Elements that slices are a multiple of: eight for each thread of a CTA.
_WHOLE = 2048


def _summed(made: torch.Tensor, x: torch.Tensor) -> None:
    del made
    dist.all_reduce(x)


#: torch's collectives by the names of ours: into a tensor, of a tensor; the sum is in place.
LIBRARY: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all_reduce": _summed,
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "all_to_all": dist.all_to_all_single,
}


def times_of(
    calls: Sequence[Callable[[int], Any]],
    note: Callable[[str], None] = lambda line: None,
) -> list[float]:
    """Microseconds of calls, on the slower GPU, the least of replays that take turns.

    A call is given its number in the graph. NaN for what cannot be captured.
    """
    graphs = [_captured(each, note) for each in calls]
    least = [float("inf") if each else float("nan") for each in graphs]
    for turn in range(_REPLAYS):
        for number in range(len(graphs)):
            place = (number + turn) % len(graphs)
            if (graph := graphs[place]) is not None:
                time.sleep(_PAUSE)
                least[place] = min(least[place], _replayed(graph))
    return least


def _captured(call: Callable[[int], Any], note: Callable[[str], None]) -> Any:
    try:
        for number in range(3):
            call(number)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(_CALLS):
                call(number)
    except (RuntimeError, AttributeError) as error:
        note(f"not measured: {str(error)[:100]}")
        return None
    return graph


def _replayed(graph: Any) -> float:
    """Microseconds of a call on the slower GPU; another replay lets ranks begin together."""
    dist.barrier()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    taken = torch.tensor([begin.elapsed_time(end) * 1000 / _CALLS], device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


# The record of GPUs together.


def calibrate_ranks(
    device: str, machine: Callable[[], dict[str, Any]], note: Callable[[str], None]
) -> RankRates:
    """Measure collectives of ours and NCCL's over all processes, and copies; all call it.

    Refused are GPUs that do not reach each other's memory.
    """
    connection = connect_ranks()
    ranks = connection.ranks
    if not isinstance(ranks, PeerRanks):
        raise refuse(
            EnvironmentRefused,
            "calibrate",
            "ranks",
            found="processes without GPUs",
            limit="a GPU for each of them",
            instead="run it where there are as many GPUs",
        )
    wanted: dict[Collective, list[torch.Tensor]] = {
        each: _tensors(connection, each) for each in COLLECTIVES
    }
    _prepare(ranks, wanted, note)
    points: dict[str, Points] = {}
    with torch.no_grad():
        for collective, given in wanted.items():
            found = tuple(_point(ranks, collective, each) for each in given)
            points[collective.name] = found
            told = (f"{ours:.1f} of {nccl:.1f}" for _, ours, nccl in found)
            note(f"{collective.name}, us: {', '.join(told)}")
        copied = _copied(ranks)
    note(f"copies: {copied / 1000:.0f} GB/s")
    connection.check()
    made = RankRates(
        device,
        connection.size,
        copied,
        all_reduce=points["all_reduce"],
        all_gather=points["all_gather"],
        reduce_scatter=points["reduce_scatter"],
        all_to_all=points["all_to_all"],
        machine=machine(),
    )
    connection.close()
    return made


def _tensors(connection: Connection, collective: Collective) -> list[torch.Tensor]:
    """What each rank has of a collective, of all sizes that kernels take."""
    ranks, every = connection.size, []
    for size in _SIZES:
        columns = max(1, size // 2 // ranks // _WHOLE) * _WHOLE
        given = torch.zeros(ranks, columns, dtype=torch.bfloat16, device=connection.place)
        every += [] if connection.unfit(given, collective) else [given]
    return every


def _prepare(
    ranks: PeerRanks,
    wanted: Mapping[Collective, Sequence[torch.Tensor]],
    note: Callable[[str], None],
) -> None:
    """Build all kernels, several at a time; other ranks find them in the cache."""
    every = [(collective, each.numel()) for collective, given in wanted.items() for each in given]

    def build(each: tuple[Collective, int]) -> None:
        collective, elements = each
        ranks.prepare(collective, elements, "bfloat16")

    for first in (True, False):
        if first == (ranks.rank == 0):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(build, every))
        dist.barrier()
    note(f"{len(every)} kernels built")


def _point(ranks: PeerRanks, collective: Collective, x: torch.Tensor) -> tuple[int, float, float]:
    """Bytes, and microseconds of ours and of NCCL's."""
    made = x.new_empty(collective.shape(x.shape, ranks.size))
    library = LIBRARY[collective.name]
    ours, nccl = times_of((lambda _: ranks.run(collective, x), lambda _: library(made, x)))
    return x.nbytes, round(ours, 2), round(nccl, 2)


def _copied(ranks: PeerRanks) -> float:
    """Bytes a microsecond that each rank copies to the next one, all at the same time."""
    slabs = ranks.memory.slabs("bfloat16")
    given = torch.zeros(_COPIED // 2, dtype=torch.bfloat16, device=slabs.device)
    place = slabs[(ranks.rank + 1) % ranks.size, : len(given)]
    (taken,) = times_of((lambda _: place.copy_(given),))
    return round(_COPIED / taken)
