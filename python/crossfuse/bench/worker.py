"""The program that measures, whatever asks for it: ``python -m crossfuse.bench.worker [GPU]``.

It serves a `crossfuse.measure.timer.Measurer`: jobs of the bench, kernels of a search or of a
bundle that are checked against float64, and ways of a measured choice, of which nothing but the
time is wanted. A request is a `crossfuse.measure.job.Request`. One that is not to be measured yet
is prepared, and answered by null; the answer to others is a `crossfuse.measure.job.Timing`, also
where something goes wrong in Python. GPU is an index of CUDA.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from crossfuse.bench import environment
from crossfuse.bench.cascades import CascadeProblem
from crossfuse.bench.job import OWN, Variant
from crossfuse.bench.models import ModelProblem
from crossfuse.bench.problem import (
    DrawnProblem,
    Problem,
    function_problem,
    is_function,
    make_problem,
)
from crossfuse.bench.variants import compile_kernel, kernels
from crossfuse.errors import RefusedError
from crossfuse.hardware import device as find_device
from crossfuse.measure.job import LIBRARY, PROGRAM, SPEC, Job, Request, Timing, Way
from crossfuse.measure.timer import Serve, serve_lines
from crossfuse.measure.timing import Step, TimingConditions
from crossfuse.models import spec as models
from crossfuse.schema import typed
from crossfuse.workload import cascades
from crossfuse.workload.suites import parse

_LONGEST = 1000
#: Milliseconds between two timestamps of what nobody named a number of calls for; a single call may
#: take longer.
_LONGEST_STEP = 5.0

T = TypeVar("T")


def main() -> None:
    """Serve until standard input ends."""
    session = Session(index=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    serve_lines(session.load)


class Session:
    """Answers requests; of the workload that was prepared last inputs and reference are kept."""

    def __init__(self, device: str = "cuda", index: int = 0) -> None:
        self._device, self._index = device, index
        self._kept: tuple[Any, Problem | Timing] | None = None

    def load(self) -> Serve:
        """Import what takes long, without the GPU; gives what answers requests."""
        import tvm_ffi  # noqa: F401

        import crossfuse.runtime  # noqa: F401

        # Without it the first job is refused.
        with suppress(ImportError):
            import torch  # noqa: F401
        return self.serve

    def serve(self, value: Any) -> Any:
        """Answer a request as JSON has it."""
        request = typed(Request, value)
        if request.measure:
            return asdict(self.answer(request))
        self._kept = None
        self._free()
        self._kept = _workload(request), self._prepared(request)
        return None

    def answer(self, request: Request) -> Timing:
        """The timing of a job, whose workload is prepared here if it was not before.

        The status is ``refused`` where there is no such kernel or no GPU, ``failed`` for any other
        exception.
        """
        kept = self._kept if request.job is not None else None
        known = kept is not None and kept[0] == _workload(request)
        problem = kept[1] if kept is not None and known else self._prepared(request)
        if isinstance(problem, Timing):
            return problem
        try:
            return _answered(partial(self.measure, request, problem))
        finally:
            if not known:
                # The next one may need all of the memory.
                self._free()

    def measure(self, request: Request, problem: Problem) -> Timing:
        """Check, time, and check again; without a job times are of a cold cache and a graph."""
        import torch

        job = request.job
        if self._device == "cuda":
            torch.cuda.set_device(self._index)
        with torch.no_grad():
            variant = _variant(request, problem, self._device)
            how = TimingConditions() if job is None else job.how
            own = job is not None and job.variant in OWN
            return measure_variant(variant, problem, how, self._device, own=own)

    def _prepared(self, request: Request) -> Problem | Timing:
        """What takes long and needs no GPU: kernels of ours, inputs, the float64 reference."""

        def prepare() -> Problem:
            if self._device == "cuda":
                environment.require_gpu()
            if request.job is not None and request.way is None:
                _compile(request.job)
            return _problem(request)

        return _answered(prepare, "while it was prepared: ")

    def _free(self) -> None:
        """Free the GPU memory of tensors that are no more."""
        torch = sys.modules.get("torch")
        if self._device == "cuda" and torch is not None:
            torch.cuda.empty_cache()


def _workload(request: Request) -> tuple[str, str] | None:
    return None if request.job is None else (request.job.spec, request.folder)


def _answered(step: Callable[[], T], when: str = "") -> T | Timing:
    """What a step gives, or its refusal or exception as a timing."""
    try:
        return step()
    except RefusedError as error:
        return Timing("refused", str(error))
    except Exception as error:
        return Timing("failed", f"{when}{type(error).__name__}: {error}"[:_LONGEST])


def _compile(job: Job) -> None:
    """Compile the kernels of a job into the cache."""
    if models.names_one(job.spec):
        return
    target = find_device().name
    for kernel in kernels(job.variant, cascades.resolve_any(job.spec)):
        compile_kernel(*kernel, target)


def problem_of(text: str, folder: Path | None = None, *, checked: bool = True) -> Problem:
    """Inputs of a workload, by its text or the name of a function, and what is expected of results.

    References, and functions, lie in the folder. Of a cascade and of a model inputs are drawn on
    the GPU, and results worked out there, when it is measured.
    """
    if models.names_one(text):
        import crossfuse.models.zoo
        import crossfuse.torch.fuse_graph  # noqa: F401 -- what takes seconds to import

        return ModelProblem(models.parse(text), checked)
    if cascades.names_one(text):
        return CascadeProblem(cascades.resolve(text), checked)
    if is_function(text):
        assert folder is not None
        return function_problem(text, folder)
    spec = parse(text)
    return make_problem(spec, folder) if checked else DrawnProblem.of(spec)


def _problem(request: Request) -> Problem:
    if request.job is not None:
        return problem_of(request.job.spec, Path(request.folder) if request.folder else None)
    assert request.way is not None
    if request.way.kind == SPEC:
        return problem_of(request.way.source, checked=False)
    return DrawnProblem({str(at): each for at, each in enumerate(request.way.given)})


def _variant(request: Request, problem: Problem, device: str) -> Variant:
    """What computes the problem."""
    import torch

    way = request.way
    if way is None:
        assert request.job is not None
        return problem.variant(request.job.variant, device)
    if way.kind == LIBRARY:
        from crossfuse.runtime import load

        return problem.library(load(Path(way.source), check_device=device == "cuda"), device)
    if way.kind == PROGRAM:
        return _program(way, device)
    if way.kind == SPEC:
        plain = problem.variant("eager", device)
        return replace(plain, call=_compiled(plain.call, way.mode))
    module = torch.load(way.source, weights_only=False).to(device)
    return Variant(_compiled(module, way.mode))


def _compiled(run: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    import torch

    if mode is None:
        return run
    # Of one function it compiles a few forms only, and here each workload is one more.
    torch.compiler.reset()
    # Its own CUDA graphs would be captured inside of ours.
    modes = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    return torch.compile(run, mode=modes.get(mode, mode), dynamic=False)


def _program(way: Way, device: str) -> Variant:
    """An exported program, whose weights are arguments so that there may be several sets."""
    import torch
    from torch.func import functional_call

    module = torch.export.load(way.source).module().to(device)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    count = len(way.given)

    def call(*tensors: Any) -> Any:
        weights = dict(zip(held, tensors[count:], strict=True))
        return functional_call(module, weights, tensors[:count])

    return Variant(call, weights=tuple(each.detach() for each in held.values()))


def measure_variant(
    variant: Variant, problem: Problem, how: TimingConditions, device: str, *, own: bool
) -> Timing:
    """Check, time, and check again one way to compute a problem.

    Where a check failed the status is ``wrong``: an `own` kernel has no time then, a baseline keeps
    the one that it has.
    """
    import torch

    from crossfuse.measure import timing

    bound = problem.bind(variant, how, device)
    how, calls, judges = bound.how, bound.calls, bound.judges
    for call in calls[1:]:
        call()
    first = calls[0]()
    found = Timing("ok", variant.note, copies=len(calls), resources=variant.resources)
    if judges:
        # Later calls may overwrite it.
        first = _several(first, torch.Tensor.clone)
        worst, message = judges[0](first)
        if message and own:
            return replace(found, status="wrong", message=message)
    else:
        how = _within(how, calls[0], device)
    timed, note = _arranged(variant, how, calls)
    times = timing.quietest(lambda: timing.measure(how, timed, device))
    found = replace(found, message=found.message + note, calls=timed[0].calls)
    if judges:
        # Nothing of an earlier run may be taken for the result of the last one.
        _several(timed[-1].run(), _spoil)
        last, judge = timed[-1].run(), judges[timed[-1].last]
        known = judge is judges[0] and _same(first, last)
        after, late = (worst, message) if known else judge(last)
        found = replace(found, worst_before=worst, worst_after=after)
        if wrong := message or late:
            found = replace(found, status="wrong", message=wrong)
            if own:
                return found
    return replace(found, microseconds=statistics.median(times), minimum=min(times))


def _arranged(
    variant: Variant, how: TimingConditions, calls: Sequence[Callable[[], Any]]
) -> tuple[list[Step], str]:
    """Steps to time, and why they are no CUDA graphs where those were asked for."""
    from crossfuse.measure.timing import steps

    try:
        return steps(how, calls), ""
    except RuntimeError as error:
        if not variant.streams or how.protocol != "graph":
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return steps(replace(how, protocol="stream"), calls), f"; no CUDA graph: {line}"


def _within(how: TimingConditions, call: Callable[[], Any], device: str) -> TimingConditions:
    """Conditions with so few calls between two timestamps that slow ones do not take minutes."""
    from crossfuse.measure.timing import elapsed

    if device != "cuda":
        return how
    calls = int(_LONGEST_STEP / max(elapsed(call), 1e-3))
    return replace(how, calls=max(1, min(how.calls, calls)))


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


if __name__ == "__main__":
    main()
