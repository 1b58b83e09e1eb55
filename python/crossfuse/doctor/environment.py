"""Checks of Python, the installed packages and the folders; package metadata only, no imports."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from crossfuse import _compat
from crossfuse.doctor.report import Check
from crossfuse.runtime.nvcc import cache_directory

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
