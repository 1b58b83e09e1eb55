"""Times of collectives over GPUs: those of the record, and between them; products in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import device
from crossfuse.planner.cost.collectives import (
    gathered_in_parts,
    product,
    scattered_in_parts,
    shares,
)
from crossfuse.planner.cost.rank_rates import (
    MEASURED,
    CollectiveTimes,
    load_ranks,
    rank_rates,
    rank_record_path,
)
from crossfuse.planner.cost.rates import rates_of

H200 = rank_rates("nvidia-h200", 2)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_sizes(name: str) -> None:
    times = H200.times(name)
    for size, own, library in times.points:
        assert times.kernels(size, 2) == pytest.approx(own)
        assert times.nccl(size) == pytest.approx(library)


def test_sizes_between_and_outside() -> None:
    times = CollectiveTimes(((100, 5.0, 10.0), (200, 6.0, 14.0), (300, 9.0, 20.0)))
    assert times.kernels(1, 2) == 5.0
    assert times.kernels(150, 2) == 5.5
    assert times.nccl(400) == 26.0


def test_each_gpu_loads_from_all_others() -> None:
    whole, slices = (
        rank_rates("nvidia-h200", 8).times(name) for name in ("all_reduce", "reduce_scatter")
    )
    assert whole.kernels(8192, 8) == whole.kernels(7 * 8192, 2) < whole.nccl(8192)
    assert whole.kernels(1 << 20, 8) > whole.nccl(1 << 20)
    # Of a sum that is scattered only a slice.
    assert slices.kernels(1 << 20, 4) == slices.kernels(3 << 19, 2)


def test_record_of_other_ranks() -> None:
    """What was measured of as many ranks is not scaled."""
    four = CollectiveTimes(((1 << 20, 5.0, 10.0), (1 << 21, 6.0, 14.0)), ranks=4)
    assert four.kernels(1 << 21, 4) == 6.0
    assert four.kernels(1 << 20, 7) == 6.0


@pytest.mark.parametrize(("rows", "in_parts"), [(128, False), (256, False), (1024, True)])
def test_products_in_parts_pay_for_many_rows(rows: int, in_parts: bool) -> None:
    """Of few rows each part reads all weights again."""
    spec = device("nvidia-h200")
    rates = rates_of(spec)

    def of(count: int, columns: int, depth: int) -> float:
        return product(count, columns, depth, 2, rates, spec.sms)

    size, part, whole = rows // 2 * 8192, of(rows // 2, 6656, 4096), of(rows, 6656, 4096)
    apart = whole + H200.times("all_gather").kernels(size, 2)
    assert (gathered_in_parts(part, size, H200) < apart) == in_parts
    size, part, whole = rows * 8192, of(rows // 2, 4096, 14336), of(rows, 4096, 14336)
    apart = whole + H200.times("reduce_scatter").kernels(size, 2)
    assert (scattered_in_parts(part, size, H200, rates) < apart) == in_parts


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


def damaged(path: Path, old: str, new: str) -> str:
    text = H200.text().replace(old, new, 1)
    assert text != H200.text()
    path.write_text(text)
    with pytest.raises(EnvironmentRefused) as caught:
        load_ranks(path)
    return str(caught.value).replace(str(path), "FILE")


def test_records_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = rank_record_path("nvidia-h20", 4)
    path.parent.mkdir(parents=True)
    mine = replace(H200, name="nvidia-h20", ranks=4, copied=1e5, measured=0)
    path.write_text(mine.text())
    found = rank_rates("nvidia-h20", 4)
    assert found == mine and found.times("all_to_all").ranks == 4
    other = rank_rates("nvidia-h20", 8)
    assert (other.name, other.times("all_to_all").ranks) == ("nvidia-h200", 4)
    assert rank_rates("nvidia-h20", 2).times("all_to_all").ranks == 2
    assert other.digest != found.digest


def test_damaged_records(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    again = "Instead: measure the device again (crossfuse calibrate), or remove the file."
    assert damaged(path, '"version": 1', '"version": 7') == (
        f"calibration-stale: FILE: found version 7; limit: version 1. {again}"
    )
    assert damaged(path, "[8192, 3.9", "[-1, 3.9") == (
        "calibration-corrupt: all_reduce of FILE: found sizes [-1, 32768, 131072, 262144]; limit: "
        f"two sizes or more, in order. {again}"
    )
    assert "found 0.0; limit: 0.1 to 1e+07" in damaged(path, "[8192, 3.9", "[8192, 0.0")
    assert "absurd: copied of FILE" in damaged(path, '"copied": 370000.0', '"copied": 1.0')
    assert "calibration-corrupt: FILE: found " in damaged(path, '"ranks": 2', '"ranks": "two"')
