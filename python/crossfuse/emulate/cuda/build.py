"""Compiling translated kernels into an executable, with a cache on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from crossfuse.emulate.cuda.compiler import (
    KERNEL_FLAGS,
    Compiler,
    find_compiler,
    first_errors,
    linker_flags,
    run,
)
from crossfuse.emulate.cuda.prebuilt import (
    HEADER,
    HEADERS,
    PRECOMPILED,
    content_key,
    precompiled_header,
    runtime_object,
    store,
)
from crossfuse.emulate.cuda.translate import GENERATED, Translation
from crossfuse.errors import CheckFailed, refuse
from crossfuse.files import scratch

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
    import platformdirs

    return Path(platformdirs.user_cache_dir("crossfuse", appauthor=False)) / "emulate"


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
        store(executable, folder / "kernel", 0o755)


def _prune(directory: Path) -> None:
    try:
        entries = sorted(directory.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-_KEEP]:
            path.unlink(missing_ok=True)
    except OSError:
        # Another process prunes at the same time; whoever comes next will finish.
        return
