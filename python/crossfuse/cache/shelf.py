"""Entries of one kind in the cache: one file each, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse.cache.place import root
from crossfuse.cache.upkeep import prune_beside
from crossfuse.files import sha256, write_atomically

#: Seconds that a process waits for another one that makes the same; then it makes it too.
_PATIENCE = 900.0


@dataclass(frozen=True)
class Entry:
    """What is kept under a key.

    Attributes
    ----------
    data : bytes
        The content.
    about : Mapping[str, Any]
        JSON values beside it; ``"label"`` says in words what it is.
    """

    data: bytes
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Shelf:
    """Entries of one kind.

    An entry is a file of one line of JSON, with the hash of what follows it, and the content. It is
    renamed into its place when it is whole, so that a reader, and whoever comes after a process
    that was killed, sees all of it or nothing. One that is damaged counts as none and is made
    again. What cannot be read or written is no error: the cache saves time and nothing else.

    Attributes
    ----------
    folder : pathlib.Path
        Where they are.
    suffix : str
        Of their names.
    """

    folder: Path
    suffix: str

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.folder / f"{key}{self.suffix}"

    def read(self, key: str) -> Entry | None:
        """What is kept under a key, noted as used now; None where it is not there, or not whole."""
        entry = read_entry(self.path(key))
        if entry is not None:
            with contextlib.suppress(OSError):  # a cache that may only be read serves as well
                os.utime(self.path(key))
        return entry

    def write(self, key: str, entry: Entry) -> None:
        """Keep something, and remove what was not used for longest if the cache is too large."""
        head = json.dumps({"sha256": sha256(entry.data), "about": dict(entry.about)}).encode()
        with contextlib.suppress(OSError):  # a full or read-only disk
            write_atomically(self.path(key), head + b"\n" + entry.data)
            prune_beside(self.folder)

    def made(self, key: str, make: Callable[[], Entry]) -> Entry:
        """What is kept under a key, or what `make` makes, in one process while others wait.

        Parameters
        ----------
        key : str
            Hash of everything that the content depends on.
        make : Callable
            Makes it; what it raises is passed on, and nothing is kept.

        Returns
        -------
        Entry
            The content.
        """
        found = self.read(key)
        if found is not None:
            return found
        with self._alone(key):
            found = self.read(key)
            if found is None:
                found = make()
                self.write(key, found)
        return found

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, which ends with the process.

        Keys share 256 files, which are never removed: who waits for one that is would hold another
        lock than who comes next.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / f".{key[:2]}.lock")
        # Where there are no locks, or the other process hangs, two make the same.
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            lock.release()


def shelf(kind: str) -> Shelf:
    """Entries of one kind in the user's cache, such as ``"cubin"`` or ``"library"``."""
    return Shelf(root() / kind, f".{kind}")


def read_entry(path: Path) -> Entry | None:
    """Read the file of an entry; None where there is none, or it is not whole."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        header = json.loads(head)
        return Entry(data, header["about"]) if header["sha256"] == sha256(data) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_label(path: Path) -> str:
    """What an entry is, in words, of its first line alone; empty for files that say nothing."""
    try:
        with path.open("rb") as file:
            return str(json.loads(file.readline(2**20))["about"]["label"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
