"""Times of collectives over GPUs: those of the record, and between them; products in parts."""

from __future__ import annotations

import pytest

from crossfuse.hardware import device
from crossfuse.planner.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    CollectiveTimes,
    gathered_in_parts,
    product,
    scattered_in_parts,
    shares,
)
from crossfuse.planner.cost.rates import rates_of


@pytest.mark.parametrize("times", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER])
def test_measured_sizes(times: CollectiveTimes) -> None:
    for size, own, library in times.points:
        assert times.kernels(size, 2) == pytest.approx(own)
        assert times.nccl(size) == pytest.approx(library)


def test_sizes_between_and_outside() -> None:
    times = CollectiveTimes(((100, 5.0, 10.0), (200, 6.0, 14.0), (300, 9.0, 20.0)))
    assert times.kernels(1, 2) == 5.0
    assert times.kernels(150, 2) == 5.5
    assert times.nccl(400) == 26.0


def test_each_gpu_loads_from_all_others() -> None:
    assert ALL_REDUCE.kernels(8192, 8) == ALL_REDUCE.kernels(7 * 8192, 2) < ALL_REDUCE.nccl(8192)
    assert ALL_REDUCE.kernels(1 << 20, 8) > ALL_REDUCE.nccl(1 << 20)
    # Of a sum that is scattered only a slice.
    assert REDUCE_SCATTER.kernels(1 << 20, 4) == REDUCE_SCATTER.kernels(3 << 19, 2)


@pytest.mark.parametrize(("rows", "in_parts"), [(128, False), (256, False), (1024, True)])
def test_products_in_parts_pay_for_many_rows(rows: int, in_parts: bool) -> None:
    """Of few rows each part reads all weights again."""
    spec = device("nvidia-h200")
    rates = rates_of(spec)

    def of(count: int, columns: int, depth: int) -> float:
        return product(count, columns, depth, 2, rates, spec.sms)

    size, part, whole = rows // 2 * 8192, of(rows // 2, 6656, 4096), of(rows, 6656, 4096)
    apart = whole + min(ALL_GATHER.kernels(size, 2), ALL_GATHER.nccl(size))
    assert (gathered_in_parts(part, size, 2) < apart) == in_parts
    size, part, whole = rows * 8192, of(rows // 2, 4096, 14336), of(rows, 4096, 14336)
    apart = whole + min(REDUCE_SCATTER.kernels(size, 2), REDUCE_SCATTER.nccl(size))
    assert (scattered_in_parts(part, size, 2, rates) < apart) == in_parts


@pytest.mark.parametrize(
    ("elements", "item", "pay"),
    [
        (4096, 2, True),
        (33, 4, True),
        (4096 * 8192, 2, True),
        (1001 * 4096, 2, True),
        (50257, 2, False),  # 29 times a prime number
        (8 * 10007, 2, False),  # a prime number of parts
        (509, 2, True),
        (131 * 8192, 2, True),
    ],
)
def test_tensors_that_ctas_share(elements: int, item: int, pay: bool) -> None:
    found = shares(elements, item, 132)
    assert found.vector * found.threads * found.steps * found.ctas == elements
    assert found.vector * item <= 16 and found.threads <= 1024
    assert found.pay == pay and found.ctas <= 128


def test_fewer_multiprocessors_have_fewer_ctas() -> None:
    found = shares(1 << 20, 2, 78)
    assert (found.ctas, found.threads, found.steps) == (64, 1024, 2)
