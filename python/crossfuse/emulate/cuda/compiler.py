"""The emulator's C++ compiler: finding it, running it, and reading its errors."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from crossfuse.emulate.cuda.translate import GENERATED
from crossfuse.errors import EnvironmentRefused, refuse

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
        raise refuse(
            EnvironmentRefused,
            "emulate-compiler",
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
        raise refuse(
            EnvironmentRefused,
            "emulate-compiler",
            f"{compiler.version} ({compiler.path})",
            found=first_errors(done.stderr),
            limit="GNU C++ 10 or newer on Linux with its libraries",
            instead="repair this C++ compiler installation",
        )


def first_errors(text: str, most: int = 3) -> str:
    """The first few error messages, with places in the generated text as ``line N``."""
    marks = ("rror:", "undefined reference")
    errors = [line for line in text.splitlines() if any(mark in line for mark in marks)][:most]
    errors = errors or [text.strip()]
    return " | ".join(re.sub(rf"^.*{re.escape(GENERATED)}:(\d+)", r"line \1", e) for e in errors)


@functools.lru_cache(maxsize=4)
def _version(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]
