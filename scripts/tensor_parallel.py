"""How long a step of a tensor-parallel model takes over the GPUs of a host, way by way.

    torchrun --nproc-per-node 2 scripts/tensor_parallel.py --sequences 1 --ways crossfuse,compile

The model of ``scripts/decode_steps.py`` in slices of torch's own tensor parallelism, one a process:
columns of q, k, v, gate and up, rows of o and down, whose results are summed over all GPUs. A step
is one token of each sequence; with ``--tokens`` it is a prefill of that many without a cache.
Printed are microseconds of a CUDA graph on the slower GPU, the median of the replays and the least,
and the largest difference of logits from float64, beside that of one GPU's eager step.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import crossfuse.torch
from decode_steps import MODELS, Step, compiled

#: Way of ``scripts/decode_steps.py``, and whether ranks are connected.
WAYS = {
    "crossfuse": ("crossfuse", True),
    "crossfuse, NCCL": ("crossfuse", False),
    "compile": ("compile", False),
    "max-autotune": ("max-autotune", False),
    "eager": ("eager", False),
}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=["crossfuse", "compile"])
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=0, help="of a prefill, instead of a step")
    parser.add_argument("--cache", type=int, default=1024)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--narrower", type=int, default=1)
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--turn", type=Path, help="a file that jobs lock to be timed alone")
    given = parser.parse_args()
    given.experts = "batched_mm"
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    if given.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    with torch.no_grad():
        lines(given)
    dist.barrier()
    os._exit(0)


def lines(given: argparse.Namespace) -> None:
    """Hold each way against float64, and time it."""
    step = Step(given.sequences, given)
    if given.tokens:
        shape = (given.sequences, given.tokens)
        step.tokens = torch.randint(step.config.vocab_size, shape, device=given.device)
    eager = _begun(step, given)().double()
    narrow = step.model
    step.model = deepcopy(narrow).double()  # which also widens what positions are made of
    exact = _begun(step, given)()
    step.model = narrow
    mesh = init_device_mesh(given.device, (dist.get_world_size(),))
    plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    plan |= dict.fromkeys(("gate_proj", "up_proj"), ColwiseParallel())
    plan |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
    for layer in step.model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            parallelize_module(part, mesh, {k: v for k, v in plan.items() if hasattr(part, k)})
    for name in given.ways:
        way, connected = WAYS[name]
        torch._dynamo.reset()
        connection = crossfuse.torch.connect_ranks(deadline=120.0) if connected else None
        run = compiled(way, _begun(step, given), given.device)
        logits = run().double()
        times = _timed(run, given) if given.device == "cuda" else (0.0, 0.0)
        off, eager_off = ((each - exact).abs().max().item() for each in (logits, eager))
        same = logits.clone()
        dist.broadcast(same, 0)
        equal = torch.tensor([int(torch.equal(same, logits))], device=given.device)
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        if connection is not None:
            connection.check()
            connection.close()
        if dist.get_rank() == 0:
            what = f"{given.tokens} tokens" if given.tokens else f"{given.sequences:3} x"
            print(
                f"{what} {name:16} {times[0]:8.0f} us (least {times[1]:.0f}); off by {off:.2e} "
                f"(one GPU {eager_off:.2e}), ranks equal {bool(equal.item())}",
                flush=True,
            )
            if way == "crossfuse":
                print("   ", _collectives(), flush=True)


def _begun(step: Step, given: argparse.Namespace) -> Callable[[], Any]:
    """The step of the model as it is."""
    if not given.tokens:
        return step.run(step.cached())
    model, tokens = step.model, step.tokens
    return lambda: model(input_ids=tokens, use_cache=False).logits


def _collectives() -> str:
    """What became of sums and products over GPUs in the graph that was compiled last."""
    report = crossfuse.torch.reports()[-1]
    told = [e.text for e in report.outcomes if "GPUs" in e.text or "NCCL" in e.text]
    return "; ".join(f"{told.count(each)} x {each}" for each in dict.fromkeys(told))


@contextmanager
def _alone(given: argparse.Namespace) -> Iterator[None]:
    """Jobs that share GPUs are timed one behind the other."""
    if given.turn is None or dist.get_rank():
        dist.barrier()
        yield
        dist.barrier()
        return
    with given.turn.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        yield
        dist.barrier()


def _timed(run: Callable[[], Any], given: argparse.Namespace) -> tuple[float, float]:
    """Microseconds of a CUDA graph of the step, median and least, on the slower GPU."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with _alone(given):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(given.replays + 1)]
        events[0].record()
        for each in events[1:]:
            graph.replay()
            each.record()
        torch.cuda.synchronize()
    pairs = pairwise(events)
    times = torch.tensor([1000 * a.elapsed_time(b) for a, b in pairs], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found = times.tolist()
    return statistics.median(found), min(found)


if __name__ == "__main__":
    main()
