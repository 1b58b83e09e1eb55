"""Content hashes, whole-file writes, and folders that go with the process."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


def sha256(data: bytes) -> str:
    """SHA-256 of `data` as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that no reader ever sees a part of it, whoever else writes it.

    Parameters
    ----------
    path : pathlib.Path
        Destination; missing directories are made.
    data : bytes
        Whole content.
    mode : int
        Permissions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def scratch_folder() -> Path:
    """A new folder for what this process alone needs; it goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="crossfuse-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, maker: int) -> None:
    """Remove a folder, but not in a process that was forked from its maker."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value for programs to read, indented by one; missing directories are made."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())
