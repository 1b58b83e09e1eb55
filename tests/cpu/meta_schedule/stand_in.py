"""The process that measures, on a machine without a GPU: ``python stand_in.py``.

Everything is real but the kernel, which is torch's on the CPU, and the clock. A library whose file
name begins with ``hang``, ``die`` or ``wrong`` does that.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import crossfuse.runtime as runtime
from crossfuse.bench import variants
from crossfuse.bench.cascades import formula
from crossfuse.bench.problem import Problem, is_function
from crossfuse.bench.worker import Session
from crossfuse.measure import timing
from crossfuse.measure.job import Request, Timing
from crossfuse.measure.timer import serve_lines
from crossfuse.runtime.tensors import to_torch
from crossfuse.workload import parse


class Kernel:
    """Computes the workload that is measured, with the manifest of a library.

    Of a function without a spec it gives what the function gives on LLVM.
    """

    problem: Any

    def __init__(self, path: Path) -> None:
        self.manifest = runtime_load(path, check_device=False).manifest
        self.mood = path.name.partition("-")[0]

    def __call__(self, a: Any, *rest: Any) -> None:
        *weights, output = rest
        if self.mood == "hang":
            time.sleep(600)
        if self.mood == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if is_function(self.problem.what):
            output.copy_(to_torch(self.problem.limits.unfused))
        else:
            spec = parse(self.problem.what)
            plain = variants.make("eager", spec, "cpu")
            names = [each.name for each in spec.operands[1:]]
            output.copy_(plain.call(a, *plain.pack(dict(zip(names, weights, strict=True)))))
        if self.mood == "wrong":
            output.view(-1)[0] += 1

    def run(self, *inputs: Any) -> Any:
        """A cascade, by torch's plain formula."""
        if self.mood == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        found = formula("eager", self.problem.spec)(*inputs)
        return found + 1 if self.mood == "wrong" else found


runtime_load = runtime.load


class StandIn(Session):
    def measure(self, request: Request, problem: Problem) -> Timing:
        Kernel.problem = problem
        return super().measure(request, problem)


def clock(job: Any, timed: Any, device: str) -> list[float]:
    for each in timed:
        each.run()
    return [7.5] * job.repeats


if __name__ == "__main__":
    runtime.load = lambda path, check_device: Kernel(Path(path))
    timing.measure = clock
    timing.steps = lambda job, bound: [timing.Step(bound[0], 1)]
    serve_lines(StandIn("cpu").load)
