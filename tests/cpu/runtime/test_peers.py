"""Windows over the memory of several GPUs, and what groups refuse; the driver is a stand-in."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossfuse.errors import ArgumentRefused, ArtefactRefused, EnvironmentRefused
from crossfuse.lower.extract import lower
from crossfuse.runtime import PeerGroup, build_library, load
from crossfuse.runtime.peers import PeerKernel, PeerMemory, check_reach, deadline_units, header
from crossfuse.runtime.windows import OneProcess, Window
from crossfuse.schedule.rules.ranks import schedule_row_parallel
from crossfuse.workload import row_parallel

BASE, ROW = 1 << 40, 2 << 20


class FakeDriver:
    """Notes the calls that it gets; one of them may fail."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            values = [getattr(each, "value", None) for each in arguments]
            if name == "cuMemAddressReserve":
                arguments[0]._obj.value = BASE
            elif name == "cuMemCreate":
                values[2] = arguments[2]._obj.location.id
                arguments[0]._obj.value = len(self.calls)
            elif name == "cuMemSetAccess":
                values[2] = [each.location.id for each in arguments[2]]
            self.calls.append((name, *values))
            return 2 if name == self.failing else 0

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [values for called, *values in self.calls if called == name]


def window_of(driver: FakeDriver, *devices: int) -> Window:
    return OneProcess(devices).window(driver, ROW)


def test_row_of_each_rank_lies_in_its_gpu_and_all_reach_it() -> None:
    driver = FakeDriver()
    window = window_of(driver, 3, 1)
    assert window.address == BASE
    assert [(size, device) for _, size, device, _ in driver.of("cuMemCreate")] == [
        (ROW, 3),
        (ROW, 1),
    ]
    assert [place for place, *_ in driver.of("cuMemMap")] == [BASE, BASE + ROW]
    assert driver.of("cuMemSetAccess") == [[BASE, 2 * ROW, [3, 1], 2]]
    window.close()
    window.close()
    assert driver.of("cuMemUnmap") == [[BASE, 2 * ROW]]
    assert driver.of("cuMemAddressFree") == [[BASE, 2 * ROW]]
    assert len(driver.of("cuMemRelease")) == 2


def test_ranks_may_share_a_gpu() -> None:
    driver = FakeDriver()
    window_of(driver, 0, 0, 0)
    assert driver.of("cuMemSetAccess") == [[BASE, 3 * ROW, [0], 1]]


@pytest.mark.parametrize("failing", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_nothing_is_left_of_a_window_that_fails(failing: str) -> None:
    driver = FakeDriver(failing)
    with pytest.raises(EnvironmentRefused) as caught:
        window_of(driver, 0, 1)
    assert str(caught.value) == (
        f"cuda-driver: {failing}: found CUresult 2; limit: GPUs that reach each other's memory, "
        "with as much of it free as the windows need. Instead: take GPUs of one host that NVLink "
        "connects (nvidia-smi topo -m), or free memory."
    )
    made = len(driver.of("cuMemCreate")) - (failing == "cuMemCreate")
    assert len(driver.of("cuMemRelease")) == made
    assert len(driver.of("cuMemUnmap")) == (failing == "cuMemSetAccess")
    assert len(driver.of("cuMemAddressFree")) == 1


@pytest.mark.parametrize(
    ("able", "missing"), [({2}, "atomic operations"), ({3}, "loads and stores"), (set(), "loads")]
)
def test_gpus_that_do_not_reach_each_other(able: set[int], missing: str) -> None:
    def ask(value: Any, attribute: int, _device: int, peer: int) -> int:
        value._obj.value = int(peer == 0 or attribute in able)
        return 0

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=ask)
    with pytest.raises(EnvironmentRefused) as caught:
        check_reach(driver, (0, 1))
    assert f"peer-group: GPU 0: found no {missing}" in str(caught.value)
    check_reach(driver, (0, 0))


def test_layouts_are_those_of_the_driver() -> None:
    from crossfuse.runtime import windows

    assert ctypes.sizeof(windows._Properties) == 32
    assert ctypes.sizeof(windows._Access) == 12


def test_deadlines_are_what_an_int32_counts() -> None:
    assert deadline_units(1.0) == 10**9 >> 20
    assert deadline_units(1e7) == 2**31 - 1


def test_what_are_no_gpus_is_refused_by_the_name_of_the_group() -> None:
    with pytest.raises(ArgumentRefused) as caught:
        PeerGroup("ab")
    assert str(caught.value).startswith("argument: devices of PeerGroup: found 'ab'; limit: a list")


def test_no_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(EnvironmentRefused) as caught:
        PeerGroup([0, 1])
    assert str(caught.value) == (
        "peer-group: GPUs 0, 1: found 0 GPUs that torch sees; limit: the index of such a GPU for "
        "each rank. Instead: run it where there are as many GPUs, or let ranks share one."
    )


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    func = row_parallel(m=4, k=64, n=32, ranks=2, dtype="float32")
    folder = tmp_path_factory.mktemp("ranks")
    made = build_library(lower(schedule_row_parallel(func)).image, Path(folder))
    return load(made.shared_object, check_device=False)


def test_a_library_says_what_spans_gpus(kernel: Any) -> None:
    assert {each.name: each.ranks for each in kernel.buffers} == {
        **{"A": 0, "B": 0, "out": 0, "crossfuse_rank": 0},
        **{"crossfuse_arrivals": 2, "product_rf_global_peer": 2},
    }


def test_group_of_another_size(kernel: Any) -> None:
    group = SimpleNamespace(size=3)
    with pytest.raises(ArtefactRefused) as caught:
        PeerGroup.join(group, kernel)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "peer-group: main: found a function over 2 GPUs; limit: 3 ranks, as the group has. "
        "Instead: make a group of that many GPUs, or load another kernel."
    )


def test_tensors_of_each_rank(kernel: Any) -> None:
    ranked = object.__new__(PeerKernel)
    ranked._kernel, ranked.devices = kernel, (0, 1)
    assert [each.name for each in ranked.buffers] == ["A", "B", "out"]
    with pytest.raises(ArtefactRefused) as caught:
        ranked([None], [None, None], [None, None])
    assert str(caught.value) == (
        "argument-ranks: argument 'A' of main: found 1 tensors; limit: 2, one of each rank. "
        "Instead: pass the ranks' tensors as a list."
    )


def test_slabs_of_other_sizes(kernel: Any) -> None:
    memory = object.__new__(PeerMemory)
    memory._members, memory.row_bytes = OneProcess((0, 1)), (ROW, 2 * ROW)
    memory._counted = ""
    with pytest.raises(ArtefactRefused) as caught:
        memory.join(kernel)
    assert str(caught.value) == (
        "peer-memory: main: found rows of 2097152, 2097152 bytes; limit: rows of 2097152, "
        "4194304 bytes, as this memory has. Instead: call PeerGroup.join, which makes memory of "
        "its own for a kernel."
    )


def test_kernels_of_one_memory_count_alike(kernel: Any) -> None:
    memory = object.__new__(PeerMemory)
    memory._members, memory.row_bytes = OneProcess((0, 1)), (ROW, ROW)
    memory._counted = "crossfuse_turns"
    with pytest.raises(ArtefactRefused) as caught:
        memory.join(kernel)
    assert str(caught.value) == (
        "peer-memory: main: found counts 'crossfuse_arrivals'; limit: 'crossfuse_turns', as its "
        "kernels have. Instead: call PeerGroup.join, which makes memory of its own for a kernel."
    )


def test_late_rank_is_named() -> None:
    memory = object.__new__(PeerMemory)
    memory._members, memory.synchronize = OneProcess((0, 1)), lambda: None  # type: ignore[method-assign]
    memory._late = {0: [0], 1: [1]}
    with pytest.raises(EnvironmentRefused) as caught:
        memory.check("sums")
    assert str(caught.value).startswith(
        "peer-late: rank 1 of sums: found no arrival of rank 0 before the deadline; limit:"
    )


def test_late_rank_is_named_where_cuda_has_stopped() -> None:
    memory = object.__new__(PeerMemory)

    def stopped() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    memory.synchronize, memory._late = stopped, {0: [2]}  # type: ignore[method-assign]
    with pytest.raises(EnvironmentRefused, match="found no arrival of rank 1 before the deadline"):
        memory.check()
    memory._late = {0: [0]}
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        memory.check()


def test_header_of_counts() -> None:
    words = header(2.0, 0x7F0012345678)
    assert words == [0] * 8 + [deadline_units(2.0), 0, 0x12345678, 0x7F00]


def test_no_process_group() -> None:
    pytest.importorskip("torch")
    with pytest.raises(EnvironmentRefused) as caught:
        PeerGroup.from_process_group()
    assert str(caught.value) == (
        "peer-group: process group: found no process group; limit: a process of an initialised "
        "group. Instead: call torch.distributed.init_process_group before."
    )
