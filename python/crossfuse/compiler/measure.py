"""Timing of a compiled kernel on this machine's GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.measure.timing import TimingConditions, measure, quietest, steps
from crossfuse.runtime.tensors import to_torch

if TYPE_CHECKING:
    from crossfuse.compiler.compiled import Compiled
    from crossfuse.compiler.problem import Problem

RUNS = 30
#: One call at a time, on one set of inputs: nothing of it is in the L2 cache, which is flushed.
ONE_CALL = TimingConditions(repeats=RUNS, calls=1)


@dataclass(frozen=True)
class Timing:
    """Median time of one run with a cold L2 cache, replayed from a CUDA graph."""

    #: Median over the runs.
    microseconds: float
    #: The same for the torch module in eager mode, where the source is one.
    baseline: float | None
    #: Name of the GPU.
    device: str
    #: Number of timed runs.
    runs: int


@checked
def time_kernel(compiled: Compiled, problem: Problem) -> Timing:
    """Time a kernel, and the torch module it came from, on the same inputs.

    Parameters
    ----------
    compiled : Compiled
        The kernel.
    problem : Problem
        Its inputs, see `crossfuse.compiler.problem.make_problem`.

    Returns
    -------
    Timing
        Medians in microseconds.

    Raises
    ------
    EnvironmentRefused
        Without torch or a CUDA device.

    Examples
    --------
    >>> import crossfuse
    >>> from crossfuse.compiler.problem import make_problem
    >>> kernel = crossfuse.compile("S8")  # doctest: +SKIP
    >>> problem = make_problem(kernel.source, kernel.schedule)  # doctest: +SKIP
    >>> time_kernel(kernel, problem)  # doctest: +SKIP
    """
    torch = _torch()
    buffers = compiled.lowered.image.buffers
    tensors = [
        torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="cuda")
        if each.output
        else to_torch(problem.inputs[each.name]).cuda()
        for each in buffers
    ]
    fused = median_microseconds(lambda: compiled.kernel(*tensors))
    baseline = None
    if compiled.source.module is not None:
        import copy

        module = copy.deepcopy(compiled.source.module).cuda()
        inputs = [each for each, spec in zip(tensors, buffers, strict=True) if not spec.output]
        with torch.no_grad():
            baseline = median_microseconds(lambda: module(inputs[0]))
    return Timing(fused, baseline, torch.cuda.get_device_name(), RUNS)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        found = "no torch"
    else:
        if torch.cuda.is_available():
            return torch
        found = "no CUDA device"
    raise refuse(
        EnvironmentRefused,
        "measure",
        "this machine",
        found=found,
        limit="torch and a GPU of compute capability 9.0",
        instead="run the command on such a machine; the checks above need none",
    )


def median_microseconds(run: Callable[[], Any]) -> float:
    """Median microseconds of a CUDA graph of one call, the L2 cache flushed before each replay.

    `run` launches on torch's current stream; it is called once before it is captured.
    """
    torch = _torch()
    run()
    torch.cuda.synchronize()
    timed = steps(ONE_CALL, [run])
    return statistics.median(quietest(lambda: measure(ONE_CALL, timed)))
