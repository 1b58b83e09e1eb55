"""Checks of the compilers and the GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from crossfuse.doctor.report import Check
from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import find_gpus
from crossfuse.runtime.nvcc import find_host_compiler, find_nvcc

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
