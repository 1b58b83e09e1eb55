"""What the doctor looks at, and its findings as plain values."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from crossfuse import _compat
from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import find_gpus
from crossfuse.runtime.nvcc import cache_directory, find_host_compiler, find_nvcc

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    name : str
        What was looked at, such as ``"nvcc"``.
    status : {"ok", "warn", "fail"}
        ``"warn"``: something works less well or only in part; ``"fail"``: kernels cannot be built.
    found : str
        What is there.
    instead : str
        What to do about it, as an imperative clause without a full stop; empty when all is well.

    Examples
    --------
    >>> Check("nvcc", "fail", "none", "pip install 'crossfuse[nvcc]'").status
    'fail'
    """

    name: str
    status: Status
    found: str
    instead: str = ""


@dataclass(frozen=True)
class Report:
    """All findings.

    Attributes
    ----------
    version : str
        Version of the package that made the report.
    checks : tuple[Check, ...]
        In the order in which they are shown.

    Examples
    --------
    >>> from crossfuse.doctor import collect
    >>> sorted({each.status for each in collect().checks} - {"ok", "info", "warn", "fail"})
    []
    """

    version: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing fails; warnings do not count."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Render as JSON-ready values.

        Returns
        -------
        dict[str, Any]
            Keys ``version``, ``ok`` and ``checks``, the last a list of the attributes of `Check`.
        """
        return {
            "version": self.version,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
        }


# Checks of Python, the installed packages and the folders; package metadata only, no imports.

_OLDEST_PYTHON = (3, 10)
_NEWEST_PYTHON = (3, 13)
_OLDEST_TORCH = (2, 8)
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"](?P<version>[^'\"]+)['\"]", re.MULTILINE)


def python() -> Check:
    """Check that this Python is one of those that the package supports, 3.10 to 3.13."""
    found = platform.python_version()
    if _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "create the environment with Python 3.10 to 3.13")


def system() -> Check:
    """Warn anywhere but on Linux on x86-64, the platform that the package is tested on."""
    found = f"{platform.system()} {platform.machine()}"
    if found == "Linux x86_64":
        return Check("platform", "ok", found)
    return Check("platform", "warn", found, "use Linux on x86-64, the platform that is tested")


def pins() -> tuple[Check, ...]:
    """Check every pinned upstream package; a missing one or another release fails."""
    refusals = {refusal.where: refusal for refusal in _compat.version_refusals()}
    checks = []
    for pin in _compat.PINS:
        refusal = refusals.get(pin.distribution)
        if refusal is None:
            checks.append(Check(pin.distribution, "ok", pin.version))
        else:
            checks.append(Check(pin.distribution, "fail", refusal.found, refusal.instead))
    return tuple(checks)


def entry_point() -> Check:
    """Check that TVM finds the package by itself, in worker processes too.

    It warns when the package is on the path without being installed.
    """
    for point in metadata.entry_points(group="tvm.backends"):
        if point.name == "crossfuse":
            return Check("tvm entry point", "ok", point.value)
    return Check(
        "tvm entry point",
        "warn",
        "none: worker processes that only import tvm lack the primitives",
        "install the package, from a checkout with `pip install -e .`",
    )


def torch() -> Check:
    """Check for torch and its CUDA version; it warns without 2.8 or newer.

    Only the torch front end needs it.
    """
    version = _compat.installed_version("torch")
    if version is None:
        found = "none: models cannot come from torch"
        return Check("torch", "warn", found, "run `pip install 'crossfuse[torch]'`")
    found = f"{version}, {_torch_build()}"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_TORCH:
        return Check("torch", "warn", found, "run `pip install 'torch>=2.8'`")
    return Check("torch", "ok", found)


def _torch_build() -> str:
    """CUDA version, from the file where torch has it: importing torch takes seconds."""
    source = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    match = _TORCH_CUDA.search(source.read_text()) if source.is_file() else None
    return f"CUDA {match['version']}" if match else "CPU build"


def cache() -> Check:
    """Check that the cache folder, or the nearest folder above it, can be written."""
    folder = cache_directory()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Check("cache", "ok", str(folder))
    found = f"{folder}, which cannot be written"
    return Check("cache", "fail", found, "set XDG_CACHE_HOME to a folder that you can write to")


# Checks of the compilers and the GPU.

_OLDEST_DRIVER_CUDA = (13, 0)
_HOPPER = (9, 0)
_SECONDS = 60

# What the emulator's code asks of the compiler: half precision arithmetic and fibers.
_PROBE = """
#include <ucontext.h>
#include <vector>
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 10
#error g++ is older than 10
#endif
_Float16 add(_Float16 a, float b) { return a + static_cast<_Float16>(b); }
std::vector<ucontext_t> fibers(2);
"""


def cxx() -> Check:
    """Check for the C++ compiler, which builds launchers and, for the CPU checkers, CUDA text.

    It fails without one, with a g++ older than 10, and with one that lacks ``_Float16``.
    """
    try:
        path = find_host_compiler()
    except EnvironmentRefused as error:
        return Check("c++", "fail", error.refusal.found, error.refusal.instead)
    version = _run(path, "--version").stdout.partition("\n")[0]
    probe = _run(path, "-std=c++17", "-fsyntax-only", "-x", "c++", "-", source=_PROBE)
    if probe.returncode == 0:
        return Check("c++", "ok", f"{version} at {path}")
    fault = probe.stderr.partition("error: ")[2].partition("\n")[0]
    return Check(
        "c++",
        "fail",
        f"{version} at {path}, which says: {fault}",
        "install g++ 12 or newer (Debian and Ubuntu: apt-get install g++)",
    )


def nvcc() -> Check:
    """Check for the CUDA compiler; says its version and where it was found."""
    try:
        info = find_nvcc()
    except EnvironmentRefused as error:
        return Check("nvcc", "fail", error.refusal.found, error.refusal.instead)
    return Check("nvcc", "ok", f"{info.version} at {info.path} ({info.origin})")


def gpu() -> Check:
    """Check for a Hopper GPU with a driver that runs what is built.

    It warns without one: everything but running kernels still works.
    """
    gpus = find_gpus()
    if not gpus:
        found = "none: the CPU checkers still work"
        return Check("gpu", "warn", found, "run the kernels on a machine with a Hopper GPU")
    best = max(gpus, key=lambda one: one.capability == _HOPPER)
    major, minor = best.capability
    cuda = "{}.{}".format(*best.driver_cuda)
    found = f"{best.name}, compute capability {major}.{minor}, driver for CUDA {cuda}"
    if best.capability != _HOPPER:
        advice = "use a GPU of compute capability 9.0, such as an H100 or H200"
        return Check("gpu", "warn", found, advice)
    if best.driver_cuda < _OLDEST_DRIVER_CUDA:
        return Check("gpu", "warn", found, "install an NVIDIA driver for CUDA 13.0 or newer")
    return Check("gpu", "ok", found)


def _run(path: Path, *arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [path, *arguments],
        input=source,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
