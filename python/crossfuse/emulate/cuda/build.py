"""Compiling translated kernels into an executable, with a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crossfuse.cache import root
from crossfuse.emulate.cuda.translate import GENERATED, Translation
from crossfuse.errors import CheckFailed, EnvironmentRefused, Rule, refuse
from crossfuse.files import scratch, sha256, write_atomically

_refused = Rule(EnvironmentRefused, "emulate-compiler")

# The emulator's C++ compiler: finding it, running it, and reading its errors.

# -no-pie: return addresses are then the addresses that debug information speaks of, below 2 GiB.
COMMON = ("-std=c++17", "-fno-pie", "-U_FORTIFY_SOURCE", "-pthread")
# The thread sanitizer's instrumentation (not its library) calls a hook before each access that may
# be shared, the alignment sanitizer's a handler for each misaligned one, that of bounds one for an
# index beyond a thread's own array. Aliasing and overflow are defined because generated text puns
# types; nothing contracts a * b + c, as x86-64 may not. -Og compiles a kernel in half the time that
# -O1 takes, and it runs as fast: the hooks take the time.
KERNEL_FLAGS = (
    "-Og",
    "-g1",
    *COMMON,
    "-w",
    "-fsanitize=thread,alignment,bounds",
    "-fsanitize-recover=alignment,bounds",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-exceptions",
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    path: str
    #: The first line of its ``--version``; part of every cache key.
    version: str


def find_compiler() -> Compiler:
    """The g++ of ``PATH``, whose sanitizer instrumentation the emulator relies on.

    Without it, or on another system than Linux, `EnvironmentRefused` is raised.
    """
    path = shutil.which("g++")
    if path is None or not sys.platform.startswith("linux"):
        raise _refused(
            "PATH",
            found="no g++" if path is None else f"the system {sys.platform}",
            limit="GNU C++ 10 or newer on Linux",
            instead="install g++ (Debian and Ubuntu: apt-get install g++)",
        )
    return Compiler(path, _version(path))


def linker_flags() -> tuple[str, ...]:
    """Select gold where it is installed: it links a kernel in a third of the time of GNU ld."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


def run(compiler: Compiler, flags: list[str], cwd: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler in a directory."""
    return subprocess.run(
        [compiler.path, *flags], cwd=cwd, capture_output=True, text=True, check=False
    )


def require(done: subprocess.CompletedProcess[str], compiler: Compiler) -> None:
    """Raise `EnvironmentRefused` if the compiler rejected the emulator's own text."""
    if done.returncode:
        raise _refused(
            f"{compiler.version} ({compiler.path})",
            found=first_errors(done.stderr),
            limit="GNU C++ 10 or newer on Linux with its libraries",
            instead="repair this C++ compiler installation",
        )


def first_errors(text: str) -> str:
    """The first few error messages, with places in the generated text as ``line N``."""
    marks = ("rror:", "undefined reference")
    errors = [line for line in text.splitlines() if any(mark in line for mark in marks)][:3]
    errors = errors or [text.strip()]
    return " | ".join(re.sub(rf"^.*{re.escape(GENERATED)}:(\d+)", r"line \1", e) for e in errors)


@functools.lru_cache(maxsize=4)
def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


# Parts common to all kernels, compiled once: the runtime, and the headers of generated text.

_RUNTIME = Path(__file__).parent / "runtime"
# -O2: most kernels run in six to nine tenths of the time that -O1 takes. Compiling it so takes
# six seconds more, once for each cache.
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


def _compile_once(compiler: Compiler, directory: Path, name: str, flags: list[str]) -> Path:
    """Compile in one process, while others that need the same file wait."""
    path = directory / name.format(content_key(compiler, *flags))
    if path.exists():
        return path
    with _alone(path):
        if not path.exists():
            with scratch() as folder:
                require(run(compiler, [*flags, "-o", "made"], str(folder)), compiler)
                write_atomically(path, (folder / "made").read_bytes())
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of a file that is made."""
    from filelock import FileLock

    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # of filelock, see `crossfuse.cache`
        raise refuse(
            EnvironmentRefused,
            "emulate-cache",
            str(path.parent),
            found=str(error),
            limit="a directory that can be written",
            instead="pass another directory as cache",
        ) from None
    try:
        yield
    finally:
        lock.release()


# Most executables of the cache; the least recently used go first.
_KEEP = 512


def build(translation: Translation, name: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """Compile a translation to an executable, or take it from the cache, which processes may share.

    The cache is `cache_directory` by default. A missing g++ raises `EnvironmentRefused`; text that
    g++ rejects raises `CheckFailed` with its messages, under the given name.
    """
    compiler = find_compiler()
    directory = Path(cache) if cache is not None else cache_directory()
    key = content_key(compiler, *KERNEL_FLAGS, translation.source)
    executable = directory / f"kernel-{key}"
    if executable.exists():
        with contextlib.suppress(OSError):  # a cache that may only be read serves as well
            os.utime(executable)
        return executable
    _build_kernel(compiler, translation, name, executable)
    _prune(directory)
    return executable


def cache_directory() -> Path:
    """Default folder of executables, in the user's cache directory of this platform."""
    return root() / "emulate"


def _build_kernel(
    compiler: Compiler, translation: Translation, name: str, executable: Path
) -> None:
    runtime = runtime_object(compiler, executable.parent)
    header = precompiled_header(compiler, executable.parent)
    with scratch() as folder:
        (folder / GENERATED).write_text(translation.source, encoding="utf-8")
        # g++ looks here before it looks for the header's text.
        (folder / PRECOMPILED).symlink_to(header.resolve())
        headers = [f"-I{HEADERS}", "-include", HEADER]
        command = [*KERNEL_FLAGS, *headers, "-x", "c++", "-c", GENERATED, "-o", "kernel.o"]
        done = run(compiler, command, str(folder))
        if done.returncode == 0:
            command = ["-no-pie", *linker_flags(), "kernel.o", str(runtime.resolve())]
            command += ["-o", "kernel"]
            done = run(compiler, command, str(folder))
        if done.returncode:
            raise refuse(
                CheckFailed,
                "emulate-compile",
                f"generated text of {name}",
                found=first_errors(done.stderr),
                limit="CUDA C++ without inline PTX beyond special registers and cluster barriers",
                instead="correct the generated text, or reach PTX through the leaves of dsm.cuh",
            )
        write_atomically(executable, (folder / "kernel").read_bytes(), 0o755)


def _prune(directory: Path) -> None:
    try:
        entries = sorted(directory.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_KEEP]:
            path.unlink(missing_ok=True)
    except OSError:
        # Another process prunes at the same time; whoever comes next will finish.
        return
