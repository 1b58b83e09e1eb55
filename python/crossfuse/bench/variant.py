"""One way to compute a workload, its measurement, and the refusal of a way that there is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import OWN, Job, Timing
from crossfuse.errors import RefusedError, WorkloadRefused, refuse

if TYPE_CHECKING:
    from crossfuse.measure.timing import Step
    from crossfuse.runtime.resources import ResourceUsage

#: Holds an output, or a tuple of outputs, against the rule: gives the largest error over the
#: allowed one and an empty message, or None and how the rule is broken.
Judge = Callable[[Any], tuple[float | None, str]]


def pack_apart(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Copy every weight as it is, in the order of the mapping."""
    return tuple(each.clone() for each in weights.values())


@dataclass(frozen=True)
class Variant:
    """One way to compute a workload on torch tensors."""

    #: Launches the computation on the current stream: ``call(A, *tensors of a set)``, of a cascade
    #: ``call(*inputs)``, gives the output or outputs, which a later call may overwrite.
    call: Callable[..., Any]
    #: What is run, for the record.
    note: str = ""
    #: What ptxas said of each kernel of ours; empty for a baseline.
    resources: tuple[ResourceUsage, ...] = ()
    #: Makes of the weights by name the tensors of one set, as `call` takes them.
    pack: Callable[[Mapping[str, Any]], tuple[Any, ...]] = pack_apart


def no_such(name: str, spec: object, limit: str, instead: str) -> RefusedError:
    """Build the refusal of a variant that a workload does not have, to be raised."""
    return refuse(WorkloadRefused, "bench", name, found=str(spec), limit=limit, instead=instead)


def measure_variant(
    job: Job,
    variant: Variant,
    bound: Sequence[Callable[[], Any]],
    judges: Sequence[Judge],
    device: str = "cuda",
    arrange: Callable[[Job, Sequence[Callable[[], Any]]], list[Step]] | None = None,
) -> Timing:
    """Check, time, and check again.

    `bound` is the computation on each set of inputs, see
    `crossfuse.measure.timing.copies_needed`, and `judges` know what is expected of each; sets that
    are equal have the same judge, which is not asked again of the same bits. Where a check failed
    the status is ``wrong``: a wrong kernel of ours has no time then, a baseline keeps the one that
    it has. `arrange` replaces `crossfuse.measure.timing.steps`.
    """
    import torch

    from crossfuse.measure.timing import measure, quietest, steps

    with torch.no_grad():
        for call in bound[1:]:
            call()
        # Later calls may overwrite it.
        first = _several(bound[0](), torch.Tensor.clone)
        worst, message = judges[0](first)
        if message and job.variant in OWN:
            return Timing("wrong", message, copies=len(bound), resources=variant.resources)
        timed = steps(job.how, bound) if arrange is None else arrange(job, bound)
        times = quietest(lambda: measure(job.how, timed, device))
        # Nothing of an earlier run may be taken for the result of the last one.
        _several(timed[-1].run(), _spoil)
        last, judge = timed[-1].run(), judges[timed[-1].last]
        known = judge is judges[0] and _same(first, last)
        after, late = (worst, message) if known else judge(last)
    found = Timing(
        "ok",
        variant.note,
        worst_before=worst,
        worst_after=after,
        copies=len(bound),
        calls=timed[0].calls,
        resources=variant.resources,
    )
    return found.judged(job, message or late, times)


def _several(outputs: Any, change: Callable[[Any], Any]) -> Any:
    return tuple(map(change, outputs)) if isinstance(outputs, tuple) else change(outputs)


def _spoil(output: Any) -> None:
    output.fill_(float("nan") if output.is_floating_point() else -1)


def _same(first: Any, last: Any) -> bool:
    """Whether two results are the same bits, so that one verdict holds for both."""
    import torch

    one, other = (each if isinstance(each, tuple) else (each,) for each in (first, last))
    return all(
        torch.equal(*(each.contiguous().view(torch.uint8) for each in pair))
        for pair in zip(one, other, strict=True)
    )
