"""Both checkers on a schedule of the Hopper pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CheckFailed
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload import WorkloadSpec, adversarial_inputs, check, random_inputs


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


#: Adversarial inputs that differ from random ones in the rows of A alone.
_OF_ROWS = ("large", "zero_rows", "constant_rows", "denormal", "one_hot")


def mixed_inputs(spec: WorkloadSpec, without: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Adversarial inputs, as few as a kernel needs to run on: each row of A is of another case.

    Rows do not meet in a product, and limits are those of each element.
    """
    cases = {each: dict(inputs) for each, inputs in adversarial_inputs(spec) if each not in without}
    name = spec.operands[0].name
    width = spec.operands[0].shape[-1]
    rows = [cases[each][name].reshape(-1, width) for each in _OF_ROWS if each in cases]
    if len(rows[0]) < 2 * len(rows) or spec.combine == "prod":
        yield from cases.values()
        return
    # Two rows of a case, then those of the next: every second row of one is zero.
    row = np.arange(len(rows[0]))
    mixed = np.stack(rows)[row // 2 % len(rows), row].reshape(cases["large"][name].shape)
    yield cases["large"] | {name: mixed}
    yield from (inputs for case, inputs in cases.items() if case not in _OF_ROWS)


def caught(spec: WorkloadSpec, image: KernelImage, kind: str | None) -> None:
    """Run a faulty kernel: a `kind` of fault is found; None: the result is wrong."""
    inputs = random_inputs(spec)
    if kind is None:
        with pytest.raises(CheckFailed):
            emulated(spec, image, inputs)
        return
    report = emulate(image, inputs, orders=3, max_findings=64)
    assert kind in {each.kind for each in report.findings}, report.findings
