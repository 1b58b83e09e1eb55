"""Standard scores of rows beside rows of infinities: the same bits, within the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.lower.extract import lower
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.tolerances import judge, plain_tolerance

ROWS, LENGTH = 32, 257


def scores() -> Any:
    """``(x - mean) / deviation`` without an epsilon."""
    x = te.placeholder((ROWS, LENGTH), "float32", name="X")
    k, n = te.reduce_axis((0, LENGTH), "k"), te.reduce_axis((0, LENGTH), "n")
    count = tirx.const(float(LENGTH), "float32")
    total = te.compute((ROWS,), lambda i: te.sum(x[i, k], axis=k), name="total")

    def apart(i: Any, j: Any) -> Any:
        return x[i, j] - total[i] / count

    m2 = te.compute((ROWS,), lambda i: te.sum(apart(i, n) * apart(i, n), axis=n), name="m2")
    shape = (ROWS, LENGTH)
    y = te.compute(shape, lambda i, j: apart(i, j) / te.sqrt(m2[i] / count), name="Y")
    return te.create_prim_func([x, y])


def separate(x: np.ndarray) -> np.ndarray:
    mean = x.sum(axis=1, keepdims=True) / x.dtype.type(LENGTH)
    apart = x - mean
    return apart / np.sqrt((apart * apart).sum(axis=1, keepdims=True) / x.dtype.type(LENGTH))


@pytest.mark.parametrize("threads", [4, 64])
def test_a_row_of_infinities_beside_changes_no_bit(threads: int) -> None:
    """Of single rows the error may be several times that of separate passes, which is a few units.

    What no kernel can avoid is of that size: the order of sums, and the rounding of results.
    """
    tiles = StreamTiles(threads, unroll=1, rows=2, resident="registers")
    image = lower(schedule_cascade_of(scores(), "stream", vars(tiles))).image
    usual = np.random.default_rng(0).standard_normal((ROWS, LENGTH)).astype(np.float32)
    beside = usual.copy()
    beside[1::2] = -np.inf
    found = [emulate(image, {"X": each}, orders=1).outputs["Y"] for each in (usual, beside)]
    assert found[0][::2].tobytes() == found[1][::2].tobytes()
    assert np.isnan(found[1][1::2]).all()
    limits = plain_tolerance(separate(usual.astype(np.float64)), separate(usual), LENGTH)
    assert judge(limits, found[0], "scores").worst <= 1
