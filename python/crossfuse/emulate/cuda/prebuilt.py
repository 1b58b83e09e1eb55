"""Parts common to all kernels, compiled once: the runtime, and the headers of generated text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from crossfuse.emulate.cuda.compiler import COMMON, KERNEL_FLAGS, Compiler, require, run
from crossfuse.errors import EnvironmentRefused, refuse
from crossfuse.files import scratch, sha256, write_atomically

_RUNTIME = Path(__file__).parent / "runtime"
_RUNTIME_FLAGS = ("-O2", *COMMON)
#: Included before generated text.
HEADER = "device.h"
#: What g++ takes instead, where it finds it beside or before the header.
PRECOMPILED = f"{HEADER}.gch"
#: Where the header and the stand-ins for CUDA's own headers lie.
HEADERS = _RUNTIME / "device"


@functools.lru_cache(maxsize=1)
def runtime_text() -> str:
    """Text of the runtime and its headers, part of every cache key."""
    files = sorted(path for path in _RUNTIME.rglob("*") if path.suffix in (".h", ".cpp"))
    return "\0".join(path.read_text(encoding="utf-8") for path in files)


def content_key(compiler: Compiler, *parts: str) -> str:
    """File name in the cache: another compiler, runtime or text makes another file."""
    return sha256("\0".join((compiler.version, *parts, runtime_text())).encode())


def runtime_object(compiler: Compiler, directory: Path) -> Path:
    """Object file of the runtime, compiled or taken from the cache folder.

    A g++ that rejects it, or a cache that cannot be written, raises `EnvironmentRefused`.
    """
    flags = [*_RUNTIME_FLAGS, "-c", str(_RUNTIME / "runtime.cpp")]
    return _compile_once(compiler, directory, "runtime-{}.o", flags)


def precompiled_header(compiler: Compiler, directory: Path) -> Path:
    """Precompiled headers of generated text, compiled or taken from the cache folder.

    Reading them as text takes g++ a fifth of the time of an ordinary kernel. It looks for
    ``device.h.gch`` when it is asked for ``device.h``, and reads the text if it cannot use that.
    Refuses as `runtime_object`.
    """
    flags = [*KERNEL_FLAGS, "-x", "c++-header", str(HEADERS / HEADER)]
    return _compile_once(compiler, directory, "headers-{}.gch", flags)


def store(path: Path, made: Path, mode: int) -> None:
    """Put a file into the cache with these permissions; `EnvironmentRefused` if that fails."""
    write_atomically(path, made.read_bytes(), mode)


def _compile_once(compiler: Compiler, directory: Path, name: str, flags: list[str]) -> Path:
    """Compile in one process, while others that need the same file wait."""
    path = directory / name.format(content_key(compiler, *flags))
    if path.exists():
        return path

    def make() -> None:
        if path.exists():
            return
        with scratch() as folder:
            require(run(compiler, [*flags, "-o", "made"], str(folder)), compiler)
            store(path, folder / "made", 0o644)

    _alone(path, make)
    return path


def _alone(path: Path, make: Callable[[], None]) -> None:
    from filelock import FileLock

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire()
    except OSError as error:
        raise _unwritable(path.parent, error) from None
    try:
        make()
    finally:
        lock.release()


def _unwritable(directory: Path, error: OSError) -> Exception:
    return refuse(
        EnvironmentRefused,
        "emulate-cache",
        str(directory),
        found=str(error),
        limit="a directory that can be written",
        instead="pass another directory as cache",
    )
