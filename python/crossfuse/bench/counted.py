"""One computation between marks for the profiler: ``python -m crossfuse.bench.counted JOB``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossfuse.bench.job import Job
from crossfuse.errors import RefusedError
from crossfuse.files import read_text
from crossfuse.models import spec as models
from crossfuse.schema import read

#: Calls before the one that counts; compilers and autotuners have run by then.
WARMUPS = 3


def main() -> None:
    """Run the job whose file is named on the command line; a refusal goes to standard error."""
    job = read(Job, read_text(Path(sys.argv[1])))
    try:
        compute_once(job)
    except RefusedError as error:
        sys.exit(str(error))


def compute_once(job: Job, device: str = "cuda") -> None:
    """Warm up, bring the L2 cache into the job's state, and compute once between profiler marks.

    Nothing is checked: the worker has done that.
    """
    import torch

    from crossfuse.measure.timing import flusher

    with torch.no_grad():
        call = _call(job, device)
        for _ in range(WARMUPS):
            call()
        if job.l2 == "cold":
            flusher(device)()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _call(job: Job, device: str) -> Callable[[], Any]:
    """The computation of the job's chain, or its model, on inputs of its own."""
    if models.names_one(job.spec):
        from crossfuse.bench.models import way
        from crossfuse.models.zoo import build

        return way(job.variant, build(models.parse(job.spec), device))[0]
    from crossfuse.bench.variants import make
    from crossfuse.bench.worker import place
    from crossfuse.workload.inputs import random_inputs
    from crossfuse.workload.spec_text import parse

    spec = parse(job.spec)
    variant = make(job.variant, spec, device)
    a, (weights,) = place(variant, random_inputs(spec), 1, device)
    return lambda: variant.call(a, *weights)


if __name__ == "__main__":
    main()
