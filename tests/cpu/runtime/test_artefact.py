"""A built library, its manifest, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi

from cpu.runtime.images import bfloat16_twice, vector_add
from crossfuse.errors import ArtefactRefused
from crossfuse.files import sha256
from crossfuse.lower.image import ROW_COUNT, BufferSpec, KernelImage, Launch
from crossfuse.runtime import Artefact, Manifest, build_library, compile_cubin, load
from crossfuse.runtime.launcher import DTYPES, generate_launcher


def test_the_manifest_tells_what_the_library_is(added: Artefact) -> None:
    manifest = added.manifest
    image = vector_add()
    assert (added.shared_object.name, added.manifest_path.name) == (
        "vector_add.so",
        "vector_add.json",
    )
    assert (manifest.name, manifest.device, manifest.arch) == (
        "vector_add",
        "nvidia-h100",
        "sm_90a",
    )
    assert manifest.buffers == image.buffers
    assert manifest.launches == image.launches
    assert manifest.cuda_sha256 == sha256(image.cuda.encode())
    assert manifest.cubin_sha256 == sha256(compile_cubin(image.cuda).data)
    assert manifest.limits["max_shared_bytes"] == 232448
    assert manifest.versions["tvm-ffi"] == "0.1.14.post1"
    assert set(manifest.versions) == {"crossfuse", "tvm", "tvm-ffi", "nvcc"}
    assert [usage.kernel for usage in manifest.resources] == ["add_kernel"]
    assert manifest.metadata == {"plan": {"tile": [1, 128]}, "source_sha256": "00ff"}
    assert manifest.trace == "b0 = sch.get_sblock('C')"


def test_the_manifest_goes_round(added: Artefact) -> None:
    assert Manifest.from_json(added.manifest.to_json(), "here") == added.manifest
    assert load(added.shared_object).manifest == added.manifest
    assert load(str(added.shared_object)).buffers == vector_add().buffers


def test_tvm_ffi_alone_reads_the_library(added: Artefact) -> None:
    module = tvm_ffi.load_module(str(added.shared_object))
    record = json.loads(added.manifest_path.read_text())
    embedded = json.loads(module["vector_add_manifest"]())
    assert record == embedded | {"library_sha256": sha256(added.shared_object.read_bytes())}
    cubin = module["vector_add_cubin"]()
    assert sha256(bytes(cubin)) == added.manifest.cubin_sha256
    with pytest.raises(TypeError, match="argument-count: vector_add: found 0 arguments"):
        module["vector_add"]()


def test_the_same_image_gives_the_same_bytes(added: Artefact, tmp_path: Path) -> None:
    again = build_library(
        vector_add(),
        tmp_path / "other.so",
        metadata=added.manifest.metadata,
        schedule_trace=added.manifest.trace,
        cache=False,
    )
    assert again.shared_object == tmp_path / "other.so"
    assert again.shared_object.read_bytes() == added.shared_object.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "other.so"]


def test_the_launcher_spells_every_type_and_shape() -> None:
    buffers = tuple(BufferSpec(f"b_{name}", (2,), name, False) for name in DTYPES)
    scalar = BufferSpec("scalar", (), "float32", True)
    launch = Launch("k", (8, 2, 1), (32, 4, 1), (4, 1, 1), 1024, ("scalar", "b_bfloat16"))
    plain = Launch("empty", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, (), cooperative=True)
    text = generate_launcher(
        KernelImage("all_types", "", (*buffers, scalar), (launch, plain)), "sm_90a"
    )
    position = [buffer.name for buffer in buffers].index("b_bfloat16")
    assert f'{{"b_bfloat16", shape_{position}, 1, {{4, 16, 1}}, false, false}},' in text
    assert '{"scalar", nullptr, 0, {2, 32, 1}, true, false},' in text
    assert '{"k", {8, 2, 1}, {32, 4, 1}, {4, 1, 1}, 1024, arguments_0, 2, nullptr, false, ' in text
    assert (
        '{"empty", {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, 0, nullptr, 0, nullptr, false, true},' in text
    )
    assert f"arguments_0[] = {{{len(buffers)}, {position}}};" in text
    assert '"all_types", "sm_90a", 9, 0, buffers' in text


def test_the_launcher_spells_the_number_of_rows() -> None:
    buffers = (BufferSpec("x", (4, 8), "float32", True, rows=True),)
    launch = Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (ROW_COUNT, "x"))
    text = generate_launcher(KernelImage("rows", "", buffers, (launch,)), "sm_90a")
    assert '{"x", shape_0, 2, {2, 32, 1}, true, true},' in text
    assert "arguments_0[] = {crossfuse::kRowCount, 0};" in text


def test_a_library_can_be_built_again_and_loaded_in_one_process(tmp_path: Path) -> None:
    first = load(build_library(vector_add(), tmp_path).shared_object)
    second = load(build_library(vector_add(rows=8), tmp_path).shared_object)
    assert [kernel.buffers[0].shape for kernel in (first, second)] == [(4, 128), (8, 128)]
    tensor = np.zeros((8, 128), np.float32)
    with pytest.raises(ArtefactRefused, match=r"limit: \(4, 128\)"):
        first(tensor, tensor, tensor)
    with pytest.raises(ArtefactRefused, match="argument-overlap"):
        second(tensor, tensor, tensor)


def test_outputs_may_stand_anywhere(tmp_path: Path) -> None:
    kernel = load(build_library(bfloat16_twice(), tmp_path).shared_object)
    assert [buffer.output for buffer in kernel.buffers] == [True, False]
    assert kernel.name == "bfloat16_twice"
