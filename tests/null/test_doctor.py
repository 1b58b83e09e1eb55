"""Each check of the doctor, on machines that have and that lack what it looks for."""

from __future__ import annotations

import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest

from crossfuse import _compat, doctor
from crossfuse.doctor import checks
from crossfuse.doctor.checks import Check
from crossfuse.errors import EnvironmentRefused, Refusal
from crossfuse.hardware import Gpu
from crossfuse.runtime.nvcc import NvccInfo

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), (13, 0))
A100 = Gpu("NVIDIA A100-SXM4-40GB", (8, 0), (13, 0))


def write_program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def gxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a stand-in g++ on an otherwise empty PATH; `fault` is what it says of a program."""

    def install(version: str, fault: str = "") -> str:
        path = tmp_path / "g++"
        answer = f'echo "<stdin>:5:2: error: {fault}" >&2; exit 1' if fault else "exit 0"
        write_program(path, f'test "$1" = --version && {{ echo "{version}"; exit; }}\n{answer}\n')
        return str(path)

    monkeypatch.setenv("PATH", str(tmp_path))
    return install


def test_collect_reports_every_check_once() -> None:
    report = doctor.collect()
    assert [check.name for check in report.checks] == [
        "python",
        "platform",
        "apache-tvm",
        "apache-tvm-ffi",
        "tvm entry point",
        "c++",
        "nvcc",
        "gpu",
        "torch",
        "cache",
    ]
    assert all(check.found for check in report.checks)
    assert all(bool(check.instead) == (check.status != "ok") for check in report.checks)


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 9, 18), "fail"), ((3, 10, 0), "ok"), ((3, 13, 2), "ok"), ((3, 14, 0), "fail")],
)
def test_python(monkeypatch: pytest.MonkeyPatch, version, status) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert checks.python().status == status


def test_platform_that_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(checks.platform, "system", lambda: "Linux")
    assert checks.system() == Check(
        "platform", "warn", "Linux aarch64", "use Linux on x86-64, the platform that is tested"
    )


def test_pins_show_the_refusal_of_the_import_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": None}
    monkeypatch.setattr(_compat, "installed_version", versions.get)
    assert checks.pins() == (
        Check("apache-tvm", "ok", "0.27.0.post1"),
        Check(
            "apache-tvm-ffi",
            "fail",
            "nothing installed",
            "run `pip install 'apache-tvm-ffi==0.1.14.post1'`",
        ),
    )


def test_entry_point_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    check = checks.entry_point()
    assert check.status == "warn"
    assert check.instead == "install the package, from a checkout with `pip install -e .`"


def test_entry_point_found(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("crossfuse", "crossfuse._autoload:register", "tvm.backends")
    monkeypatch.setattr(metadata, "entry_points", lambda group: (point,))
    assert checks.entry_point() == Check("tvm entry point", "ok", "crossfuse._autoload:register")


def install_torch(folder: Path, version: str, cuda: str) -> None:
    info = folder / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    )


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("2.13.0+cpu", "None", Check("torch", "ok", "2.13.0+cpu, CPU build")),
        ("2.13.0", "'13.0'", Check("torch", "ok", "2.13.0, CUDA 13.0")),
        (
            "2.7.1",
            "'12.6'",
            Check("torch", "warn", "2.7.1, CUDA 12.6", "run `pip install 'torch>=2.8'`"),
        ),
    ],
)
def test_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version, cuda, expected) -> None:
    install_torch(tmp_path, version, cuda)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert checks.torch() == expected


def test_torch_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "installed_version", lambda distribution: None)
    assert checks.torch() == Check(
        "torch",
        "warn",
        "none: models cannot come from torch",
        "run `pip install 'crossfuse[torch]'`",
    )


def test_cache_is_not_created_by_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    check = checks.cache()
    assert check == Check("cache", "ok", str(tmp_path / "new" / "crossfuse" / "cubin"))
    assert not (tmp_path / "new").exists()


def test_cache_below_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check = checks.cache()
    assert check.status == "fail"
    assert check.instead == "set XDG_CACHE_HOME to a folder that you can write to"


def test_cxx_that_compiles_the_probe(gxx) -> None:
    path = gxx("g++ 12.2.0")
    assert checks.cxx() == Check("c++", "ok", f"g++ 12.2.0 at {path}")


def test_cxx_missing(gxx) -> None:
    check = checks.cxx()
    assert (check.status, check.found) == ("fail", "no g++, clang++, c++")
    assert "apt-get install g++" in check.instead


def test_cxx_that_cannot_compile_the_probe(gxx) -> None:
    path = gxx("g++ 9.4.0", fault="#error g++ is older than 10")
    assert checks.cxx() == Check(
        "c++",
        "fail",
        f"g++ 9.4.0 at {path}, which says: #error g++ is older than 10",
        "install g++ 12 or newer (Debian and Ubuntu: apt-get install g++)",
    )


def test_nvcc_found(monkeypatch: pytest.MonkeyPatch) -> None:
    info = NvccInfo(Path("/opt/cuda/bin/nvcc"), "13.0.88", "CUDA_HOME", ())
    monkeypatch.setattr(checks, "find_nvcc", lambda: info)
    assert checks.nvcc() == Check("nvcc", "ok", "13.0.88 at /opt/cuda/bin/nvcc (CUDA_HOME)")


def test_nvcc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("nvcc", "PATH", "no nvcc", "nvcc 12.3 or newer", "install the CUDA toolkit")

    def missing() -> None:
        raise EnvironmentRefused(refusal)

    monkeypatch.setattr(checks, "find_nvcc", missing)
    assert checks.nvcc() == Check("nvcc", "fail", "no nvcc", "install the CUDA toolkit")


@pytest.mark.parametrize(
    ("gpus", "status", "found"),
    [
        ((), "warn", "none: the CPU checkers still work"),
        ((H100,), "ok", "NVIDIA H100 80GB HBM3, compute capability 9.0, driver for CUDA 13.0"),
        ((A100, H100), "ok", "NVIDIA H100 80GB HBM3, compute capability 9.0, driver for CUDA 13.0"),
        ((A100,), "warn", "NVIDIA A100-SXM4-40GB, compute capability 8.0, driver for CUDA 13.0"),
    ],
    ids=["none", "hopper", "hopper second", "older"],
)
def test_gpu(monkeypatch: pytest.MonkeyPatch, gpus, status, found) -> None:
    monkeypatch.setattr(checks, "find_gpus", lambda: gpus)
    check = checks.gpu()
    assert (check.status, check.found) == (status, found)


def test_gpu_with_an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_gpus", lambda: (Gpu("NVIDIA H100", (9, 0), (12, 8)),))
    check = checks.gpu()
    assert check.status == "warn"
    assert check.instead == "install an NVIDIA driver for CUDA 13.0 or newer"
