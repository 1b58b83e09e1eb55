"""What a kernel library asks of the CUDA driver, written down by a stub driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpu.runtime.images import cluster_sum, vector_add
from cpu.runtime.launch_images import (
    binned,
    convolved,
    early,
    fewer_rows,
    tiled,
    whole_grid,
    without_workspace,
)
from crossfuse.runtime import build_library, build_object, find_host_compiler, write_dispatch

HERE = Path(__file__).parent
MAX_DYNAMIC_SHARED, SHARED_CARVEOUT, NON_PORTABLE_CLUSTER, CLUSTER_DIMENSION = 8, 9, 14, 4
PROGRAMMATIC, COOPERATIVE = 6, 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Outcome of every call of launch_scenarios.py."""
    folder = tmp_path_factory.mktemp("libraries")
    add = vector_add()
    narrow = replace(add.launches[0], grid=(2, 1, 1))
    twice = replace(add, name="add_twice", launches=(*add.launches, narrow))
    sums = (cluster_sum(4), cluster_sum(16, shared_bytes=200_000))
    by_row = fewer_rows(add)
    rows = (by_row, without_workspace(by_row))
    for image in (
        add,
        twice,
        tiled(add),
        early(add),
        *rows,
        convolved(add),
        whole_grid(add),
        *sums,
    ):
        build_library(image, folder)
    objects = [build_object(each, folder).path for each in (add, sums[0])]
    link = [find_host_compiler(), "-shared", *objects, "-o", folder / "linked.so"]
    subprocess.run(link, check=True)
    bins = {rows: build_library(binned(rows), folder / "bins") for rows in (4, 8)}
    write_dispatch(folder / "bins", "bins", bins)
    stub = ["-shared", "-fPIC", "-x", "c", HERE / "libcuda_stub.c", "-o", folder / "libcuda.so.1"]
    subprocess.run([find_host_compiler(), *stub], check=True)
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "STUB_LOG": str(folder / "log"),
    }
    command = [sys.executable, HERE / "launch_scenarios.py", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def calls(outcome: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [call for call in outcome["calls"] if call["call"] == name]


@pytest.mark.slow
def test_a_plain_launch(results: dict[str, Any]) -> None:
    outcome = results["add"]
    assert outcome["value"] == 7.0  # written by the stub's launch, so the output was copied back
    (launch,) = calls(outcome, "launch")
    assert (launch["grid"], launch["block"]) == ([4, 1, 1], [128, 1, 1])
    assert (launch["shared"], launch["stream"]) == (0, 0)
    # Without the attribute a single CTA is no cluster, and st.async is illegal.
    assert (launch["attributes"], launch["ids"][0]) == (1, CLUSTER_DIMENSION)
    assert launch["cluster"] == [1, 1, 1]
    assert launch["context"] == 0x1000 + 40
    assert calls(outcome, "load") == [{"call": "load", "elf": True}]
    assert calls(outcome, "function") == [{"call": "function", "name": "add_kernel"}]
    assert calls(outcome, "attribute") == []
    assert len(calls(outcome, "allocate")) == len(calls(outcome, "free")) == 3


def test_a_library_is_loaded_once(results: dict[str, Any]) -> None:
    assert calls(results["add again"], "load") == calls(results["add again"], "occupancy") == []
    assert len(calls(results["add again"], "launch")) == 1
    assert len(calls(results["threads"], "load")) == 1
    assert len(calls(results["threads"], "launch")) == 8


def test_kernels_of_one_library_have_their_own_code(results: dict[str, Any]) -> None:
    outcome = results["linked"]
    assert outcome["value"] == ["vector_add", "cluster_sum_4"]
    assert [each["name"] for each in calls(outcome, "function")] == ["add_kernel", "sum_kernel"]
    assert [each["cluster"] for each in calls(outcome, "launch")] == [[1, 1, 1], [4, 1, 1]]


def test_launches_keep_their_order(results: dict[str, Any]) -> None:
    grids = [launch["grid"] for launch in calls(results["add twice"], "launch")]
    assert grids == [[4, 1, 1], [2, 1, 1]]


def test_workspaces_tensor_maps_and_early_launches(results: dict[str, Any]) -> None:
    outcome = results["tiled"]
    assert outcome["value"] == 7.0
    first, second = calls(outcome, "launch")
    assert (first["attributes"], second["attributes"]) == (1, 2)
    assert second["ids"] == [CLUSTER_DIMENSION, PROGRAMMATIC]
    assert [each["bytes"] for each in calls(outcome, "allocate")] == [2048] * 4
    assert len(calls(outcome, "free")) == 4
    assert calls(outcome, "attribute") == []  # TMA passes by L1
    assert calls(outcome, "encode") == [
        {
            **{"call": "encode", "type": 7, "rank": 2, "extents": [128, 4], "pitch": 512},
            **{"box": [32, 4], "swizzle": 3},
        }
    ]


def test_the_first_of_a_chain_starts_when_all_before_it_is_over(results: dict[str, Any]) -> None:
    def ids(name: str) -> list[list[int]]:
        assert "refused" not in results[name]
        launches = calls(results[name], "launch")
        assert {each["stream"] for each in launches} == {0x7700}
        return [each["ids"][: each["attributes"]] for each in launches]

    # L1 has what shared memory of its CTAs leaves of an SM: at least 32 of 228 KiB are theirs.
    carveout = {"call": "attribute", "id": SHARED_CARVEOUT, "value": 15}
    assert calls(results["early"], "attribute") == [carveout] * 2
    assert ids("early") == [[CLUSTER_DIMENSION, PROGRAMMATIC]] * 2
    assert ids("early, first") == [[CLUSTER_DIMENSION], [CLUSTER_DIMENSION, PROGRAMMATIC]]


def test_workspaces_without_an_allocator_are_the_drivers_in_the_order_of_the_stream(
    results: dict[str, Any],
) -> None:
    outcome = results["no allocator"]
    assert "refused" not in outcome
    names = [each["call"] for each in outcome["calls"]]
    assert names.index("allocate in order") < names.index("launch")
    assert names[-1] == "free in order"
    (made,), (freed,) = calls(outcome, "allocate in order"), calls(outcome, "free in order")
    assert made == {"call": "allocate in order", "bytes": 2048, "stream": 0x7700}
    assert freed["stream"] == 0x7700


def test_profilers_launch_a_whole_grid_without_the_attribute(results: dict[str, Any]) -> None:
    (launch,) = calls(results["grid, profiled"], "launch")
    assert (launch["attributes"], launch["ids"][0]) == (1, CLUSTER_DIMENSION)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_descriptors_end_with_the_rows(results: dict[str, Any], rows: int) -> None:
    """Those of tensors with rows; workspaces and what is read as a whole have all of theirs."""
    outcome = results[f"{rows} rows"]
    assert outcome["value"] == [rows, 128, 7.0]
    extents = [each["extents"] for each in calls(outcome, "encode")]
    assert extents == [[128, rows], [128, 4], [128, 4], [128, rows]]
    assert {each["pitch"] for each in calls(outcome, "encode")} == {512}
    _, second = calls(outcome, "launch")
    assert second["number"] == rows
    # A, B, S and the output, then the workspace.
    allocated = [each["bytes"] for each in calls(outcome, "allocate")]
    assert allocated == [512 * rows, 2048, 512 * rows, 4 * rows, 2048]


def test_device_tensors_with_fewer_rows(results: dict[str, Any]) -> None:
    outcome = results["rows on a stream"]
    assert [each["extents"] for each in calls(outcome, "encode")] == [[128, 2]]
    (launch,) = calls(outcome, "launch")
    assert launch["number"] == 2


@pytest.mark.parametrize(
    ("rows", "launched"),
    [(3, [(4, 3)]), (4, [(4, 4)]), (5, [(8, 5)]), (19, [(8, 8), (8, 8), (4, 3)]), (0, [])],
)
def test_dispatch_launches_the_kernel_for_the_rows(
    results: dict[str, Any], rows: int, launched: list[tuple[int, int]]
) -> None:
    """The grid tells the bin; outputs of all pieces are copied back."""
    outcome = results[f"dispatch of {rows} rows"]
    found = [(each["grid"][0], each["number"]) for each in calls(outcome, "launch")]
    assert found == launched
    assert [each["extents"] for each in calls(outcome, "encode")] == [[128, m] for _, m in launched]
    firsts = [sum(m for _, m in launched[:n]) for n in range(len(launched))]
    assert outcome["value"] == [rows, 128, firsts]


def test_dispatch_while_a_graph_is_captured(results: dict[str, Any]) -> None:
    outcome = results["dispatch, captured"]
    (launch,) = calls(outcome, "launch")
    assert (launch["grid"], launch["number"], launch["stream"]) == ([8, 1, 1], 6, 0x7700)
    assert calls(outcome, "allocate") == []


def test_rows_that_do_not_fit(results: dict[str, Any]) -> None:
    for name, found in (("5 rows", "(5, 128)"), ("0 rows", "(0, 128)")):
        assert results[name]["refused"] == "ArtefactRefused"
        assert results[name]["text"] == (
            f"argument-shape: argument 0 'A' of fewer_rows: found {found}; limit: (4, 128), or "
            "fewer rows of it, at least 1. Instead: pass a tensor of that shape, or compile the "
            "kernel for this one."
        )
    assert results["rows that differ"]["text"] == (
        "argument-rows: argument 3 'S' of fewer_rows: found 2 rows; limit: 3, as of 'A'. Instead: "
        "pass tensors of equally many rows."
    )
    assert results["fewer rows of a weight"]["text"].startswith(
        "argument-shape: argument 1 'B' of fewer_rows: found (3, 128); limit: (4, 128). Instead:"
    )
    assert results["fewer rows of others"]["refused"] == "ArtefactRefused"


def test_maps_of_pixels(results: dict[str, Any]) -> None:
    assert calls(results["convolved"], "encode pixels") == [
        {
            **{"call": "encode pixels", "type": 7, "extents": [8, 8, 4, 2]},
            **{"strides": [32, 256, 1024], "box": [8, 16], "lower": [-1, -2], "upper": [-3, -4]},
            **{"steps": [1, 1], "swizzle": 1},
        }
    ]
    assert calls(results["convolved"], "encode") == []


def test_a_whole_grid_is_launched_together(results: dict[str, Any]) -> None:
    (launch,) = calls(results["grid"], "launch")
    assert launch["ids"] == [CLUSTER_DIMENSION, COOPERATIVE]
    assert launch["cluster"][0] == 1
    refused = results["grid, no room"]
    assert refused["text"] == (
        "cluster-fit: kernel 'add_kernel' on Stub GPU 1 (cuda:1): found room for 3 clusters of 1 "
        "CTAs of 128 threads and 0 bytes of dynamic shared memory; limit: 4 clusters that run at "
        "the same time. Instead: compile without grid_stage, as two kernels, or for this device."
    )
    assert calls(refused, "launch") == []


def test_state_is_zero_at_first_and_kept(results: dict[str, Any]) -> None:
    """64 pieces of 512 bytes at once, cleared on a stream of their own; 3 more for the call."""
    assert calls(results["grid"], "clear") == [
        {"call": "clear", "bytes": 64 * 512, "own stream": True}
    ]
    for name in ("grid again", "grid, captured"):
        assert calls(results[name], "clear") == []
    first, again, captured, later = (
        calls(results[name], "launch")[0]["second"]
        for name in ("grid", "grid again", "grid, captured", "grid, captured again")
    )
    assert first == again
    assert len({first, captured, later}) == 3


def test_a_portable_cluster(results: dict[str, Any]) -> None:
    outcome = results["cluster 4"]
    (launch,) = calls(outcome, "launch")
    assert (launch["grid"], launch["shared"]) == ([8, 1, 1], 512)
    assert (launch["attributes"], launch["ids"][0]) == (1, CLUSTER_DIMENSION)
    assert launch["cluster"] == [4, 1, 1]
    assert calls(outcome, "attribute") == [
        {"call": "attribute", "id": MAX_DYNAMIC_SHARED, "value": 512}
    ]
    assert calls(outcome, "occupancy") == [{"call": "occupancy", "cluster": [4, 1, 1]}]


def test_a_cluster_of_16_is_allowed_explicitly(results: dict[str, Any]) -> None:
    outcome = results["cluster 16"]
    (launch,) = calls(outcome, "launch")
    assert (launch["grid"], launch["shared"]) == ([32, 1, 1], 200_000)
    assert (launch["cluster"], launch["ids"][0]) == ([16, 1, 1], CLUSTER_DIMENSION)
    assert calls(outcome, "attribute") == [
        {"call": "attribute", "id": MAX_DYNAMIC_SHARED, "value": 200_000},
        {"call": "attribute", "id": NON_PORTABLE_CLUSTER, "value": 1},
    ]


def test_device_tensors_run_on_their_stream(results: dict[str, Any]) -> None:
    outcome = results["stream"]
    (launch,) = calls(outcome, "launch")
    assert launch["stream"] == 0x7700
    assert calls(outcome, "retain") == [{"call": "retain", "device": 1}]
    assert launch["context"] == 0x1000 + 41
    assert calls(outcome, "allocate") == []


def test_no_gpu(results: dict[str, Any]) -> None:
    assert results["no device, load"]["value"] == "vector_add"
    assert results["no device"]["refused"] == "EnvironmentRefused"
    assert results["no device"]["text"] == (
        "cuda-device: cuInit: found CUDA_ERROR_NO_DEVICE (100); limit: a GPU that the driver "
        "shows. Instead: run on a machine with an NVIDIA GPU of this library's architecture and "
        "its driver."
    )
    assert results["no such device"]["text"].startswith(
        "cuda-call: cuDeviceGet of cuda:5: found CUDA_ERROR_INVALID_DEVICE (101);"
    )


def test_a_gpu_of_another_architecture(results: dict[str, Any]) -> None:
    for outcome, found in ((results["foreign, load"], "8.0"), (results["foreign, call"], "10.0")):
        assert outcome["refused"] == "ArtefactRefused"
        assert outcome["text"] == (
            f"device-arch: vector_add on Stub GPU 0: found compute capability {found}; limit: "
            "exactly 9.0 (sm_90a). Instead: run on such a GPU, or compile the kernel for this one."
        )
        assert calls(outcome, "load") == []


def test_a_cluster_that_does_not_fit_is_not_launched(results: dict[str, Any]) -> None:
    outcome = results["no room"]
    assert outcome["refused"] == "ArtefactRefused"
    assert outcome["text"] == (
        "cluster-fit: kernel 'sum_kernel' on Stub GPU 1 (cuda:1): found room for no cluster of 16 "
        "CTAs of 128 threads and 200000 bytes of dynamic shared memory; limit: at least 1 cluster "
        "on the device. Instead: compile with a smaller cluster, fewer threads or less shared "
        "memory."
    )
    assert calls(outcome, "launch") == []
    assert results["query"]["value"] == 7


def test_faults_are_named(results: dict[str, Any]) -> None:
    outcome = results["fault"]
    assert outcome["refused"] == "EnvironmentRefused"
    assert outcome["text"] == (
        "cuda-call: the kernels or the copy back of 'C' of vector_add: found "
        "CUDA_ERROR_ILLEGAL_ADDRESS (700, an illegal memory access was encountered); limit: "
        "CUDA_SUCCESS. Instead: run the program under compute-sanitizer, since a fault of an "
        "earlier kernel is reported by a later call too."
    )
    assert len(calls(outcome, "allocate")) == len(calls(outcome, "free")) == 3
    assert results["no shared"]["text"].startswith(
        "cuda-call: dynamic shared memory of 512 bytes of kernel 'sum_kernel': found"
    )
