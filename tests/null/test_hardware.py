"""Devices: those that come with the package, and the GPU of a machine, by what its driver says."""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import crossfuse
from crossfuse import hardware
from crossfuse.bench import environment
from crossfuse.bench.job import floor
from crossfuse.cli import app
from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import DEVICES, Gpu, device, device_of, find_gpus, record_path
from crossfuse.planner.cost.rates import measured, rates_of, scaled, shipped
from crossfuse.workload import lookup

#: What a driver says of a part: SMs, shared memory, L2, memory's bits and clock, clock of SMs.
FACTS = (16, 97, 38, 37, 36, 13)
H100 = (132, 232448, 50 << 20, 5120, 2619000, 1980000)
H200 = (132, 232448, 60 << 20, 6144, 3201000, 1980000)
H20 = (78, 232448, 60 << 20, 6144, 2619000, 1980000)
PCIE = (114, 232448, 50 << 20, 5120, 1593000, 1755000)


class FakeDriver:
    """libcuda with some GPUs, called with the C arguments of the real one."""

    def __init__(
        self, *gpus: tuple[str, tuple[int, int], Mapping[int, int]], status: int = 0
    ) -> None:
        self.gpus, self.status = gpus, status

    def cuInit(self, _flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, out: Any) -> int:
        return self._write(out, 13010)

    def cuDeviceGetCount(self, out: Any) -> int:
        return self._write(out, len(self.gpus))

    def cuDeviceGet(self, out: Any, index: int) -> int:
        return self._write(out, index)

    def cuDeviceGetName(self, buffer: Any, _size: int, gpu: int) -> int:
        buffer.value = self.gpus[gpu][0].encode()
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, gpu: int) -> int:
        _, capability, facts = self.gpus[gpu]
        known = {75: capability[0], 76: capability[1], **facts}
        return self._write(out, known[attribute]) if attribute in known else 1

    def cuDeviceTotalMem_v2(self, out: Any, _gpu: int) -> int:
        return self._write(out, 80 << 30)

    @staticmethod
    def _write(out: Any, value: int) -> int:
        out._obj.value = value
        return 0


def part(name: str, facts: tuple[int, ...] = ()) -> tuple[str, tuple[int, int], dict[int, int]]:
    return name, (9, 0), dict(zip(FACTS, facts, strict=False))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Puts GPUs into this machine; its user has no records."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    load = ctypes.CDLL

    def install(*gpus: tuple[str, tuple[int, int], Mapping[int, int]]) -> None:
        def opened(name: str, *args: Any, **kwargs: Any) -> Any:
            return FakeDriver(*gpus) if "libcuda." in name else load(name, *args, **kwargs)

        monkeypatch.setattr(ctypes, "CDLL", opened)
        hardware.local_devices.cache_clear()
        scaled.cache_clear()

    yield install
    hardware.local_devices.cache_clear()


def test_the_driver_is_asked(machine: Any) -> None:
    machine(part("NVIDIA H100 80GB HBM3", H100), part("NVIDIA H100"))
    first, second = find_gpus()
    assert first == Gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        (13, 1),
        *(132, 232448, 50 << 20),
        memory_bytes=80 << 30,
        memory_bits=5120,
        memory_mhz=2619,
        clock_mhz=1980,
    )
    assert second == Gpu("NVIDIA H100", (9, 0), (13, 1), memory_bytes=80 << 30)


@pytest.mark.parametrize("found", [FakeDriver(status=100), object()], ids=["no device", "stub"])
def test_a_machine_without_a_device(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: found)
    assert find_gpus() == ()


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert find_gpus() == ()


def test_the_default_is_the_gpu_of_this_machine(machine: Any) -> None:
    a100 = ("NVIDIA A100-SXM4-40GB", (8, 0), dict(zip(FACTS, H100, strict=True)))
    machine()
    assert device() == DEVICES["nvidia-h100"]
    machine(a100)
    assert device() == DEVICES["nvidia-h100"]
    machine(a100, part("NVIDIA H200", H200))
    assert device() == DEVICES["nvidia-h200"]
    assert crossfuse.plan("G1").device == "nvidia-h200"
    assert crossfuse.plan("softmax:rows=8,cols=64", "nvidia-h100").device == "nvidia-h100"
    machine(part("NVIDIA H100 80GB HBM3", H100))
    assert device() == DEVICES["nvidia-h100"]


def test_other_parts_have_their_own_facts(machine: Any) -> None:
    machine(part("NVIDIA H20", H20))
    found = device()
    assert found == device("nvidia-h20") == device(found)
    assert (found.sms, found.l2_bytes, found.memory_bits, found.memory_mhz) == (
        *(78, 60 << 20),
        *(6144, 2619),
    )
    assert found.resident_clusters(8) <= 78 // 8
    with pytest.raises(EnvironmentRefused, match=r"'nvidia-b200'; limit: nvidia-h100, nvidia-h20,"):
        device("nvidia-b200")
    # A slice of a known part is not that part.
    name = "NVIDIA H100 80GB HBM3"
    assert device_of(Gpu(name, (9, 0), (13, 0), sms=16)).name == "nvidia-h100-80gb-hbm3"
    assert device_of(Gpu("NVIDIA GH200 480GB", (9, 0), (13, 0))).name == "nvidia-gh200-480gb"


def test_rates_of_other_parts_are_scaled_and_that_is_said_once(machine: Any) -> None:
    machine(part("NVIDIA H100 PCIe", PCIE))
    with pytest.warns(UserWarning, match="no measurements of nvidia-h100-pcie: .*nvidia-h100, wi"):
        found = measured()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = crossfuse.plan("S3:M=16")
    h100 = shipped("nvidia-h100")
    assert found.provisional and plan.device == "nvidia-h100-pcie"
    assert found.hbm_read == pytest.approx(h100.hbm_read * 1593 / 2619)
    assert found.tensor[0][-1] == pytest.approx(h100.tensor[0][-1] * 1755 / 1980)
    assert found.l2_read == pytest.approx(h100.l2_read * 1755 / 1980 * 114 / 132)
    assert dict(found.resident)[1] == 114
    assert plan.microseconds > 1.4 * crossfuse.plan("S3:M=16", "nvidia-h100").microseconds
    assert all(each.ctas <= 114 for each in plan.kernels)


def test_the_nearest_record_is_that_of_the_most_alike_memory(machine: Any) -> None:
    machine(part("NVIDIA GH200 144G HBM3e", (132, 232448, 60 << 20, 6144, 3201000, 1980000)))
    with pytest.warns(UserWarning, match="it plans by those of nvidia-h200, with 1.00 times"):
        assert measured().hbm_read == shipped("nvidia-h200").hbm_read


def test_a_record_of_the_user_is_found_by_name(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from crossfuse.bench import calibrate

    machine(part("NVIDIA H20", H20))
    before = device()
    h100 = shipped("nvidia-h100")

    def fake(name: str, *_: Any, **__: Any) -> Any:
        return replace(h100, name=name, hbm_read=3.9e6, fitted={})

    monkeypatch.setattr(calibrate, "calibrate", fake)
    result = CliRunner().invoke(app, ["calibrate", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "record": str(record_path("nvidia-h20")),
        "device": "nvidia-h20",
    }
    assert record_path("nvidia-h20").is_relative_to(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rates_of(device())
    assert found.measured.hbm_read == 3.9e6
    assert found.fitted == rates_of(DEVICES["nvidia-h100"]).fitted  # kernels were not measured
    assert device().record and device().record != before.record  # caches tell them apart
    record_path("nvidia-h20").write_text("[]")
    with pytest.raises(EnvironmentRefused, match="crossfuse calibrate"):
        rates_of(device())


def test_nothing_is_calibrated_without_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_gpus", lambda: ())
    result = CliRunner().invoke(app, ["calibrate"])
    assert result.exit_code == 2
    assert "found no CUDA device" in result.output


def test_floors_are_those_of_the_gpu(machine: Any) -> None:
    spec = lookup("S3", M=16)
    machine(part("NVIDIA H200", H200))
    h200 = floor(spec)
    assert h200 == floor(spec, DEVICES["nvidia-h200"])
    assert 4.1e12 < h200.roofs.bytes_per_second < 4.6e12
    h100 = floor(spec, DEVICES["nvidia-h100"])
    assert h100.roofs.bytes_per_second == 3.0e12
    assert 1.3 < h100.microseconds / h200.microseconds < 1.6
