"""Folders of kernels: written ahead of time, loaded without TVM, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from cpu.runtime.images import vector_add
from crossfuse.errors import ArtefactRefused
from crossfuse.hardware import device
from crossfuse.runtime import Artefact, build_library, load, load_kernels, write_kernels
from crossfuse.runtime.load import check_limits, gpu_limits

# TVM cannot be imported there: only its metadata are looked at.
LOADED_ALONE = """
import sys
sys.modules["tvm"] = sys.modules["torch"] = None
import crossfuse
kernels = crossfuse.load_kernels(sys.argv[1])
for name, kernel in kernels.items():
    print(name, [each.name for each in kernel.buffers], kernels.table.device)
print(crossfuse.load(sys.argv[1] + "/vector_add.so").name)
"""


PLAN = {"family": "threads", "tiles": {"threads": 128}}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    folder = tmp_path_factory.mktemp("built")
    artefact = build_library(vector_add(), folder, metadata={"plan": PLAN})
    write_kernels(artefact.shared_object.parent, [artefact], {"model": "sums"})
    return artefact


@pytest.fixture
def folder(built: Artefact, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(built.shared_object.parent, tmp_path / "kernels"))


def message(action: Callable[[], Any]) -> str:
    with pytest.raises(ArtefactRefused) as caught:
        action()
    return str(caught.value)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.slow
def test_a_folder_is_loaded_where_tvm_is_not(built: Artefact) -> None:
    folder = built.shared_object.parent
    command = [sys.executable, "-c", LOADED_ALONE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [each.name for each in built.manifest.buffers]
    name = built.manifest.name
    assert done.stdout == f"{name} {names} nvidia-h100\n{name}\n", done.stderr


def test_what_the_table_says(built: Artefact) -> None:
    kernels = load_kernels(built.shared_object.parent)
    assert list(kernels) == [built.manifest.name] and len(kernels) == 1
    table = kernels.table
    assert (table.arch, table.metadata) == ("sm_90a", {"model": "sums"})
    assert table.limits["sms"] == 132 and table.versions == built.manifest.versions
    assert table.sources == {built.manifest.name: built.manifest.cuda_sha256}
    assert table.plans == {built.manifest.name: PLAN}
    kernels.register()
    assert tvm_ffi.get_global_func(built.manifest.name) is not None


def test_another_release_of_tvm_ffi_is_refused(folder: Path) -> None:
    path = folder / "vector_add.json"
    edit(path, versions=json.loads(path.read_text())["versions"] | {"tvm-ffi": "0.1.0"})
    text = message(lambda: load(folder / "vector_add.so"))
    assert text.startswith("artefact-version: ") and "vector_add.so: " in text
    assert "found a library built with apache-tvm-ffi 0.1.0; limit: apache-tvm-ffi 0.1.14" in text
    assert text.endswith("Instead: build the library again here, or install that release.")


def test_a_smaller_gpu_is_refused(built: Artefact) -> None:
    manifest = built.manifest
    check_limits(manifest, {"sms": 114, "max_shared_bytes": device("nvidia-h100").max_shared_bytes})
    check_limits(manifest, {})
    launches = tuple(replace(each, cooperative=True) for each in manifest.launches)
    together = replace(manifest, launches=launches)
    assert message(lambda: check_limits(together, {"sms": 114})) == (
        "gpu-limits: vector_add: found a GPU of 114 multiprocessors; limit: 132, those of "
        "nvidia-h100. Instead: run it on such a GPU, or compile for this one."
    )
    text = message(lambda: check_limits(manifest, {"max_shared_bytes": 101376}))
    assert "found a GPU of 101376 bytes of shared memory in a CTA; limit: 232448" in text
    assert isinstance(gpu_limits(), dict)


def test_damaged_folders_are_refused(folder: Path) -> None:
    table, manifest = folder / "kernels.json", folder / "vector_add.json"
    manifest.write_text(manifest.read_text() + " ")
    text = message(lambda: load_kernels(folder))
    assert (
        "kernel-table: " in text and "found a file of hash" in text and "as in kernels.json" in text
    )
    manifest.unlink()
    assert "vector_add.json: found no such file" in message(lambda: load_kernels(folder))
    edit(table, kernels={"../vector_add": "0"})
    assert "'../vector_add'; limit: the name of a file in" in message(lambda: load_kernels(folder))
    edit(table, format_version=9)
    text = message(lambda: load_kernels(folder))
    assert "found format version 9; limit: format version 2" in text
    table.write_text("{")
    assert "at line 1, column 2; limit: JSON" in message(lambda: load_kernels(folder))


def test_only_libraries_of_one_folder_and_device_make_a_table(
    built: Artefact, tmp_path: Path
) -> None:
    assert "found no library; limit: at least one" in message(lambda: write_kernels(tmp_path, []))
    text = message(lambda: write_kernels(tmp_path, [built]))
    assert f"limit: {tmp_path / 'vector_add.so'}" in text
    other = replace(built, manifest=replace(built.manifest, device="nvidia-h200"))
    text = message(lambda: write_kernels(built.shared_object.parent, [built, other]))
    assert "found a library for nvidia-h200; limit: nvidia-h100, as vector_add" in text
