"""Entries of one kind in the cache: one file each, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from crossfuse import errors
from crossfuse.cache.upkeep import prune_beside, root
from crossfuse.errors import EnvironmentRefused, RefusedError
from crossfuse.files import read_bytes, sha256, write_atomically
from crossfuse.schema import Damaged, read

#: Seconds that a process waits for another one that makes the same; then it makes it too.
_PATIENCE = 900.0

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One cached result."""

    data: bytes
    #: JSON values that describe it; ``"label"`` says in words what it is.
    about: Mapping[str, Any]


@dataclass(frozen=True)
class _Head:
    """First line of an entry's file; the hash is of all else in the file."""

    sha256: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Shelf:
    """All cache entries of one kind, as files of one folder with one suffix.

    An entry is a file of one line of JSON, with a hash of the rest, and the content. It is renamed
    into its place when it is complete, so that a reader, and whoever comes after a process that was
    killed, sees all of it or nothing. A damaged entry counts as missing and is made again, also
    where only its reader can tell: so entries are passed to `use`, which says what they stand for.
    What cannot be read or written is no error: the cache saves time and nothing else.
    """

    folder: Path
    suffix: str

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.folder / f"{key}{self.suffix}"

    def read(self, key: str, use: Callable[[Entry], T]) -> T | None:
        """The value that `use` reads from a key's entry, which counts as used now; None if none.

        An entry for which `use` raises `Damaged` or a refusal counts as missing.
        """
        try:
            found = use(read_entry(self.path(key)))
        except (Damaged, RefusedError):
            return None
        with contextlib.suppress(OSError):  # a cache that may only be read serves as well
            os.utime(self.path(key))
        return found

    def write(self, key: str, entry: Entry) -> None:
        """Store an entry; if the cache grows too large, the least recently used ones go."""
        about = dict(entry.about)
        head = json.dumps({"sha256": _hash(about, entry.data), "about": about}).encode()
        try:
            write_atomically(self.path(key), head + b"\n" + entry.data)
        except EnvironmentRefused:  # a full or read-only disk
            return
        # A limit that is no number is for `crossfuse cache` to refuse: here the value is made.
        with contextlib.suppress(OSError, EnvironmentRefused):
            prune_beside(self.folder)

    def made(self, key: str, make: Callable[[], Entry], use: Callable[[Entry], T]) -> T:
        """The value of a key's entry, made first if missing: by one process, while others wait.

        What `make` raises is passed on and nothing is cached. `use` must not give None.
        """
        found = self.read(key, use)
        if found is not None:
            return found
        with self._alone(key):
            found = self.read(key, use)
            if found is not None:
                return found
            entry = make()
            self.write(key, entry)
        return use(entry)

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, which ends with the process at the latest.

        Keys share 256 lock files, which are never removed: a process waiting for a removed file
        would hold another lock than the process that comes next.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / f".{key[:2]}.lock")
        # Where there are no locks, or the other process hangs, two make the same. Without `flock`,
        # as on Lustre mounted without it, filelock before 3.25 raises NotImplementedError.
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            lock.release()


def shelf(kind: str) -> Shelf:
    """The shelf of one kind of entry in the user's cache, such as ``"cubin"`` or ``"library"``."""
    return Shelf(root() / kind, f".{kind}")


def itself(entry: Entry) -> Entry:
    """The entry unchanged, as the `use` of callers that look into it themselves."""
    return entry


def read_entry(path: Path) -> Entry:
    """Read an entry's file; `Damaged` if there is none, or it is incomplete."""
    first, _, data = read_bytes(path).partition(b"\n")
    head = read(_Head, first)
    if head.sha256 != _hash(head.about, data):
        raise Damaged("content of another hash", head.sha256)
    return Entry(data, head.about)


def read_label(path: Path) -> str:
    """An entry's label, from its first line alone; empty for files without one."""
    try:
        with path.open("rb") as file:
            return str(read(_Head, file.readline(2**20)).about.get("label", ""))
    except (OSError, Damaged):
        return ""


def _hash(about: Mapping[str, Any], data: bytes) -> str:
    return sha256(json.dumps(about, sort_keys=True).encode() + b"\n" + data)


# Cached answers that are texts or refusals, so that neither is computed twice.


def answered(
    shelf: Shelf, key: str, label: str, make: Callable[[], str], use: Callable[[str], T]
) -> T:
    """The cached answer under a key, else what `make` answers; `use` reads a value from its text.

    `use` raises `Damaged` for text that is no answer, and it is computed again. A refusal that
    `make` raises is cached and raised again, but for those of the environment, which may differ
    tomorrow. `label` describes the question to people who list the cache.
    """

    def entry() -> Entry:
        try:
            return Entry(make().encode(), {"label": label})
        except errors.EnvironmentRefused:
            raise
        except errors.RefusedError as error:
            text = json.dumps(asdict(error.refusal)).encode()
            return Entry(text, {"label": f"refused: {label}", "refused": type(error).__name__})

    def answer(found: Entry) -> tuple[T] | errors.RefusedError:
        family = found.about.get("refused")
        if family is None:
            return (use(found.data.decode(errors="replace")),)
        kind = getattr(errors, family, None) if isinstance(family, str) else None
        if not isinstance(kind, type) or not issubclass(kind, errors.RefusedError):
            raise Damaged(f"a refusal of family {family!r}", "one of crossfuse.errors")
        return kind(read(errors.Refusal, found.data))

    found = shelf.made(key, entry, answer)
    if isinstance(found, errors.RefusedError):
        raise found
    return found[0]
