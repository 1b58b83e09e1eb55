"""Rows that a kernel makes, of calls with fewer: the others are made of the last one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cpu.hopper.rows.products import of_spec, quantised, spec
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import ROW_COUNT, KernelImage
from crossfuse.workload.cascade_numerics import check, random_inputs
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu

#: Made by warps, and by warpgroups of a cluster that start before the kernel before has ended.
CASES: dict[str, tuple[CascadeSpec, dict[str, int], int]] = {
    "warps": (spec(70, 128, 16), {"rows": 64, "columns": 16}, 65),
    "warpgroups": (quantised(4, 256, 32), {"rows": 64, "columns": 16, "cluster": 2}, 1),
}


@cache
def made(name: str) -> tuple[Any, KernelImage]:
    given, tiles, _ = CASES[name]
    schedule = of_spec(given, constant=True, **tiles)
    schedule.accept_fewer_rows()
    return schedule, lower(schedule).image


def fewer(name: str, rows: int) -> dict[str, Any]:
    """Inputs of a call of some rows."""
    inputs = dict(random_inputs(CASES[name][0], 3))
    return {**inputs, "x": inputs["x"][:rows]}


@pytest.mark.parametrize("name", CASES)
def test_fewer_rows_are_right(name: str) -> None:
    """The schedule with NaNs in the place of the other rows, and the kernel without these."""
    given, _, rows = CASES[name]
    schedule, image = made(name)
    assert [each.name for each in image.buffers if each.rows] == ["x", "out"]
    assert ("int own_thread" in image.cuda) == (name == "warpgroups")
    sequential = run_sequential(schedule, fewer(name, rows))
    sequential.raise_if_wrong()
    report = emulate(image, fewer(name, rows), orders=1)
    report.raise_if_wrong()
    for outputs in (sequential.outputs, report.outputs):
        check(replace(given, tokens=rows), fewer(name, rows), outputs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_a_call_with_all(name: str) -> None:
    given, image = CASES[name][0], made(name)[1]
    whole = emulate(image, dict(random_inputs(given, 3)), orders=1).outputs["out"]
    for rows in {1, 3, 63, 65} & set(range(given.tokens)):
        report = emulate(image, fewer(name, rows), orders=2)
        report.raise_if_wrong()
        assert report.outputs["out"].tobytes() == whole[:rows].tobytes()


@pytest.mark.nightly
def test_rows_beyond_the_call_are_not_read() -> None:
    """Without the bound a row would be made of what the tensor does not have."""
    image = made("warps")[1]
    assert f"min(own_row, ({ROW_COUNT} - 1))" in image.cuda
    text = image.cuda.replace(f"min(own_row, ({ROW_COUNT} - 1))", "own_row")
    report = emulate(replace(image, cuda=text), fewer("warps", 65), orders=1)
    assert {each.kind for each in report.findings} == {"out-of-bounds"}


def test_chunks_are_of_all_rows() -> None:
    given = quantised(128, 512, 256)
    schedule = of_spec(given, rows=64, columns=128, cluster=1, chunk=256)
    schedule.accept_fewer_rows()
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule)
    assert str(caught.value) == (
        "crossfuse.rows: tensor 'quantised': found a left operand that is made in the kernel, "
        "chunk by chunk; limit: operands that the call passes, and rows that are made as a whole. "
        "Instead: take tiles without a chunk, or leave accept_fewer_rows out, and compile for each "
        "number of rows."
    )
