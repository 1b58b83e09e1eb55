"""Disks that are full, and folders that may not be written: refused in words, nothing left."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfuse.cache import Entry, Shelf, itself
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.files import scratch, scratch_folder, write_atomically, writing

FULL = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO]


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", FULL)
@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.replace", "os.chmod", "os.fdopen"])
def test_a_file_is_there_as_a_whole_or_not_at_all(
    code: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"before")
    monkeypatch.setattr(step, failing(code))
    with pytest.raises(EnvironmentRefused) as caught:
        write_atomically(path, b"after")
    monkeypatch.undo()
    assert str(path) in caught.value.refusal.where
    assert os.strerror(code).lower() == caught.value.refusal.found.lower()
    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_half_an_archive_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentRefused), writing(tmp_path / "weights.npz") as file:
        np.savez(file, np.ones(4))
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", FULL)
def test_scratch_folders_are_refused_and_go(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentRefused, match="file: ") as caught, scratch() as folder:
        (folder / "half").write_text("")
        failing(code)()
    assert "TMPDIR" in caught.value.refusal.instead
    assert not folder.exists()
    monkeypatch.setattr(tempfile, "mkdtemp", failing(code))
    for make in (scratch_folder, lambda: scratch().__enter__()):
        with pytest.raises(EnvironmentRefused, match="folder of temporary files"):
            make()


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", failing(errno.ENOENT))
    with pytest.raises(EnvironmentRefused, match="folder of temporary files"), scratch():
        pass


def test_a_cache_on_a_full_disk_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing(errno.ENOSPC))
    shelf = Shelf(tmp_path, ".entry")
    assert shelf.made("ab", lambda: Entry(b"content", {}), itself).data == b"content"
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == []


#: A process whose files may have 64 KiB: what a full disk does, done by the system itself.
SMALL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from pathlib import Path
from crossfuse.errors import EnvironmentRefused
from crossfuse.files import write_atomically
try:
    write_atomically(Path(sys.argv[1]), bytes(10**6))
except EnvironmentRefused as error:
    print(error.refusal.found)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="no limit of file sizes here")
def test_a_file_that_does_not_fit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL, str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "file too large\n"
    assert list(tmp_path.iterdir()) == []


def test_long_and_strange_texts_are_cut() -> None:
    error = refuse(
        RefusedError, "rule", "w" * 5000, found="f\x1b[31m\0" + "x" * 10**6, limit="", instead=""
    )
    assert len(str(error)) < 2000
    assert "\\x1b[31m\\x00" in str(error) and "(1000007 characters)" in str(error)
    assert "\x1b" not in str(error)
