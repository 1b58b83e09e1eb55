"""The sequential check merges states of threads in pairs, as kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.emulate.serialise import serialise
from crossfuse.lower.extract import lower
from crossfuse.schedule.planned import schedule_cascade

pytestmark = pytest.mark.cpu
ROWS, COLUMNS = 2, 4096


def two_sums() -> Any:
    """Sums of elements and of magnitudes, in which nothing is contracted."""
    x = te.placeholder((ROWS, COLUMNS), "float32", "x")
    k, n = (te.reduce_axis((0, COLUMNS), name) for name in "kn")
    total = te.compute((ROWS,), lambda i: te.sum(x[i, k], axis=k), name="total")
    size = te.compute((ROWS,), lambda i: te.sum(te.abs(x[i, n]), axis=n), name="size")
    return te.create_prim_func([x, total, size])


@pytest.mark.parametrize("threads, cluster", [(1, 1), (64, 1), (256, 1), (32, 2)])
def test_the_same_bits_as_a_kernel(threads: int, cluster: int) -> None:
    (site,) = detect(two_sums())
    tiles = StreamTiles(threads=threads, unroll=2, cluster=cluster)
    schedule = schedule_cascade(site, derive(site.cascade), "stream", vars(tiles))
    x = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[1] = 0.1
    report = run_sequential(schedule, {"x": x})
    assert report.ok
    kernel = emulate(lower(schedule).image, {"x": x}).outputs
    for name, each in report.outputs.items():
        assert each.tobytes() == kernel[name].tobytes()
    if threads > 1:
        # One after the other, 256 states of equal elements are 30 units off.
        exact = np.float64(x[1, 0]) * COLUMNS
        assert abs(report.outputs["total"][1] - exact) <= 8 * np.spacing(np.float32(exact))


def test_one_thread_has_nothing_to_merge() -> None:
    (site,) = detect(two_sums())
    schedule = schedule_cascade(
        site, derive(site.cascade), "stream", vars(StreamTiles(threads=1, unroll=1))
    )
    assert "own" not in serialise(schedule.mod["main"]).script()
