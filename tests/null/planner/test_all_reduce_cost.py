"""Times of sums over GPUs: those of the record, and between them."""

from __future__ import annotations

import pytest

from crossfuse.planner.cost.all_reduce import nccl, ours


@pytest.mark.parametrize(("rows", "own", "library"), [(1, 5.9, 10.4), (16, 8.0, 10.0)])
def test_measured_sizes(rows: int, own: float, library: float) -> None:
    assert ours(rows * 8192, 2) == pytest.approx(own)
    assert nccl(rows * 8192) == pytest.approx(library)


def test_sizes_between_and_outside() -> None:
    assert ours(16, 2) == ours(8192, 2)
    assert ours(80 << 10, 2) == pytest.approx((6.2 + 8.0) / 2)
    assert ours(2 << 20, 2) == pytest.approx(15.7 + 2 * 3.0)


def test_each_gpu_loads_from_all_others() -> None:
    assert ours(8192, 8) == ours(7 * 8192, 2) < nccl(8192)
    assert ours(512 << 10, 8) > nccl(512 << 10)
