"""Times of sums over GPUs: those of the record, and between them."""

from __future__ import annotations

import pytest

from crossfuse.planner.cost.estimate import nccl_sum, one_shot_sum


@pytest.mark.parametrize(("rows", "own", "library"), [(1, 5.4, 10.7), (16, 6.3, 11.9)])
def test_measured_sizes(rows: int, own: float, library: float) -> None:
    assert one_shot_sum(rows * 8192, 2) == pytest.approx(own)
    assert nccl_sum(rows * 8192) == pytest.approx(library)


def test_sizes_between_and_outside() -> None:
    assert one_shot_sum(16, 2) == one_shot_sum(8192, 2)
    assert one_shot_sum(96 << 10, 2) == pytest.approx((5.6 + 6.3) / 2)
    assert one_shot_sum(3 << 20, 2) == pytest.approx(15.4 + 4.7)


def test_each_gpu_loads_from_all_others() -> None:
    assert one_shot_sum(8192, 8) == one_shot_sum(7 * 8192, 2) < nccl_sum(8192)
    assert one_shot_sum(1 << 20, 8) > nccl_sum(1 << 20)
