"""Measures in this process: candidates of one workload share its inputs and its reference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.bench.cascades import measure_cascade
from crossfuse.bench.job import Job, Timing
from crossfuse.bench.variant import Variant, measure_variant
from crossfuse.bench.worker import place
from crossfuse.errors import RefusedError
from crossfuse.measure.timing import copies_needed
from crossfuse.planner.families import EAGER
from crossfuse.schema import typed
from crossfuse.workload.cascade_spec import CascadeSpec

if TYPE_CHECKING:
    from crossfuse.bench.problem import Problem

_LONGEST = 1000


class Session:
    """The workload that was prepared last, and its tensors on the device."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._problem: Problem | CascadeSpec | None = None
        self._placed: dict[tuple[bool, int], tuple[Any, list[tuple[Any, ...]]]] = {}

    def load(self) -> None:
        """Import what takes long; no GPU is needed yet."""
        import torch
        import tvm_ffi  # noqa: F401

        import crossfuse.bench.problem
        import crossfuse.measure.timing
        import crossfuse.runtime  # noqa: F401

        torch.set_grad_enabled(False)

    def serve(self, request: Mapping[str, Any]) -> Any:
        """Answer a request; whatever goes wrong in Python is an answer too.

        ``{"do": "prepare", "spec", "folder"}`` draws inputs and loads or computes the reference,
        without the GPU; the spec may be a function that lies in the folder, see
        `crossfuse.meta_schedule.functions`. The answer is ``{"message"}``, empty if all is well.
        ``{"do": "measure", "family", "library", "job"}`` measures a candidate of that workload; the
        answer is its timing.
        """
        if request["do"] == "prepare":
            return {"message": self._prepare(request["spec"], Path(request["folder"]))}
        job = typed(Job, request["job"])
        try:
            found = self.measure(job, request["family"], Path(request["library"]))
        except RefusedError as error:
            found = Timing("refused", str(error)[:_LONGEST])
        except Exception as error:
            found = Timing("failed", f"{type(error).__name__}: {error}"[:_LONGEST])
        return asdict(found)

    def measure(self, job: Job, family: str, library: Path) -> Timing:
        """Check a candidate of the prepared workload against float64, time it, and check it again.

        Where a check failed it is ``wrong``, without a time unless it is a baseline.
        """
        problem = self._problem
        assert problem is not None
        variant = self._variant(family, library, problem)
        if isinstance(problem, CascadeSpec):
            return measure_cascade(job, problem, variant, self._device)
        copies = copies_needed(problem.weight_bytes, job.calls, job.l2)
        key = (family == EAGER, copies)
        if key not in self._placed:
            self._placed.clear()
            self._placed[key] = place(variant, problem.inputs, copies, self._device)
        a, packed = self._placed[key]
        bound = [partial(variant.call, a, *each) for each in packed]
        return measure_variant(job, variant, bound, [problem.judge] * copies, self._device)

    def _prepare(self, spec: str, folder: Path) -> str:
        from crossfuse.meta_schedule.functions import problem_of

        self._problem, self._placed = None, {}
        _forget()
        try:
            self._problem = problem_of(spec, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:_LONGEST]
        return ""

    def _variant(self, family: str, library: Path, problem: Problem | CascadeSpec) -> Variant:
        if family == EAGER:
            from crossfuse.bench.variants import make
            from crossfuse.workload.spec_text import parse

            spec = problem if isinstance(problem, CascadeSpec) else parse(problem.what)
            return make("eager", spec, self._device)
        from crossfuse.bench.ours import loaded, returning
        from crossfuse.runtime import load

        kernel = load(library, check_device=self._device == "cuda")
        if isinstance(problem, CascadeSpec):
            return returning(kernel)
        return loaded(kernel, problem.output, problem.dtype, self._device)


def _forget() -> None:
    """Free the GPU memory that tensors of the workload before took."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
