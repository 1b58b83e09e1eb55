"""One computation between marks for the profiler: ``python -m crossfuse.bench.counted JOB``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from crossfuse.bench.job import Job
from crossfuse.errors import RefusedError

#: Calls before the one that counts; compilers and autotuners have run by then.
WARMUPS = 3


def main() -> None:
    """Run the job of the file that is named; a refusal goes to standard error."""
    job = Job.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        compute_once(job)
    except RefusedError as error:
        sys.exit(str(error))


def compute_once(job: Job, device: str = "cuda") -> None:
    """Warm up, bring the L2 cache into the job's state, and compute once between the marks.

    Parameters
    ----------
    job : Job
        What to compute. Nothing is checked: the worker has done that.
    device : str
        Where the tensors are.

    Raises
    ------
    WorkloadRefused, ScheduleRefused, LoweringRefused
        Where there is no such kernel.
    """
    import torch

    from crossfuse.bench.timing import flusher
    from crossfuse.bench.variants import make
    from crossfuse.bench.worker import bind
    from crossfuse.workload.inputs import random_inputs
    from crossfuse.workload.spec_text import parse

    spec = parse(job.spec)
    with torch.no_grad():
        (call,) = bind(make(job.variant, spec, device), random_inputs(spec), 1, device)
        for _ in range(WARMUPS):
            call()
        if job.l2 == "cold":
            flusher(device)()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
