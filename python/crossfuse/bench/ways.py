"""Times ways to compute something: ``python -m crossfuse.bench.ways GPU``.

The process of `crossfuse.measure.timer.Timer`. A request is a `crossfuse.measure.way.Way`, the
answer a `crossfuse.measure.way.Taken`; inputs are drawn on the GPU, and cold ones are rotated so
that the L2 cache does not have them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from crossfuse.measure.peer import Serve, serve_lines
from crossfuse.measure.timing import TimingConditions, copies_needed, measure, quietest, steps
from crossfuse.measure.way import GRAPH, LIBRARY, PROGRAM, Given, Taken, Way
from crossfuse.schema import typed

_LONGEST = 600
_HOW = TimingConditions()
#: Milliseconds between two timestamps; a single call may take longer.
_LONGEST_STEP = 5.0


def main() -> None:
    """Serve until standard input ends."""
    serve_lines(partial(ways_of, int(sys.argv[1])))


def ways_of(index: int) -> Serve:
    """The service that times ways on the GPU of a CUDA index."""
    import torch
    import tvm_ffi  # noqa: F401

    import crossfuse.runtime  # noqa: F401

    torch.cuda.set_device(index)
    torch.set_grad_enabled(False)

    def serve(request: Mapping[str, Any]) -> Any:
        try:
            return asdict(time_way(typed(Way, request)))
        except Exception as error:
            return asdict(Taken(message=f"{type(error).__name__}: {error}"[:_LONGEST]))
        finally:
            # The next one may need it all.
            torch.cuda.empty_cache()

    return serve


def time_way(way: Way, device: str = "cuda", how: TimingConditions = _HOW) -> Taken:
    """Time a way in this process: median and least time of one computation.

    By default the cache is cold, and a CUDA graph is replayed.
    """
    bound = _bound(way, device, how)
    for call in bound:
        call()
    how = _within(how, bound[0], device)
    timed = steps(how, bound)
    times = quietest(lambda: measure(how, timed, device))
    return Taken(statistics.median(times), min(times))


def _within(how: TimingConditions, call: Callable[[], Any], device: str) -> TimingConditions:
    """Conditions with so few calls between two timestamps that slow ones do not take minutes."""
    import torch

    if device != "cuda":
        return how
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = int(_LONGEST_STEP / max(start.elapsed_time(end), 1e-3))
    return replace(how, calls=max(1, min(how.calls, calls)))


def _bound(way: Way, device: str, how: TimingConditions) -> Sequence[Callable[[], Any]]:
    """The way's computation on each of several sets of inputs."""
    import torch

    if way.kind == LIBRARY:
        from crossfuse.runtime import load

        kernel = load(Path(way.source), check_device=device == "cuda")
        return [partial(kernel.run, *each) for each in _sets(way.given, device, how)]
    if way.kind == GRAPH:
        module = torch.load(way.source, weights_only=False).to(device)
        run = _compiled(module, way.mode)
        return [partial(run, *each) for each in _sets(way.given, device, how)]
    if way.kind == PROGRAM:
        return _of_program(way, device, how)
    return _of_spec(way, device, how)


def _compiled(run: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    import torch

    if mode is None:
        return run
    # Of one function it compiles a few forms only, and here each workload is one more.
    torch.compiler.reset()
    # Its own CUDA graphs would be captured inside of ours.
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    return torch.compile(run, mode=modes.get(mode, mode), dynamic=False)


def _of_program(way: Way, device: str, how: TimingConditions) -> Sequence[Callable[[], Any]]:
    """An exported program on copies of its weights."""
    import torch
    from torch.func import functional_call

    module = torch.export.load(way.source).module().to(device)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    size = sum(each.nbytes for each in held.values())
    inputs = [_draw(each, 0, device, False) for each in way.given]
    copies = range(copies_needed(size, how.calls, how.l2))
    weights = [{name: each.detach().clone() for name, each in held.items()} for _ in copies]
    return [partial(functional_call, module, each, tuple(inputs)) for each in weights]


def _of_spec(way: Way, device: str, how: TimingConditions) -> Sequence[Callable[[], Any]]:
    """A workload as torch computes it, on copies of its inputs."""
    from crossfuse.bench.cascade_torch import formula
    from crossfuse.bench.cascades import draw_sets
    from crossfuse.bench.eager import eager
    from crossfuse.workload import cascades
    from crossfuse.workload.spec_text import parse

    if cascades.names_one(way.source):
        spec = cascades.parse(way.source)
        run = _compiled(formula("eager", spec), way.mode)
        return [partial(run, *each.values()) for each in draw_sets(how, spec, device)]
    chain = parse(way.source)
    variant = eager(chain, together=True)
    first, *rest = chain.operands
    a = _draw(Given(first.shape, first.dtype), 0, device, False)
    weights = {
        each.name: _draw(Given(each.shape, each.dtype), number, device, True)
        for number, each in enumerate(rest, 1)
    }
    size = sum(each.nbytes for each in weights.values())
    call = _compiled(variant.call, way.mode)
    copies = range(copies_needed(size, how.calls, how.l2))
    return [partial(call, a, *variant.pack(weights)) for _ in copies]


def _sets(given: Sequence[Given], device: str, how: TimingConditions) -> list[list[Any]]:
    """Several sets of inputs, so that cold ones are not in the L2 cache when they are read next."""
    warm = {at: _draw(each, at, device, at > 0) for at, each in enumerate(given) if not each.cold}
    first = {at: _draw(each, at, device, at > 0) for at, each in enumerate(given) if each.cold}
    count = copies_needed(sum(each.nbytes for each in first.values()), how.calls, how.l2)
    sets = [first, *({at: _copy(each) for at, each in first.items()} for _ in range(count - 1))]
    return [[(warm | each)[at] for at in range(len(given))] for each in sets]


def _copy(tensor: Any) -> Any:
    """A copy with the same strides."""
    import torch

    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _draw(each: Given, seed: int, device: str, weight: bool) -> Any:
    """A tensor of normal numbers; those of a weight are so small that sums are of order one."""
    import torch

    dtype = getattr(torch, each.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    if not dtype.is_floating_point:
        # Wider integers may be places in a tensor.
        values = torch.randint(0, 2, each.shape, device=device, generator=generator)
    else:
        scale = 1 / max(1, prod(each.shape[-1:])) ** 0.5 if weight else 1.0
        values = torch.randn(each.shape, device=device, generator=generator) * scale
    values = values.to(dtype)
    if not each.stride:
        return values
    strided = torch.empty_strided(each.shape, each.stride, dtype=dtype, device=device)
    return strided.copy_(values)


if __name__ == "__main__":
    main()
