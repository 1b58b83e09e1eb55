"""Collectives over GPUs, and products with them, beside NCCL and PyTorch's asynchronous ones.

    torchrun --nproc-per-node 2 scripts/rank_products.py

Microseconds of a call in a CUDA graph, weights in turns, the slower GPU, least of several replays
in turns, each of which follows another one, so that ranks begin together. NVLink's multicast stays
off.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

import crossfuse.torch
from crossfuse.bench.ranks import LIBRARY, times_of
from crossfuse.torch.collectives import COLLECTIVES, Collective

#: Columns and depth of the product behind an all-gather, and of that before a reduce-scatter, on
#: each GPU.
GATHERED, SCATTERED = (6656, 4096), (4096, 14336)
ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Calls and replays that have to agree bit for bit, and seconds that a rank is late.
REPEATS, LATE = 1000, 0.05
TYPE = torch.bfloat16


def say(*words: object) -> None:
    """Print in the first rank."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def everywhere(right: bool) -> bool:
    """Whether something is right in all ranks."""
    found = torch.tensor([int(right)], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found.item())


def timed(calls: Sequence[Callable[[Any], Any]], weights: Sequence[Any]) -> list[float]:
    """Microseconds of calls, timed in turns, each with another weight than the one before."""

    def taking(call: Callable[[Any], Any]) -> Callable[[int], Any]:
        return lambda number: call(weights[number % len(weights)])

    return times_of([taking(each) for each in calls], say)


def off(got: torch.Tensor, due: torch.Tensor) -> float:
    """Relative distance in the Frobenius norm."""
    return float((got.double() - due.double()).norm() / due.double().norm())


def check(collective: Collective, rows: int) -> None:
    """Hold a collective bit for bit against its definition: a rank that is late, many calls."""
    ours = getattr(crossfuse.torch, collective.name)
    x = torch.randn(rows, 4096, device="cuda").to(TYPE)
    right = True
    for late in range(2 * dist.get_world_size()):
        x.normal_()
        due = _defined(collective, x)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if dist.get_rank() == late % dist.get_world_size():
            time.sleep(LATE)
        right &= torch.equal(ours(x), due)
    first, differ = ours(x).clone(), 0
    for _ in range(REPEATS):
        differ += not torch.equal(ours(x), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many = [ours(x) for _ in range(10)]
    for _ in range(REPEATS // 10):
        graph.replay()
        differ += sum(not torch.equal(each, first) for each in many)
    verdict = everywhere(right and not differ)
    say(f"check: {collective.name} of {rows} rows, a rank late: {'RIGHT' if verdict else 'WRONG'}")


def _defined(collective: Collective, x: torch.Tensor) -> torch.Tensor:
    """What a rank gets of a collective; sums are of float32, in the order of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = x.new_empty(ranks, *x.shape)
    dist.all_gather_into_tensor(every, x)
    total = torch.zeros_like(x, dtype=torch.float32)
    for each in every:
        total += each.float()
    mine = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
    return {
        "all_reduce": total.to(TYPE),
        "reduce_scatter": total[mine].to(TYPE),
        "all_gather": every.flatten(0, 1),
        "all_to_all": every[:, mine].flatten(0, 1),
    }[collective.name]


def alone(rows: int) -> None:
    """Time collectives of tensors of so many rows of 4096 in each GPU."""
    x = torch.randn(rows, 4096, device="cuda").to(TYPE)
    words = []
    for each in COLLECTIVES:
        ours = getattr(crossfuse.torch, each.name)
        made = x.new_empty(each.shape(x.shape, dist.get_world_size()))
        run = LIBRARY[each.name]
        library = lambda _, made=made, run=run: run(made, x)  # noqa: E731
        times = timed((lambda _, run=ours: run(x), library), [0])
        words.append(f"{each.name} {times[0]:.1f} NCCL {times[1]:.1f}")
        x.normal_()
    say(f"rows {rows:>5}:", "  ".join(words))


def gathered(rows: int) -> None:
    """Time all-gather and product."""
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    columns, depth = GATHERED
    weights = [_weight(columns, depth) for _ in range(4)]
    x = torch.randn(rows // ranks, depth, device="cuda").to(TYPE)
    full = x.new_empty(rows, depth)

    def nccl(weight: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(full, x)
        return full @ weight

    def asynchronous(weight: torch.Tensor) -> Any:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group)

    def ours(weight: torch.Tensor) -> torch.Tensor:
        return crossfuse.torch.all_gather_matmul(x, [weight])[0]

    _compare("gather + product ", rows, weights, lambda w: full @ w, nccl, asynchronous, ours)


def scattered(rows: int) -> None:
    """Time product and reduce-scatter."""
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    columns, depth = SCATTERED
    weights = [_weight(columns, depth) for _ in range(3)]
    x = torch.randn(rows, depth, device="cuda").to(TYPE)
    made = x.new_empty(rows // ranks, columns)

    def nccl(weight: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(made, x @ weight)
        return made

    def asynchronous(weight: torch.Tensor) -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, group)

    def ours(weight: torch.Tensor) -> torch.Tensor:
        return crossfuse.torch.matmul_reduce_scatter(x, weight)

    _compare("product + scatter", rows, weights, lambda w: x @ w, nccl, asynchronous, ours)


def _weight(columns: int, depth: int) -> torch.Tensor:
    return torch.randn(columns, depth, device="cuda").mul_(depth**-0.5).to(TYPE).t()


def _compare(
    what: str,
    rows: int,
    weights: Sequence[torch.Tensor],
    product: Callable[[Any], Any],
    nccl: Callable[[Any], Any],
    asynchronous: Callable[[Any], Any],
    ours: Callable[[Any], Any],
) -> None:
    due = nccl(weights[0]).clone()
    distance, differ = off(ours(weights[0]), due), 0
    first = ours(weights[0]).clone()
    for _ in range(REPEATS if rows <= 512 else 20):
        differ += not torch.equal(ours(weights[0]), first)
    times = timed((product, nccl, asynchronous, ours), weights)
    distance = max(distance, off(ours(weights[0]), due))  # after timing too
    right = everywhere(distance < 5e-3 and not differ)
    best = min(each for each in times[1:3] if each == each)
    say(
        f"{what} {rows:>5}: product {times[0]:.1f}  NCCL {times[1]:.1f}  async {times[2]:.1f}  "
        f"crossfuse {times[3]:.1f}  {best / times[3]:.3f}x  {'RIGHT' if right else 'WRONG'}"
    )


def main() -> None:
    """Check and time everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    given = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    connection = crossfuse.torch.connect_ranks(deadline=60.0)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for each in COLLECTIVES:
            for rows in (16, 1024):
                check(each, rows)
        for rows in (1, *given.rows):
            if rows % dist.get_world_size() == 0:
                alone(rows)
        for run in (gathered, scattered):
            for rows in given.rows:
                run(rows)
    connection.check()
    say("no rank was late")
    os._exit(0)  # NCCL's communicators end with the process


if __name__ == "__main__":
    main()
