"""Where a CUDA compiler is looked for, and which one is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfuse.errors import EnvironmentRefused
from crossfuse.runtime import nvcc
from crossfuse.runtime.nvcc import find_nvcc

WHEEL_FILES = (
    "nvvm/bin/cicc",
    "include/crt/host_config.h",
    "include/cuda_fp16.h",
    "include/cccl/nv/target",
)


def fake(root: Path, version: str) -> Path:
    """Install a script that answers as nvcc of `version` does."""
    path = root / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    release = version.rsplit(".", 1)[0]
    path.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n"
        f"""echo '#$ INCLUDES="-I{root}/include" ' >&2\n"""
    )
    path.chmod(0o755)
    (root / "include").mkdir(exist_ok=True)
    return path


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any nvcc; returns an empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(nvcc, "_SYSTEM_ROOT", tmp_path / "absent")
    monkeypatch.setattr(nvcc.sys, "path", [])
    return tmp_path


def test_the_compiler_of_this_machine_is_described() -> None:
    found = find_nvcc()
    assert found.path.is_file()
    assert found.release >= nvcc.MINIMUM_RELEASE
    assert found.version.startswith("{}.{}.".format(*found.release))
    assert any((directory / "cuda_bf16.h").is_file() for directory in found.include_dirs)


def test_path_wins_over_cuda_home(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(nowhere / "home", "12.8.93")
    on_path = fake(nowhere / "path", "12.4.131")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    assert find_nvcc().origin == "CUDA_HOME"
    monkeypatch.setenv("PATH", f"{on_path.parent}:/bin")
    found = find_nvcc()
    assert (found.path, found.version, found.origin) == (on_path, "12.4.131", "PATH")
    assert found.include_dirs == (nowhere / "path" / "include",)


def test_an_old_compiler_is_passed_over(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake(nowhere / "old", "12.2.140")
    fake(nowhere / "absent", "13.0.88")
    monkeypatch.setenv("PATH", f"{old.parent}:/bin")
    assert find_nvcc().origin == str(nowhere / "absent")


def test_wheels_are_found_and_must_be_complete(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fake(nowhere / "site" / "nvidia" / "cu13", "13.0.88")
    monkeypatch.setattr(nvcc.sys, "path", [str(nowhere / "site")])
    for name in WHEEL_FILES[:-1]:
        file = path.parent.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with pytest.raises(EnvironmentRefused) as caught:
        find_nvcc()
    assert caught.value.refusal.found == f"{path} (PyPI wheels): without nvidia-cuda-cccl"
    last = path.parent.parent / WHEEL_FILES[-1]
    last.parent.mkdir(parents=True)
    last.touch()
    assert find_nvcc().origin == "PyPI wheels"
