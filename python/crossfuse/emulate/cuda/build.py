"""Compiling translated kernels into an executable, with a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from crossfuse.emulate.cuda.translate import GENERATED, Translation
from crossfuse.errors import CheckFailed, EnvironmentRefused, refuse
from crossfuse.runtime.files import sha256, write_atomically

_RUNTIME = Path(__file__).parent / "runtime"
# Most executables of the cache; the least recently used go first.
_KEEP = 512
# -no-pie: return addresses are then the addresses that debug information speaks of, below 2 GiB.
_COMMON = ("-std=c++17", "-fno-pie", "-U_FORTIFY_SOURCE", "-pthread")
_RUNTIME_FLAGS = ("-O2", *_COMMON)
# The thread sanitizer's instrumentation (not its library) calls a hook before each access that may
# be shared, the alignment sanitizer's a handler for each misaligned one. Aliasing and overflow are
# defined because generated text puns types; nothing contracts a * b + c, as x86-64 may not.
_KERNEL_FLAGS = (
    "-O1",
    "-g1",
    *_COMMON,
    "-w",
    "-fsanitize=thread,alignment",
    "-fsanitize-recover=alignment",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
)


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler.

    Attributes
    ----------
    path : str
        Where it is.
    version : str
        What it says of itself, part of every cache key.
    """

    path: str
    version: str


def find_compiler() -> Compiler:
    """Find g++, whose instrumentation the emulator relies on.

    Returns
    -------
    Compiler
        The ``g++`` of ``PATH``.

    Raises
    ------
    EnvironmentRefused
        If there is none, or the system is not Linux.
    """
    path = shutil.which("g++")
    if path is None or not sys.platform.startswith("linux"):
        raise refuse(
            EnvironmentRefused,
            "emulate-compiler",
            "PATH",
            found="no g++" if path is None else f"the system {sys.platform}",
            limit="GNU C++ 10 or newer on Linux",
            instead="install g++ (Debian and Ubuntu: apt-get install g++)",
        )
    return Compiler(path, _version(path))


def build(translation: Translation, name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Compile a translation, or take the executable from the cache.

    Parameters
    ----------
    translation : Translation
        Text of one image.
    name : str
        What to call it in messages.
    cache : path, optional
        Directory of the cache; `cache_directory` by default. Processes may share it.

    Returns
    -------
    pathlib.Path
        The executable.

    Raises
    ------
    EnvironmentRefused
        If there is no g++.
    CheckFailed
        If g++ rejects the text; its messages are kept.
    """
    compiler = find_compiler()
    directory = Path(cache) if cache is not None else cache_directory()
    runtime_text = _runtime_text()
    parts = (compiler.version, *_KERNEL_FLAGS, runtime_text, translation.source)
    executable = directory / f"kernel-{sha256(chr(0).join(parts).encode())}"
    if executable.exists():
        with contextlib.suppress(OSError):  # a cache that may only be read serves as well
            os.utime(executable)
        return executable
    runtime = _build_runtime(compiler, directory, runtime_text)
    _build_kernel(compiler, translation, name, runtime, executable)
    _prune(directory)
    return executable


def cache_directory() -> Path:
    """Where executables are kept between runs: the user's cache directory of this platform."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("crossfuse", appauthor=False)) / "emulate"


def _build_kernel(
    compiler: Compiler, translation: Translation, name: str, runtime: Path, executable: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="crossfuse-") as scratch:
        (Path(scratch) / GENERATED).write_text(translation.source, encoding="utf-8")
        headers = [f"-I{_RUNTIME / 'device'}", "-include", "device.h"]
        command = [*_KERNEL_FLAGS, *headers, "-x", "c++", "-c", GENERATED, "-o", "kernel.o"]
        done = _run(compiler, command, scratch)
        if done.returncode == 0:
            command = ["-no-pie", "kernel.o", str(runtime.resolve()), "-o", "kernel"]
            done = _run(compiler, command, scratch)
        if done.returncode:
            raise refuse(
                CheckFailed,
                "emulate-compile",
                f"generated text of {name}",
                found=_first_errors(done.stderr),
                limit="CUDA C++ without inline PTX beyond special registers and cluster barriers",
                instead="correct the generated text, or reach PTX through the leaves of dsm.cuh",
            )
        _store(executable, Path(scratch) / "kernel", 0o755)


@functools.lru_cache(maxsize=4)
def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


@functools.lru_cache(maxsize=1)
def _runtime_text() -> str:
    files = sorted(path for path in _RUNTIME.rglob("*") if path.suffix in (".h", ".cpp"))
    return "\0".join(path.read_text(encoding="utf-8") for path in files)


def _build_runtime(compiler: Compiler, directory: Path, text: str) -> Path:
    key = sha256("\0".join((compiler.version, *_RUNTIME_FLAGS, text)).encode())
    library = directory / f"runtime-{key}.o"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(prefix="crossfuse-") as scratch:
        source = str(_RUNTIME / "runtime.cpp")
        done = _run(compiler, [*_RUNTIME_FLAGS, "-c", source, "-o", "runtime.o"], scratch)
        _require(done, compiler)
        _store(library, Path(scratch) / "runtime.o", 0o644)
    return library


def _store(path: Path, made: Path, mode: int) -> None:
    try:
        write_atomically(path, made.read_bytes(), mode)
    except OSError as error:
        raise refuse(
            EnvironmentRefused,
            "emulate-cache",
            str(path.parent),
            found=str(error),
            limit="a directory that can be written",
            instead="pass another directory as cache",
        ) from None


def _run(compiler: Compiler, flags: list[str], cwd: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [compiler.path, *flags], cwd=cwd, capture_output=True, text=True, check=False
    )


def _require(done: subprocess.CompletedProcess[str], compiler: Compiler) -> None:
    if done.returncode:
        raise refuse(
            EnvironmentRefused,
            "emulate-compiler",
            f"{compiler.version} ({compiler.path})",
            found=_first_errors(done.stderr),
            limit="GNU C++ 10 or newer on Linux with its libraries",
            instead="repair this C++ compiler installation",
        )


def _first_errors(text: str, most: int = 3) -> str:
    """Pick the first errors, with places in the generated text as ``line N``."""
    marks = ("rror:", "undefined reference")
    errors = [line for line in text.splitlines() if any(mark in line for mark in marks)][:most]
    errors = errors or [text.strip()]
    return " | ".join(re.sub(rf"^.*{re.escape(GENERATED)}:(\d+)", r"line \1", e) for e in errors)


def _prune(directory: Path) -> None:
    try:
        entries = sorted(directory.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_KEEP]:
            path.unlink(missing_ok=True)
    except OSError:
        # Another process prunes at the same time; whoever comes next will finish.
        return
