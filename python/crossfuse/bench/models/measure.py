"""Measures one model in this process: checked against float64, timed, and checked again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import OWN, Job, Timing
from crossfuse.bench.models.ways import way
from crossfuse.errors import CheckFailed
from crossfuse.models.spec import ModelSpec
from crossfuse.models.widths import Widths

if TYPE_CHECKING:
    from crossfuse.measure.timing import Step
    from crossfuse.models.zoo import Built
    from crossfuse.workload.tolerances import Tolerance


def measure_model(job: Job, spec: ModelSpec, device: str = "cuda", **options: Any) -> Timing:
    """Check, time, and check again a variant of a model; `options` are those of `way`.

    There is one set of weights, and one call between two timestamps: weights of layers are more
    than the L2 cache holds, and a cold cache is flushed before each call. A model that no CUDA
    graph takes is launched without one, and the note says so. After a failed check ours has no
    time, a baseline keeps the one it has.
    """
    import torch

    from crossfuse.measure.timing import measure, quietest
    from crossfuse.models.zoo import build

    job = replace(job, calls=1)
    with torch.no_grad():
        built = build(spec, device)
        limits = tolerance(built)
        call, note = way(job.variant, built, **options)
        first = call().clone()
        worst, message = judge(limits, first, spec)
        if message and job.variant in OWN:
            return Timing("wrong", message, copies=1)
        timed, reason = _steps(job, call)
        times = quietest(lambda: measure(job, timed, device))
        # Nothing of an earlier run may be taken for the result of the last one.
        timed[-1].run().fill_(float("nan"))
        after, late = judge(limits, timed[-1].run(), spec)
    note = f"{note}; no CUDA graph: {reason}" if reason else note
    found = Timing("ok", note, worst_before=worst, worst_after=after, copies=1, calls=1)
    return found.judged(job, message or late, times)


def tolerance(built: Built) -> Tolerance:
    """Allowed error of a variant of a model: twice that of eager torch in the same type."""
    import torch

    from crossfuse.runtime.tensors import to_numpy
    from crossfuse.workload.tolerances import plain_tolerance

    with torch.no_grad():
        eager = to_numpy(built.module(*built.inputs))
    return plain_tolerance(to_numpy(built.exact()), eager, _depth(built.spec))


def judge(limits: Tolerance, output: Any, spec: ModelSpec) -> tuple[float | None, str]:
    """Hold a result against the rule.

    Gives the largest error over the allowed one and an empty message, or None and a message that
    names the spec and says how the rule is broken.
    """
    from crossfuse.runtime.tensors import to_numpy
    from crossfuse.workload.accuracy import judge as judge_output

    try:
        return judge_output(limits, to_numpy(output), str(spec)).worst, ""
    except CheckFailed as error:
        return None, str(error)


def _depth(spec: ModelSpec) -> int:
    """Terms of the longest sum of the model."""
    widths = spec.widths
    return widths.intermediate if isinstance(widths, Widths) else 9 * max(widths.channels)


def _steps(job: Job, call: Callable[[], Any]) -> tuple[list[Step], str]:
    """What is timed, and why it is no graph where one was asked for; empty if it is one."""
    from crossfuse.measure.timing import steps

    try:
        return steps(job, [call]), ""
    except RuntimeError as error:
        if job.protocol != "graph":
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        return steps(replace(job, protocol="stream"), [call]), lines[0]
