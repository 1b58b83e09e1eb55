"""Compiling generated CUDA to a cubin, with what ptxas says of its resources, and a disk cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.errors import EnvironmentRefused, LoweringRefused, RefusedError, refuse
from crossfuse.files import sha256
from crossfuse.runtime.host_compiler import find_host_compiler
from crossfuse.runtime.nvcc import NvccInfo, find_nvcc

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
class ResourceUsage:
    """What ptxas reports for one kernel.

    Attributes
    ----------
    kernel : str
        Name of the ``__global__`` function.
    registers : int
        Registers of one thread.
    spill_store_bytes, spill_load_bytes : int
        Register spills of one thread, in bytes.
    static_shared_bytes : int
        Static shared memory of one CTA, in bytes.
    stack_bytes : int
        Stack frame of one thread, in bytes.
    barriers : int
        Named barriers in use.
    advisories : tuple[str, ...]
        Numbers of ptxas' remarks on how it compiled wgmma, such as ``"C7510"``: it waits for each
        product before the next. A sound kernel of the Hopper pipeline has none.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64", cluster=4)
    >>> kernel.artefact.manifest.resources[0].spill_store_bytes
    0
    """

    kernel: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    stack_bytes: int
    barriers: int
    advisories: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Bytes that one thread spills and loads back."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def complaints(self) -> tuple[str, ...]:
        """What costs time and was not meant: spills, and wgmma that does not overlap."""
        spills = (f"{self.spill_bytes} bytes spilled",) if self.spill_bytes else ()
        return (*spills, *(f"ptxas {number}" for number in self.advisories))

    @property
    def summary(self) -> str:
        """In words, such as ``168 registers, no spills``."""
        return ", ".join((f"{self.registers} registers", *(self.complaints or ("no spills",))))


def read_usage(row: Mapping[str, Any]) -> ResourceUsage:
    """Read what `dataclasses.asdict` and JSON made of a record.

    Parameters
    ----------
    row : Mapping[str, Any]
        Fields by name; those of older files have no advisories.

    Returns
    -------
    ResourceUsage
        The record.
    """
    return ResourceUsage(**{**row, "advisories": tuple(row.get("advisories", ()))})


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


def compile_cubin(
    cuda: str,
    *,
    arch: str = "sm_90a",
    nvcc: NvccInfo | None = None,
    cache: bool | str | os.PathLike[str] = True,
    timeout: float = 900.0,
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
    entry = kept.read(key)
    if entry is None:
        entry = _compile(cuda, nvcc, flags, timeout)
        kept.write(key, entry)
    return _cubin(entry, nvcc)


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


def parse_resources(log: str) -> tuple[ResourceUsage, ...]:
    """Read the output of ``ptxas -v``.

    Parameters
    ----------
    log : str
        The compiler's output.

    Returns
    -------
    tuple[ResourceUsage, ...]
        One entry for each entry function; device functions that stayed calls are left out.
    """
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'", 1)[0]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        # The frame of the kernel itself, not of a device function printed after it.
        frame = part[max(part.find(f"Function properties for {kernel}\n"), 0) :]
        found.append(
            ResourceUsage(
                kernel,
                registers=number(r"Used (\d+) registers"),
                spill_store_bytes=number(r"(\d+) bytes spill stores", frame),
                spill_load_bytes=number(r"(\d+) bytes spill loads", frame),
                static_shared_bytes=number(r"(\d+) bytes smem"),
                stack_bytes=number(r"(\d+) bytes stack frame", frame),
                barriers=number(r"used (\d+) barriers"),
                advisories=_advisories(log, kernel),
            )
        )
    return tuple(found)


def _advisories(log: str, kernel: str) -> tuple[str, ...]:
    """Numbers C75xx that name a kernel, or no function at all; each once."""
    lines = re.findall(r"\((C75\d\d)\)([^\n]*)", log)
    names = ((number, re.search(r"in (?:the )?function '([^']+)'", rest)) for number, rest in lines)
    return tuple(dict.fromkeys(n for n, name in names if name is None or name[1] == kernel))


def _cubin(entry: Entry, nvcc: NvccInfo) -> Cubin:
    log = str(entry.about["log"])
    return Cubin(entry.data, parse_resources(log), log, nvcc.version)


def _compile(cuda: str, nvcc: NvccInfo, flags: tuple[str, ...], timeout: float) -> Entry:
    """The cubin, with the compiler's output and the names of its kernels."""
    from crossfuse.cache import Entry

    host = find_host_compiler()
    with tempfile.TemporaryDirectory(prefix="crossfuse-") as scratch:
        # Run inside the directory, so that messages name "kernel.cu" and not a random path.
        (Path(scratch) / "kernel.cu").write_text(cuda, encoding="utf-8")
        command = [str(nvcc.path), *flags, "-ccbin", str(host), "kernel.cu", "-o", "kernel.cubin"]
        try:
            done = subprocess.run(
                command, cwd=scratch, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise _failed(nvcc, f"no cubin after {timeout:g} s", LoweringRefused) from None
        log = (done.stdout + done.stderr).decode("utf-8", errors="replace")
        if done.returncode != 0:
            fault = any(text in log for text in _ENVIRONMENT_FAULTS)
            raise _failed(nvcc, log.strip(), EnvironmentRefused if fault else LoweringRefused)
        label = ", ".join(each.kernel for each in parse_resources(log))
        data = (Path(scratch) / "kernel.cubin").read_bytes()
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
