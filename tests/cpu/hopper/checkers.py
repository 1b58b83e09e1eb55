"""Both checkers on a schedule of the Hopper pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CheckFailed
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload import WorkloadSpec, check, random_inputs


def passed(spec: WorkloadSpec, schedule: Any) -> KernelImage:
    """Run a schedule and its kernels; both must be clean and right."""
    inputs = random_inputs(spec)
    image = lower(schedule).image
    emulated(spec, image, inputs)
    sequential = run_sequential(schedule, inputs)
    sequential.raise_if_wrong()
    check(spec, inputs, sequential.outputs["out"])
    return image


def emulated(
    spec: WorkloadSpec, image: KernelImage, inputs: dict[str, Any], orders: int = 2
) -> None:
    """Run kernels on given inputs."""
    report = emulate(image, inputs, orders=orders)
    report.raise_if_wrong()
    # Others than those of a kernel that adds in no order are equal.
    for outputs in (report.outputs, *report.later):
        check(spec, inputs, outputs["out"])


def caught(spec: WorkloadSpec, image: KernelImage, kind: str | None) -> None:
    """Run a faulty kernel: a `kind` of fault is found; None: the result is wrong."""
    inputs = random_inputs(spec)
    if kind is None:
        with pytest.raises(CheckFailed):
            emulated(spec, image, inputs)
        return
    report = emulate(image, inputs, orders=3, max_findings=64)
    assert kind in {each.kind for each in report.findings}, report.findings
