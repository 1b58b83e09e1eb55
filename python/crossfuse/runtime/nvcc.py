"""CUDA compilers: found in a toolkit or in wheels of PyPI, and called to make cubins.

A host compiler, which nvcc needs too, builds launchers. Cubins are kept on disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from crossfuse.calls import Seconds, checked
from crossfuse.errors import EnvironmentRefused, LoweringRefused, RefusedError, refuse
from crossfuse.files import scratch, sha256
from crossfuse.runtime.manifest import ResourceUsage, parse_resources
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    from crossfuse.cache import Entry


MINIMUM_RELEASE = (12, 3)
"""First release whose ptxas takes everything that is generated for ``sm_90a``."""

WHEELS = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)
"""PyPI packages that together compile a kernel; all of one CUDA release."""

# A file of each wheel that every compilation reads, so that a missing wheel is named instead of
# surfacing as a missing header.
_WHEEL_FILES = {
    "nvidia-nvvm": ("nvvm/bin/cicc",),
    "nvidia-cuda-crt": ("include/crt/host_config.h",),
    "nvidia-cuda-runtime": ("include/cuda_fp16.h",),
    "nvidia-cuda-cccl": ("include/nv/target", "include/cccl/nv/target"),
}
_SYSTEM_ROOT = Path("/usr/local/cuda")
_INSTALL = "install the CUDA toolkit 12.3 or newer, or run: pip install " + " ".join(
    f'"{wheel}==13.0.*"' for wheel in WHEELS
)


@dataclass(frozen=True)
class NvccInfo:
    """A CUDA compiler that can build for ``sm_90a``.

    Attributes
    ----------
    path : pathlib.Path
        The ``nvcc`` program.
    version : str
        Its version, such as ``"13.0.88"``.
    origin : str
        Where it was found, such as ``"PATH"`` or ``"PyPI wheels"``.
    include_dirs : tuple[pathlib.Path, ...]
        Directories of the CUDA headers that it compiles with.

    Examples
    --------
    >>> from crossfuse.runtime import find_nvcc
    >>> find_nvcc().path.name
    'nvcc'
    """

    path: Path
    version: str
    origin: str
    include_dirs: tuple[Path, ...]

    @property
    def release(self) -> tuple[int, int]:
        """The CUDA release, such as ``(13, 0)``."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def find_nvcc() -> NvccInfo:
    """Find a CUDA compiler for ``sm_90a``.

    Looks in ``PATH``, ``CUDA_HOME``, ``CUDA_PATH``, ``/usr/local/cuda`` and the CUDA wheels of
    this Python environment, in this order, and takes the first that is recent enough.

    Returns
    -------
    NvccInfo
        The compiler.

    Raises
    ------
    EnvironmentRefused
        If there is none; the text lists what was found instead and what to install.

    Examples
    --------
    >>> found = find_nvcc()
    >>> found.release >= (12, 3)
    True
    """
    rejected: list[str] = []
    for origin, path in _candidates():
        found = _probe(str(path), path.stat().st_mtime_ns)
        if isinstance(found, str):
            rejected.append(f"{path} ({origin}): {found}")
        elif found.release < MINIMUM_RELEASE:
            rejected.append(f"{path} ({origin}): version {found.version}")
        elif missing := _missing_wheels(origin, path):
            rejected.append(f"{path} ({origin}): without {', '.join(missing)}")
        else:
            return replace(found, origin=origin)
    raise refuse(
        EnvironmentRefused,
        "nvcc",
        "PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, PyPI wheels",
        found="; ".join(rejected) or "no nvcc",
        limit=f"nvcc {MINIMUM_RELEASE[0]}.{MINIMUM_RELEASE[1]} or newer",
        instead=_INSTALL,
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    on_path = shutil.which("nvcc")
    if on_path:
        yield "PATH", Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        if root and (path := Path(root) / "bin" / "nvcc").is_file():
            yield variable, path
    if (path := _SYSTEM_ROOT / "bin" / "nvcc").is_file():
        yield str(_SYSTEM_ROOT), path
    for entry in filter(None, sys.path):
        for path in sorted(Path(entry).glob("nvidia/cu*/bin/nvcc"), reverse=True):
            yield "PyPI wheels", path


def _missing_wheels(origin: str, path: Path) -> list[str]:
    if origin != "PyPI wheels":
        return []
    root = path.parent.parent
    return [
        wheel
        for wheel, files in _WHEEL_FILES.items()
        if not any((root / file).is_file() for file in files)
    ]


@lru_cache(maxsize=16)
def _probe(path: str, modified: int) -> NvccInfo | str:
    """Ask nvcc for its version and header directories; a string says why it is unusable.

    `modified` is part of the cache key, so that a replaced compiler is asked again.
    """
    del modified
    text = _run(path, "--version")
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", text)
    if match is None:
        return f"no version in its answer {text.strip()[:200]!r}"
    return NvccInfo(Path(path), match[1], "", _include_dirs(path))


def _include_dirs(path: str) -> tuple[Path, ...]:
    # A dry run prints the profile variables; deriving them from the path would fail for wrapper
    # scripts, which distributions install in PATH.
    text = _run(path, "--dryrun", "-cubin", "-x", "cu", "/dev/null", "-o", "/dev/null")
    found: list[Path] = []
    for line in text.splitlines():
        match = re.match(r"#\$ (?:SYSTEM_)?INCLUDES=(.*)", line)
        for name in re.findall(r'"(?:-I)?([^"]+)"', match[1]) if match else ():
            directory = Path(name)
            if directory.is_dir() and directory.resolve() not in found:
                found.append(directory.resolve())
    return tuple(found)


def _run(path: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


# Finding the C++ compiler that builds launchers (nvcc needs one too).

COMPILERS = ("g++", "clang++", "c++")


def find_host_compiler() -> Path:
    """Find a C++17 compiler in ``PATH``.

    Returns
    -------
    pathlib.Path
        The first of `COMPILERS`.

    Raises
    ------
    EnvironmentRefused
        If there is none.

    Examples
    --------
    >>> compiler = find_host_compiler()
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return Path(path)
    raise refuse(
        EnvironmentRefused,
        "host-compiler",
        "PATH",
        found="no " + ", ".join(COMPILERS),
        limit="a C++17 compiler",
        instead="install g++ (Debian and Ubuntu: apt-get install g++)",
    )


# Compiling generated CUDA to a cubin, and a disk cache.

# No --use_fast_math: results follow the numerics of the generated text. The suppressed
# diagnostics are unused variables (177, 550) and constant ranges (1046) of generated text.
_FLAGS = ("-std=c++17", "-cubin", "-Xptxas", "-v", "--diag-suppress", "177,550,1046")
# Failures of the installation rather than of the text.
_ENVIRONMENT_FAULTS = (
    "nvcc fatal",
    "unsupported GNU version",
    "unsupported clang version",
    "Unsupported .version",  # ptxas and cicc of different CUDA releases
)


@dataclass(frozen=True)
class Cubin:
    """A compiled cubin.

    Attributes
    ----------
    data : bytes
        The ELF image.
    resources : tuple[ResourceUsage, ...]
        One entry for each kernel, in the order of compilation.
    log : str
        The compiler's whole output: resource lines and warnings.
    nvcc_version : str
        Version of the compiler that made it.

    Examples
    --------
    >>> usage = ResourceUsage("main_kernel", 168, 0, 0, 0, 0, barriers=1)
    >>> cubin = Cubin(b"", (usage,), log="", nvcc_version="13.0.88")
    >>> cubin.usage("main_kernel").summary
    '168 registers, no spills'
    """

    data: bytes
    resources: tuple[ResourceUsage, ...]
    log: str
    nvcc_version: str

    def usage(self, kernel: str) -> ResourceUsage | None:
        """Resources of one kernel, or None where the cubin has no such kernel.

        Parameters
        ----------
        kernel : str
            Name of the ``__global__`` function.

        Returns
        -------
        ResourceUsage | None
            What ptxas reported.
        """
        return next((entry for entry in self.resources if entry.kernel == kernel), None)


@checked
def compile_cubin(
    cuda: str,
    *,
    arch: str = "sm_90a",
    nvcc: NvccInfo | None = None,
    cache: bool | str | os.PathLike[str] = True,
    timeout: Seconds = 900.0,
) -> Cubin:
    """Compile CUDA text to a cubin.

    Parameters
    ----------
    cuda : str
        CUDA C++ with ``extern "C" __global__`` kernels.
    arch : str
        Real architecture, such as ``"sm_90a"``.
    nvcc : NvccInfo, optional
        The compiler; `find_nvcc` by default.
    cache : bool or path
        True keeps results in `cache_directory`, a path keeps them there, False keeps none.
    timeout : float
        Seconds after which the compiler is stopped.

    Returns
    -------
    Cubin
        The cubin and its resources.

    Raises
    ------
    EnvironmentRefused
        If there is no usable nvcc or C++ compiler.
    LoweringRefused
        If the compiler rejects the text; its own messages are kept.

    Examples
    --------
    >>> text = 'extern "C" __global__ void fill(float* out) { out[threadIdx.x] = 1.0f; }'
    >>> cubin = compile_cubin(text, cache=False)
    >>> cubin.usage("fill").spill_bytes  # of one thread
    0
    """
    from crossfuse.cache import Shelf

    nvcc = nvcc or find_nvcc()
    target = arch.removeprefix("sm_")
    flags = (*_FLAGS, "-gencode", f"arch=compute_{target},code=sm_{target}")
    if cache is False:
        return _cubin(_compile(cuda, nvcc, flags, timeout), nvcc)
    kept = Shelf(cache_directory() if cache is True else Path(cache), ".cubin")
    key = sha256(json.dumps([cuda, nvcc.version, flags]).encode())
    found = kept.read(key, lambda entry: _cubin(entry, nvcc))
    if found is None:
        entry = _compile(cuda, nvcc, flags, timeout)
        kept.write(key, entry)
        found = _cubin(entry, nvcc)
    return found


def cache_directory() -> Path:
    """Where cubins are kept between runs: the user's cache directory of this platform.

    Returns
    -------
    pathlib.Path
        The folder ``cubin`` in it; made when something is kept.

    Examples
    --------
    >>> cache_directory().name
    'cubin'
    """
    from crossfuse.cache import root

    return root() / "cubin"


def _cubin(entry: Entry, nvcc: NvccInfo) -> Cubin:
    log = entry.about.get("log")
    if not isinstance(log, str) or not entry.data.startswith(b"\x7fELF"):
        raise Damaged("no cubin, or no output of its compiler", "both")
    return Cubin(entry.data, parse_resources(log), log, nvcc.version)


def _compile(cuda: str, nvcc: NvccInfo, flags: tuple[str, ...], timeout: float) -> Entry:
    """Cache entry of a newly compiled cubin, with the compiler's output and the kernels' names."""
    from crossfuse.cache import Entry

    host = find_host_compiler()
    with scratch() as folder:
        # Run inside the directory, so that messages name "kernel.cu" and not a random path.
        (folder / "kernel.cu").write_text(cuda, encoding="utf-8")
        command = [str(nvcc.path), *flags, "-ccbin", str(host), "kernel.cu", "-o", "kernel.cubin"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise _failed(nvcc, f"no cubin after {timeout:g} s", LoweringRefused) from None
        log = (done.stdout + done.stderr).decode("utf-8", errors="replace")
        if done.returncode != 0:
            fault = any(text in log for text in _ENVIRONMENT_FAULTS)
            raise _failed(nvcc, log.strip(), EnvironmentRefused if fault else LoweringRefused)
        label = ", ".join(each.kernel for each in parse_resources(log))
        data = (folder / "kernel.cubin").read_bytes()
        return Entry(data, {"label": label, "log": log})


def _failed(nvcc: NvccInfo, found: str, error: type[RefusedError]) -> RefusedError:
    return refuse(
        error,
        "cuda-compile",
        f"nvcc {nvcc.version} ({nvcc.path})",
        found=found,
        limit="a compilation without errors",
        instead="change the schedule, or report the generated text if its schedule is legal"
        if error is LoweringRefused
        else "repair this installation: a host compiler that nvcc takes, CUDA parts of one release",
    )
