"""Kernels that make rows for their product, on fewer rows than they were compiled for, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import crossfuse
from cpu.hopper.rows.products import of_spec, quantised, spec
from crossfuse.runtime.tensors import to_numpy, to_torch
from crossfuse.workload.cascade_numerics import check, random_inputs

CASES = {
    "warps": (spec(150, 512, 256), {"rows": 128, "columns": 32}),
    "warpgroups": (quantised(128, 512, 256), {"rows": 64, "columns": 32, "cluster": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_bits_of_all_and_nothing_else_is_written(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    given, tiles = CASES[name]
    schedule = of_spec(given, constant=True, **tiles)
    kernel = crossfuse.compile(schedule, fewer_rows=True, directory=tmp_path).kernel
    arrays = random_inputs(given, 1)
    x, *others = (torch.clone(to_torch(each).cuda()) for each in arrays.values())
    whole = kernel.run(x, *others)
    for rows in (1, 3, 63, 65, 100, given.tokens):
        behind = torch.full_like(whole, float("nan"))
        for _ in range(20):
            kernel(x[:rows], *others, behind[:rows])
            assert torch.equal(behind[:rows], whole[:rows]), rows
        assert torch.isnan(behind[rows:]).all(), rows
        few = {**arrays, "x": arrays["x"][:rows]}
        out = to_numpy(behind[:rows].cpu())
        check(replace(given, tokens=rows), few, {"out": out})
