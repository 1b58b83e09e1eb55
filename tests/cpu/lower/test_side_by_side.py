"""Nests that stand side by side in one launch: what becomes of them, and which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

from crossfuse import _tvm as ir
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.markers import SIDE_BY_SIDE

N = 256


def function(*, after: bool = False) -> Any:
    """Two outputs of an input; `after` makes the second of the first."""
    x = te.placeholder((N,), "float32", "x")
    one = te.compute((N,), lambda i: x(i) + 1, "one")
    source = one if after else x
    two = te.compute((N,), lambda i: source(N - 1 - i) * 2, "two")
    return te.create_prim_func([x, one, two])


def scheduled(func: Any, threads: tuple[int, int] = (32, 32)) -> Any:
    sch = ir.Schedule(func)
    for name, count in zip(("one", "two"), threads, strict=True):
        (loop,) = sch.get_loops(sch.get_sblock(name))
        outer, inner = sch.split(loop, [None, count])
        sch.bind(outer, "blockIdx.x")
        sch.bind(inner, "threadIdx.x")
    sch.annotate(sch.get_sblock("root"), SIDE_BY_SIDE, 1)
    return sch


def test_each_nest_has_ctas_of_its_own() -> None:
    image = lower(scheduled(function()), "nvidia-h100").image
    (launch,) = image.launches
    assert launch.grid == (16, 1, 1) and launch.block == (32, 1, 1)
    x = np.arange(N, dtype="float32")
    report = emulate(image, {"x": x})
    report.raise_if_wrong()
    np.testing.assert_array_equal(report.outputs["one"], x + 1)
    np.testing.assert_array_equal(report.outputs["two"], x[::-1] * 2)


def test_without_the_mark_they_are_kernels_one_after_another() -> None:
    sch = scheduled(function(after=True))
    sch.unannotate(sch.get_sblock("root"), SIDE_BY_SIDE)
    assert len(lower(sch, "nvidia-h100").image.launches) == 2


@pytest.mark.parametrize(
    ("sch", "said"),
    [
        (
            lambda: scheduled(function(), (32, 64)),
            r"nests of 8 blockIdx.x, 32 threadIdx.x and of 4 blockIdx.x, 64 threadIdx.x; limit: "
            r"CTAs along x, and threads alike",
        ),
        (
            lambda: scheduled(function(after=True)),
            r"found a nest that stores what another one uses; limit: nests that run at the same "
            r"time, in any order. Instead: leave the annotation out",
        ),
    ],
    ids=["threads", "one after another"],
)
def test_refused(sch: Any, said: str) -> None:
    with pytest.raises(LoweringRefused, match=said):
        lower(sch(), "nvidia-h100")
