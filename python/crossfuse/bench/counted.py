"""One computation between marks for the profiler: ``python -m crossfuse.bench.counted JOB``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from crossfuse.bench.worker import problem_of
from crossfuse.errors import RefusedError
from crossfuse.files import read_text
from crossfuse.measure.job import Job
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

    problem = problem_of(job.spec, checked=False)
    with torch.no_grad():
        one_set = replace(job.how, l2="hot")
        variant = problem.variant(job.variant, device)
        call = problem.bind(variant, one_set, device).calls[0]
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
