"""Records of devices: what is stored is what is read, and what is not sound is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import DEVICES
from crossfuse.planner.cost.rates import Measured, load, measured, read


@pytest.fixture
def sound() -> dict[str, Any]:
    return json.loads(measured("nvidia-h100").text())


@pytest.mark.parametrize("name", DEVICES)
def test_text_is_read_back_as_the_same_record(name: str, tmp_path: Path) -> None:
    record = measured(name)
    path = tmp_path / "record.json"
    path.write_text(record.text())
    assert load(path) == record
    assert read(record.to_json()) == record


@pytest.mark.parametrize("name", DEVICES)
def test_a_provisional_record_names_sources_and_a_measured_one_its_machine(name: str) -> None:
    record = measured(name)
    if record.provisional:
        assert record.machine["sources"]
        assert not record.spread
    else:
        assert set(record.machine) >= {"gpu", "cuda", "commit", "date"}
        tables = {"resident"}  # counted by the driver
        assert all(record.spread[each] > 0 for each in record.spread if each not in tables)


@pytest.mark.parametrize("name", DEVICES)
def test_shipped_numbers_are_in_an_order_that_a_gpu_has(name: str) -> None:
    record = measured(name)
    assert record.hbm_read < record.l2_read
    assert record.dsm < record.l2 < record.hbm
    assert record.early_launch < record.launch
    assert record.sm_ingest_all < DEVICES[name].sms * record.sm_ingest
    sizes = dict(record.resident)
    assert sizes[1] == DEVICES[name].sms
    # The cost model and the rules count clusters by the device's table.
    assert sizes == {size: DEVICES[name].resident_clusters(size) for size in sizes}
    rates = {row[:3]: row[3] for row in record.tensor}
    assert rates[128, 8, "bfloat16"] < rates[128, 128, "bfloat16"]
    assert rates[128, 128, "bfloat16"] < rates[128, 128, "float8_e4m3fn"]


def test_tables_are_sorted_whatever_the_order_in_the_file(sound: dict[str, Any]) -> None:
    sound["resident"] = sound["resident"][::-1]
    assert read(sound) == measured("nvidia-h100")


def test_the_h200_has_the_faster_memory() -> None:
    assert measured("nvidia-h200").hbm_read > measured("nvidia-h100").hbm_read


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(EnvironmentRefused, match=r"target: device: found 'nvidia-b200'"):
        measured("nvidia-b200")


BROKEN = [
    ({"version": 0}, "calibration-stale: here: found version 0; limit: version 1"),
    ({"flag": None}, "calibration-corrupt: here: found flag: null; limit: a number"),
    ({"flag": True}, "calibration-corrupt: here: found flag: true; limit: a number"),
    ({"flag": float("nan")}, "calibration-absurd: flag of here: found nan; limit: 0.1 to 20"),
    ({"hbm_read": 3.0}, "calibration-absurd: hbm_read of here: found 3.0; limit: 500000 to 1e+07"),
    ({"dsm_push": []}, "calibration-corrupt: dsm_push of here: found no rows; limit: a list of"),
    ({"dsm_push": 3e4}, "calibration-corrupt: here: found dsm_push: 30000.0; limit: a list"),
    ({"dsm_push": [[2]]}, "found dsm_push[0]: a list of 1 entries; limit: a list of 2"),
    ({"dsm_push": [[2, -1.0]]}, "calibration-absurd: dsm_push of here: found -1.0; limit: 2000"),
    ({"dsm_push": [[2, 3e4]] * 2}, "calibration-corrupt: dsm_push of here: found a key twice"),
    ({"tensor": [[64, 8, 1e6]]}, "found tensor[0]: a list of 3 entries; limit: a list of 4"),
    ({"provisional": "no"}, "found provisional: 'no'; limit: true or false"),
    ({"speed": 1}, "calibration-corrupt: here: found speed: unknown; limit: at most name, "),
]


@pytest.mark.parametrize(("change", "text"), BROKEN)
def test_broken_records_are_refused(sound: dict[str, Any], change: Any, text: str) -> None:
    with pytest.raises(EnvironmentRefused) as caught:
        read(sound | change, "here")
    assert text in str(caught.value)


def test_a_missing_field_is_named(sound: dict[str, Any]) -> None:
    del sound["flag"], sound["tensor"]
    with pytest.raises(EnvironmentRefused, match="found tensor: nothing; limit: all fields"):
        read(sound)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    with pytest.raises(EnvironmentRefused, match=r"calibration-corrupt: .*no such file"):
        load(path)
    path.write_text(measured("nvidia-h100").text()[:-5])
    with pytest.raises(EnvironmentRefused, match=r"calibration-corrupt: .*limit: JSON"):
        load(path)
    path.write_text("[]")
    with pytest.raises(EnvironmentRefused, match="found a list of 0 entries; limit: an object"):
        load(path)


def test_every_refusal_says_how_to_measure_again(sound: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentRefused, match=r"Instead: .*crossfuse calibrate"):
        read(sound | {"version": 0})


def test_records_are_values() -> None:
    record = measured("nvidia-h100")
    assert Measured(**asdict(record)) == record
