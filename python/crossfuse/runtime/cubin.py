"""Compiling generated CUDA to a cubin, and a disk cache."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crossfuse.calls import Seconds, checked
from crossfuse.errors import EnvironmentRefused, LoweringRefused, RefusedError, refuse
from crossfuse.files import scratch, sha256
from crossfuse.runtime.nvcc import NvccInfo, find_host_compiler, find_nvcc
from crossfuse.runtime.resources import ResourceUsage, parse_resources
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    from crossfuse.cache import Entry

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
