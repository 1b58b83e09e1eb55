"""Rows in registers that end within a batch of a thread: its loads are in order, and right."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.extract import lower
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from crossfuse.workload.cascades import resolve


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=3,cols=5128",
        "layernorm:rows=3,cols=5128",
        "log_softmax:rows=3,cols=5128,dtype=float16",
    ],
)
def test_rows_of_any_length(text: str, cluster: int) -> None:
    spec = resolve(text)
    tiles = StreamTiles(128, unroll=8 // cluster, cluster=cluster, resident="registers")
    found = lower(schedule_cascade_of(prim_func(spec), "stream", vars(tiles)))
    assert "crossfuse_load_in_order(" in found.image.cuda
    usual = random_inputs(spec)
    cases = {**dict(adversarial_inputs(spec)), "usual": usual}
    (name, x), *_ = usual.items()
    noise = np.random.default_rng(0).standard_normal(x.shape)
    for key, values in {"close": 1e4 + 1e-2 * noise, "equal": np.full(x.shape, 100.0)}.items():
        cases[key] = {**usual, name: values.astype(x.dtype)}
    for key, inputs in cases.items():
        report = emulate(found.image, inputs, orders=1)
        report.raise_if_wrong()
        for checked in check(spec, inputs, report.outputs).values():
            assert checked.worst <= 1, key
