"""Jobs in a process of their own: ``python -m crossfuse.bench.worker [FOLDER]``.

Serves a `crossfuse.measure.peer.Peer`. A request is a job; one that may not be measured yet is
prepared as far as that needs no GPU, so that it costs nothing when its turn comes. References are
kept in FOLDER between processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import Job, Timing
from crossfuse.errors import RefusedError
from crossfuse.measure.peer import Serve, serve_lines
from crossfuse.models import spec as models
from crossfuse.schema import typed
from crossfuse.workload import cascades

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.bench.problem import Problem
    from crossfuse.bench.variant import Variant
    from crossfuse.workload.cascade_spec import CascadeSpec
    from crossfuse.workload.spec import WorkloadSpec

_LONGEST = 600


def main() -> None:
    """Serve on standard input and output."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    serve_lines(lambda: jobs(folder))


def jobs(folder: Path | None = None) -> Serve:
    """Answer requests ``{"job": ..., "measure": ...}``, the latter a boolean.

    What is not to be measured yet is prepared, and answered by null.
    """
    prepared: dict[Job, Callable[[], Timing]] = {}

    def serve(request: Mapping[str, Any]) -> Any:
        job = typed(Job, request["job"])
        if job not in prepared:
            prepared[job] = prepare(job, folder)
        return asdict(prepared.pop(job)()) if request["measure"] else None

    return serve


def prepare(job: Job, folder: Path | None = None) -> Callable[[], Timing]:
    """Do what takes long and needs no GPU: imports, kernels of ours, the float64 reference.

    What it gives measures the job. Whatever goes wrong in Python is a timing too: ``refused`` where
    there is no such kernel or no GPU, ``failed`` for any other exception.
    """
    from crossfuse.bench.environment import require_gpu

    def prepared() -> Callable[[], Timing]:
        require_gpu()
        if models.names_one(job.spec):
            return _model(job)
        if cascades.names_one(job.spec):
            return _cascade(job)
        return _workload(job, folder)

    measured = _answered(prepared)
    if isinstance(measured, Timing):
        return lambda: measured
    return lambda: _answered(measured)


def _answered(step: Callable[[], Any]) -> Any:
    """What a step gives, or its refusal or exception as a timing."""
    try:
        return step()
    except RefusedError as error:
        return Timing("refused", str(error))
    except Exception as error:
        return Timing("failed", f"{type(error).__name__}: {error}"[:_LONGEST])


def _model(job: Job) -> Callable[[], Timing]:
    import crossfuse.models.zoo
    import crossfuse.torch.fuse_graph  # noqa: F401 -- what takes seconds to import
    from crossfuse.bench.models import measure_model

    return lambda: measure_model(job, models.parse(job.spec))


def _cascade(job: Job) -> Callable[[], Timing]:
    import torch  # noqa: F401

    from crossfuse.bench.cascades import measure_cascade
    from crossfuse.bench.variants import make

    spec = cascades.resolve(job.spec)
    _compile(job, spec)
    return lambda: measure_cascade(job, spec, make(job.variant, spec))


def _workload(job: Job, folder: Path | None) -> Callable[[], Timing]:
    import torch  # noqa: F401

    from crossfuse.bench.problem import make_problem
    from crossfuse.workload.spec_text import parse

    spec = parse(job.spec)
    _compile(job, spec)
    problem = make_problem(spec, folder)
    return lambda: measure_job(job, problem)


def _compile(job: Job, spec: WorkloadSpec | CascadeSpec) -> None:
    """Compile the kernels of a job into the cache."""
    from crossfuse.bench.ours import compile_kernel, kernels
    from crossfuse.hardware import device

    target = device().name
    for kernel in kernels(job.variant, spec):
        compile_kernel(*kernel, target)


def measure_job(job: Job, problem: Problem | None = None, device: str = "cuda") -> Timing:
    """Check, time, and check again a chain; see `crossfuse.bench.variant.measure_variant`.

    Without a problem it is made here.
    """
    from crossfuse.bench.problem import make_problem
    from crossfuse.bench.variant import measure_variant
    from crossfuse.bench.variants import make
    from crossfuse.measure.timing import copies_needed
    from crossfuse.workload.spec_text import parse

    spec = parse(job.spec)
    problem = problem or make_problem(spec)
    variant = make(job.variant, spec, device)
    copies = copies_needed(problem.weight_bytes, job.calls, job.l2)
    a, packed = place(variant, problem.inputs, copies, device)
    bound = [partial(variant.call, a, *each) for each in packed]
    return measure_variant(job, variant, bound, [problem.judge] * copies, device)


def place(
    variant: Variant, inputs: Mapping[str, np.ndarray], copies: int, device: str
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Copy inputs to the device: the first one, and several sets of the others, packed."""
    from crossfuse.runtime.tensors import to_torch

    a, *weights = (to_torch(array).to(device) for array in inputs.values())
    by_name = dict(zip(list(inputs)[1:], weights, strict=True))
    return a, [variant.pack(by_name) for _ in range(copies)]


if __name__ == "__main__":
    main()
