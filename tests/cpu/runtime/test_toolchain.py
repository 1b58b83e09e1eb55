"""Missing and broken compilers are refused with what to install."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpu.runtime.images import vector_add
from crossfuse.errors import EnvironmentRefused, LoweringRefused
from crossfuse.runtime import (
    build_library,
    compile_cubin,
    find_host_compiler,
    find_nvcc,
    launcher,
    nvcc,
)


def message(error: type[Exception], action: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvcc, "_candidates", lambda: iter(()))
    install = (
        "install the CUDA toolkit 12.3 or newer, or run: pip install "
        '"nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" '
        '"nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*"'
    )
    place = "nvcc: PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, PyPI wheels: "
    for action in (find_nvcc, lambda: build_library(vector_add(), tmp_path)):
        assert message(EnvironmentRefused, action) == (
            f"{place}found no nvcc; limit: nvcc 12.3 or newer. Instead: {install}."
        )
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho no licence\n")
    broken.chmod(0o755)
    monkeypatch.setattr(nvcc, "_candidates", lambda: iter([("PATH", broken)]))
    assert message(EnvironmentRefused, find_nvcc) == (
        f"{place}found {broken} (PATH): no version in its answer 'no licence'; limit: nvcc 12.3 or "
        f"newer. Instead: {install}."
    )


def test_no_host_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = find_nvcc()
    monkeypatch.setenv("PATH", str(tmp_path))
    text = (
        "host-compiler: PATH: found no g++, clang++, c++; limit: a C++17 compiler. Instead: "
        "install g++ (Debian and Ubuntu: apt-get install g++)."
    )
    assert message(EnvironmentRefused, find_host_compiler) == text
    action = partial(compile_cubin, "text", nvcc=info, cache=False)
    assert message(EnvironmentRefused, action) == text


def test_a_broken_host_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 'fatal error: no headers' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launcher, "find_host_compiler", lambda: fake)
    assert message(EnvironmentRefused, lambda: build_library(vector_add(), tmp_path)) == (
        f"launcher-compile: {fake}: found fatal error: no headers; limit: a C++17 compiler and the "
        "headers of apache-tvm-ffi. Instead: repair the compiler, or install "
        "apache-tvm-ffi==0.1.14.post1 again."
    )


def test_the_compilers_own_text_is_kept() -> None:
    action = partial(compile_cubin, 'extern "C" __global__ void k() { undeclared = 1; }')
    text = message(LoweringRefused, action)
    assert text.startswith(f"cuda-compile: nvcc {find_nvcc().version} (")
    assert 'kernel.cu(1): error: identifier "undeclared" is undefined' in text
    assert text.endswith(
        "limit: a compilation without errors. Instead: change the schedule, or report the "
        "generated text if its schedule is legal."
    )


def test_faults_of_the_installation_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho 'nvcc fatal   : Could not open input file' >&2\nexit 1\n")
    script.chmod(0o755)
    fake = replace(find_nvcc(), path=script, version="13.0.99")
    action = partial(compile_cubin, "text", nvcc=fake, cache=False)
    assert message(EnvironmentRefused, action) == (
        f"cuda-compile: nvcc 13.0.99 ({script}): found nvcc fatal   : Could not open input file; "
        "limit: a compilation without errors. Instead: repair this installation: a host compiler "
        "that nvcc takes, CUDA parts of one release."
    )
    script.write_text("#!/bin/sh\nexec sleep 5\n")
    action = partial(compile_cubin, "text", nvcc=fake, cache=False, timeout=0.2)
    assert "found no cubin after 0.2 s;" in message(LoweringRefused, action)
