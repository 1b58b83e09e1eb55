"""Calls kernel libraries under the stub driver and prints what came of each call as JSON.

Runs as a program of its own: the driver is looked up once in a process, along LD_LIBRARY_PATH.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from cpu.runtime.fake_cuda import aligned, on_gpu
from crossfuse.errors import RefusedError
from crossfuse.runtime import LoadedKernel, Manifest, load, load_dispatch

FOLDER = Path(sys.argv[1])
LOG = Path(os.environ["STUB_LOG"])
STREAM = 0x7700


def attempt(action: Callable[[], Any], **settings: object) -> dict[str, Any]:
    """Run `action` with the stub's settings; its value or refusal, and the calls it led to."""
    LOG.write_text("")
    for name, value in settings.items():
        os.environ[f"STUB_{name.upper()}"] = str(value)
    try:
        outcome: dict[str, Any] = {"value": action()}
    except RefusedError as error:
        outcome = {"refused": type(error).__name__, "text": str(error)}
    for name in settings:
        del os.environ[f"STUB_{name.upper()}"]
    return outcome | {"calls": [json.loads(line) for line in LOG.read_text().splitlines()]}


def kernel(name: str, **options: Any) -> LoadedKernel:
    return load(FOLDER / f"{name}.so", **options)


def add(**options: Any) -> float:
    ones = np.ones((4, 128), np.float32)
    return float(kernel("vector_add", check_device=False).run(ones, ones, **options)[0, 0])


def linked() -> list[str]:
    """Kernels of two objects in one library, on a device of their own."""
    module = tvm_ffi.load_module(str(FOLDER / "linked.so"))
    names = ("vector_add", "cluster_sum_4")
    manifests = [Manifest.from_json(module[f"{name}_manifest"](), name) for name in names]
    add, total = (LoadedKernel(module, each) for each in manifests)
    add.run(*np.zeros((2, 4, 128), "f4"), device=3)
    total.run(np.zeros((2, 4, 128), "f4"), device=3)
    return [add.name, total.name]


def total(size: int, device: int = 0) -> float:
    ones = np.ones((2, size, 128), np.float32)
    return float(kernel(f"cluster_sum_{size}").run(ones, device=device)[0, 0, 0])


def grid(**options: Any) -> float:
    zeros = np.zeros((4, 128), np.float32)
    return float(kernel("whole_grid", check_device=False).run(zeros, zeros, **options)[0, 0])


def profiled() -> float:
    os.environ["CROSSFUSE_COOPERATIVE"] = "0"
    try:
        return grid()
    finally:
        del os.environ["CROSSFUSE_COOPERATIVE"]


def by_row(rows: int, weight: int = 4, scales: int | None = None) -> list[float]:
    a, b = np.ones((rows, 128), np.float32), np.ones((weight, 128), np.float32)
    each = np.ones(rows if scales is None else scales, np.float32)
    result = kernel("fewer_rows").run(a, b, each)
    return [*result.shape, float(result[0, 0])]


def rows_on_stream() -> None:
    a, b, c, s = (on_gpu(aligned(shape)) for shape in ((2, 128), (4, 128), (2, 128), (2,)))
    kernel("rows_alone")(a, b, c, s)


def dispatched(rows: int) -> list[Any]:
    """Shape of the output, and the rows at which launches wrote."""
    out = load_dispatch(FOLDER / "bins").run(np.zeros((rows, 128), "f4"), np.zeros((4, 128), "f4"))
    return [*out.shape, np.flatnonzero(out[:, 0] == 7).tolist()]


def dispatched_on_stream() -> None:
    a, b, c = (on_gpu(aligned((rows, 128))) for rows in (6, 4, 6))
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), STREAM):
        load_dispatch(FOLDER / "bins")(a, b, c)


def on_stream() -> None:
    arrays = [on_gpu(aligned((4, 128)), device=1) for _ in "ABC"]
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:1"), STREAM):
        kernel("vector_add")(*arrays)


def early(first: bool) -> None:
    arrays = [on_gpu(aligned((4, 128)), device=1) for _ in "ABC"]
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:1"), STREAM):
        made = kernel("early", check_device=False)
        (made.as_first() if first else made)(*arrays)


def without_allocator() -> None:
    """As TVM's virtual machine calls: tensors of a GPU, and no framework that allocates."""
    arrays = [on_gpu(aligned((4, 128)), device=1) for _ in "ABC"]
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:1"), STREAM):
        kernel("tiled")(*arrays)


def from_threads() -> None:
    threads = [threading.Thread(target=lambda: add(device=2)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    results = {
        "no device": attempt(add, devices=0),
        "no device, load": attempt(lambda: kernel("vector_add").name, devices=0),
        "foreign, load": attempt(lambda: kernel("vector_add").name, compute=80),
        "foreign, call": attempt(add, compute=100),
        "add": attempt(add),
        "add again": attempt(add),
        "no allocator": attempt(without_allocator, devices=4),
        "early": attempt(lambda: early(False), devices=4),
        "early, first": attempt(lambda: early(True), devices=4),
        "linked": attempt(linked, devices=4),
        "add twice": attempt(lambda: kernel("add_twice").run(*np.zeros((2, 4, 128), "f4"))[0, 0]),
        "tiled": attempt(lambda: kernel("tiled").run(*np.zeros((2, 4, 128), "f4"))[0, 0]),
        **{f"{rows} rows": attempt(partial(by_row, rows)) for rows in (0, 1, 3, 4, 5)},
        **{
            f"dispatch of {rows} rows": attempt(partial(dispatched, rows))
            for rows in (0, 3, 4, 5, 19)
        },
        "dispatch, captured": attempt(dispatched_on_stream, capturing=1),
        "rows that differ": attempt(lambda: by_row(3, scales=2)),
        "fewer rows of a weight": attempt(lambda: by_row(3, weight=3)),
        "fewer rows of others": attempt(
            lambda: kernel("vector_add", check_device=False).run(*np.zeros((2, 3, 128), "f4"))
        ),
        "rows on a stream": attempt(rows_on_stream),
        "convolved": attempt(lambda: kernel("convolved").run(*np.zeros((2, 4, 128), "f4"))[0, 0]),
        "grid": attempt(grid),
        "grid again": attempt(grid),
        "grid, captured": attempt(grid, capturing=1),
        "grid, captured again": attempt(grid, capturing=1),
        "grid, profiled": attempt(profiled),
        "grid, no room": attempt(lambda: grid(device=1), clusters=3, devices=2),
        "fault": attempt(add, fail="cuMemcpyDtoH_v2"),
        "cluster 4": attempt(lambda: total(4)),
        "cluster 16": attempt(lambda: total(16)),
        "no room": attempt(lambda: total(16, device=1), clusters=0, devices=2),
        "no shared": attempt(lambda: total(4, device=1), fail="cuFuncSetAttribute", devices=2),
        "query": attempt(lambda: kernel("cluster_sum_4").max_active_clusters()),
        "no such device": attempt(lambda: kernel("cluster_sum_4").max_active_clusters(device=5)),
        "stream": attempt(on_stream, devices=2),
        "threads": attempt(from_threads, devices=3),
    }
    print(json.dumps(results, default=float))


if __name__ == "__main__":
    main()
