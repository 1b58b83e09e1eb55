"""Artefacts and arguments that do not fit are refused with exact sentences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from cpu.runtime.fake_cuda import aligned, on_gpu
from cpu.runtime.images import vector_add
from crossfuse.errors import ArtefactRefused, EnvironmentRefused
from crossfuse.files import sha256
from crossfuse.runtime import (
    Artefact,
    LoadedKernel,
    build_library,
    load,
)

NO_DRIVER = (
    "cuda-driver: libcuda.so.1: found libcuda.so.1: cannot open shared object file: No such file "
    "or directory; limit: an NVIDIA driver of CUDA 12.3 or newer. Instead: run on a machine with "
    "an NVIDIA GPU of this library's architecture and its driver."
)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    return build_library(vector_add(), tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def kernel(artefact: Artefact) -> LoadedKernel:
    return load(artefact.shared_object)


@pytest.fixture
def copy(artefact: Artefact, tmp_path: Path) -> Path:
    """A copy of the library and its manifest, to be damaged."""
    shutil.copy(artefact.manifest_path, tmp_path)
    return Path(shutil.copy(artefact.shared_object, tmp_path))


def message(error: type[Exception], action: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape or (4, 128), dtype)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (ones(), ones()),
            "argument-count: vector_add: found 2 arguments; limit: 3 (A, B, C). Instead: pass the "
            "inputs and the outputs, in this order.",
        ),
        (
            (ones(), ones(128, 4), ones()),
            "argument-shape: argument 1 'B' of vector_add: found (128, 4); limit: (4, 128). "
            "Instead: pass a tensor of that shape, or compile the kernel for this one.",
        ),
        (
            (ones(), ones(512), ones()),
            "argument-shape: argument 1 'B' of vector_add: found (512,); limit: (4, 128). "
            "Instead: pass a tensor of that shape, or compile the kernel for this one.",
        ),
        (
            (ones(dtype=ml_dtypes.bfloat16), ones(), ones()),
            "argument-dtype: argument 0 'A' of vector_add: found bfloat16; limit: float32. "
            "Instead: convert the tensor, or compile the kernel for its element type.",
        ),
        (
            (ones(dtype=ml_dtypes.float8_e4m3fn), ones(), ones()),
            "argument-dtype: argument 0 'A' of vector_add: found float8_e4m3fn; limit: float32. "
            "Instead: convert the tensor, or compile the kernel for its element type.",
        ),
        (
            (ones(dtype=np.complex64), ones(), ones()),
            "argument-dtype: argument 0 'A' of vector_add: found complex64; limit: float32. "
            "Instead: convert the array, or compile the kernel for its element type.",
        ),
        (
            (ones(dtype=">f4"), ones(), ones()),
            "argument-dtype: argument 0 'A' of vector_add: found dtype('>f4'); limit: float32. "
            "Instead: convert the array, or compile the kernel for its element type.",
        ),
        (
            (ones(4, 256)[:, ::2], ones(), ones()),
            "argument-layout: argument 0 'A' of vector_add: found strides (256, 2) of shape (4, "
            "128); limit: a contiguous row-major tensor. Instead: pass a contiguous copy of it.",
        ),
        (
            (ones(), ones(), torch.ones(4, 128)),
            "argument-kind: vector_add: found ndarray, ndarray, Tensor; limit: numpy arrays alone, "
            "or no numpy array. Instead: convert the arguments to one framework.",
        ),
        (
            (torch.ones(4, 128),) * 3,
            "argument-device: argument 0 'A' of vector_add: found cpu:0; limit: a CUDA device. "
            "Instead: move the tensor to the GPU before the call.",
        ),
        (
            (2.5, torch.ones(4, 128), torch.ones(4, 128)),
            "argument-kind: argument 0 'A' of vector_add: found a float; limit: a tensor. Instead: "
            "pass a tensor that speaks DLPack.",
        ),
        *(
            (
                (each, torch.ones(4, 128), torch.ones(4, 128)),
                f"argument-kind: argument 0: found a {kind} tensor; limit: tensors whose elements "
                "lie in memory as they are. Instead: pass a copy that has them, such as "
                "tensor.to_dense().",
            )
            for kind, each in {
                "meta": torch.ones(4, 128, device="meta"),
                "sparse_coo": torch.ones(4, 128).to_sparse(),
            }.items()
        ),
        (
            (torch.ones(4, 128, dtype=torch.float16),) * 3,
            "argument-dtype: argument 0 'A' of vector_add: found float16; limit: float32. Instead: "
            "convert the tensor, or compile the kernel for its element type.",
        ),
    ],
)
def test_arguments(kernel: LoadedKernel, arguments: tuple[Any, ...], text: str) -> None:
    assert message(ArtefactRefused, lambda: kernel(*arguments)) == text


def test_outputs_that_cannot_be_written(kernel: LoadedKernel) -> None:
    fixed, shared = ones(), ones()
    fixed.flags.writeable = False
    assert message(ArtefactRefused, lambda: kernel(ones(), ones(), fixed)) == (
        "argument-layout: argument 2 'C' of vector_add: found a read-only array; limit: a "
        "writeable array for an output. Instead: pass a copy of it."
    )
    assert message(ArtefactRefused, lambda: kernel(ones(), shared, shared)) == (
        "argument-overlap: output 'C' of vector_add: found memory shared with argument 'B'; limit: "
        "outputs that overlap no other argument. Instead: pass a separate tensor for the output."
    )


def test_tensors_of_a_gpu(kernel: LoadedKernel) -> None:
    first = on_gpu(aligned((4, 128)))
    elsewhere = on_gpu(aligned((4, 128)), device=1)
    assert message(ArtefactRefused, lambda: kernel(first, elsewhere, first)) == (
        "argument-device: argument 1 'B' of vector_add: found cuda:1; limit: cuda:0, where the "
        "first argument lies. Instead: move all tensors to one device."
    )
    shifted = on_gpu(aligned((4, 128), offset=4))
    assert message(ArtefactRefused, lambda: kernel(first, shifted, first)) == (
        "argument-alignment: argument 1 'B' of vector_add: found an address 4 bytes past a 16-byte "
        "boundary; limit: an address that is a multiple of 16 bytes. Instead: pass a copy (clone) "
        "of the view."
    )


def test_run(kernel: LoadedKernel) -> None:
    assert message(ArtefactRefused, lambda: kernel.run(ones())) == (
        "argument-count: run of vector_add: found 1 inputs; limit: 2 (A, B). Instead: pass the "
        "inputs alone, or call the kernel itself with its outputs."
    )
    assert message(ArtefactRefused, lambda: kernel.run([1.0], [2.0])) == (
        "argument-kind: run of vector_add: found a first input of type list; limit: a torch tensor "
        "or a numpy array. Instead: allocate the outputs and call the kernel itself."
    )
    assert message(ArtefactRefused, lambda: kernel.max_active_clusters(launch=1)) == (
        "launch-index: vector_add: found 1; limit: 0 to 0. Instead: pass the index of a launch."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU and its driver")
def test_a_machine_without_a_driver(kernel: LoadedKernel) -> None:
    assert message(EnvironmentRefused, lambda: kernel.run(ones(), ones())) == NO_DRIVER
    assert message(EnvironmentRefused, lambda: kernel(ones(), ones(), ones())) == NO_DRIVER
    assert message(EnvironmentRefused, kernel.max_active_clusters) == NO_DRIVER
    three = [on_gpu(aligned((4, 128))) for _ in "ABC"]
    assert message(EnvironmentRefused, lambda: kernel(*three)) == NO_DRIVER


# Files


def edit(library: Path, **changes: Any) -> None:
    path = library.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_files(copy: Path) -> None:
    manifest = copy.with_suffix(".json")
    manifest.unlink()
    text = (
        "found no such file or directory; limit: the .so and the .json that were built together. "
    )
    text += "Instead: "
    text += "copy both files, or build the library again."
    assert message(ArtefactRefused, lambda: load(copy)) == f"artefact-file: {manifest}: {text}"
    absent = copy.with_name("absent.so")
    assert message(ArtefactRefused, lambda: load(absent)) == f"artefact-file: {absent}: {text}"


def test_a_damaged_library(copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    wanted = sha256(bytes(data))
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)
    assert message(ArtefactRefused, lambda: load(copy)) == (
        f"manifest: {copy}: found a file of hash {sha256(bytes(data))}; limit: {wanted}, as its "
        ".json says. Instead: build or copy the .so and the .json again."
    )


def test_a_file_that_is_no_library(copy: Path) -> None:
    copy.write_bytes(b"text")
    edit(copy, library_sha256=sha256(b"text"))
    text = message(ArtefactRefused, lambda: load(copy))
    # tvm_ffi raises a RuntimeError, or TVM's own subclass of it once TVM has been imported.
    found = text.removeprefix(f"manifest: {copy}: found ").partition(":")[0]
    assert found in ("RuntimeError", "InternalError")
    assert "limit: a kernel library of vector_add. Instead: build or copy" in text


def test_a_manifest_of_another_library(copy: Path) -> None:
    edit(copy, arch="sm_100a", trace="other")
    assert message(ArtefactRefused, lambda: load(copy)) == (
        f"manifest: {copy}: found another arch, trace inside; limit: that of the .json file. "
        "Instead: build or copy the .so and the .json again."
    )
    edit(copy, name="vector_sub")
    assert message(ArtefactRefused, lambda: load(copy)).startswith(
        f"manifest: {copy}: found AttributeError: Module has no function 'vector_sub_manifest'"
    )


def test_a_manifest_of_another_format(copy: Path) -> None:
    edit(copy, format_version=99)
    assert message(ArtefactRefused, lambda: load(copy)) == (
        f"manifest: {copy.with_suffix('.json')}: found format version 99; limit: format version 2. "
        "Instead: build the library again with the installed crossfuse."
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "{",
            "found Expecting property name enclosed in double quotes at line 1, column 2; limit: ",
        ),
        ("[]", "found a list of 0 entries; limit: an object."),
        ("{}", "found format version null; limit: format version 2."),
        ('{"format_version": 2}', "found name: nothing; limit: all fields."),
        ("\udcff", "found invalid start byte at byte 0; limit: the .so and the .json"),
    ],
)
def test_a_manifest_that_cannot_be_read(copy: Path, text: str, found: str) -> None:
    path = copy.with_suffix(".json")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert f": {path}: {found}" in message(ArtefactRefused, lambda: load(copy))


def test_metadata_that_json_cannot_hold(tmp_path: Path) -> None:
    action = partial(build_library, vector_add(), tmp_path, metadata={"plan": {1, 2}})
    assert message(ArtefactRefused, action) == (
        "manifest: metadata of vector_add: found Object of type set is not JSON serializable; "
        "limit: JSON values. Instead: convert the metadata to text, numbers, lists and "
        "dictionaries."
    )
    assert list(tmp_path.iterdir()) == []
