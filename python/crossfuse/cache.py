"""The compilation cache on disk: results of earlier runs, keyed by their content.

One folder holds it all: cubins, kernel libraries, plans, schedules, rewritten models and the
emulator's executables. Nothing in here needs TVM or torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from crossfuse import errors
from crossfuse._compat import PINS, installed_version
from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.files import read_bytes, sha256, write_atomically
from crossfuse.hardware import Device
from crossfuse.schema import Damaged, read

# Keys of the cache: hashes of all that a result depends on.

#: Files of the package that decide what is made.
_SUFFIXES = frozenset({".cpp", ".cu", ".cuh", ".h", ".in", ".json", ".py"})


def content_key(target: Device, *parts: str) -> str:
    """Cache key of a result: the SHA-256, in hexadecimal, of all that it depends on.

    The package's own files and the versions of TVM and tvm-ffi count, so that another release or an
    edited checkout never finds what this one made; so do the device's limits. `parts` are texts,
    such as the function and its options; ``("ab", "c")`` and ``("a", "bc")`` differ.
    """
    versions = {each.distribution: installed_version(each.distribution) for each in PINS}
    values = [package_hash(), versions, asdict(target), parts]
    return sha256(json.dumps(values, sort_keys=True).encode())


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hash of this package's files, as they were at the first call."""
    import crossfuse

    home = Path(crossfuse.__file__).parent
    found = hashlib.sha256()
    for path in sorted(each for each in home.rglob("*") if each.suffix in _SUFFIXES):
        data = path.read_bytes()
        found.update(f"{path.relative_to(home).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


# The cache as a whole: its contents, its size limit, and what is evicted first.

#: The environment variable that limits the cache, in MiB.
LIMIT = "CROSSFUSE_CACHE_LIMIT"
_DEFAULT_MIB = 2048
#: Seconds after which a file that was never renamed into its place belongs to a dead process.
_ABANDONED = 3600.0
_LOCK = ".lock"


def root() -> Path:
    """The cache's folder, in the platform's cache directory of the user."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("crossfuse", appauthor=False))


@dataclass(frozen=True)
class Kept:
    """One file of the cache."""

    #: The folder that it is in, such as ``"library"``.
    kind: str
    path: Path
    #: Bytes.
    size: int
    #: Last read or written, in seconds since 1970.
    used: float


def limit_bytes() -> int:
    """Bytes that the cache may hold: 2 GiB, or ``CROSSFUSE_CACHE_LIMIT`` in MiB.

    A value of the variable that is no whole number raises `EnvironmentRefused`.
    """
    text = os.environ.get(LIMIT, str(_DEFAULT_MIB))
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise refuse(
            EnvironmentRefused,
            "cache-limit",
            LIMIT,
            found=repr(text),
            limit="a whole number of MiB",
            instead=f"set it to one, such as {_DEFAULT_MIB}, or unset it",
        )
    return int(text) * 2**20


def kept(folder: Path | None = None) -> tuple[Kept, ...]:
    """Files of a cache (the user's by default), least recently used first.

    Locks and files that are still being written are left out.
    """
    files = (each for each in _files(folder or root()) if not each.path.name.startswith("."))
    return tuple(sorted(files, key=lambda each: (each.used, each.path)))


def prune(folder: Path | None = None, limit: int | None = None) -> tuple[Kept, ...]:
    """Evict least recently used entries until at most `limit` bytes are left; gives the evicted.

    The defaults are the user's cache and `limit_bytes`. One process prunes at a time; others find
    nothing to do.
    """
    home = folder or root()
    allowed = limit_bytes() if limit is None else limit
    with _only_one(home) as alone:
        if not alone:
            return ()
        _remove(_abandoned(home))
        found = kept(home)
        excess = sum(each.size for each in found) - allowed
        going = []
        for each in found:
            if excess <= 0:
                break
            going.append(each)
            excess -= each.size
        _remove(going)
    return tuple(going)


def prune_beside(folder: Path) -> None:
    """Prune the user's cache if a folder belongs to it and it is over its limit."""
    home = root()
    if folder.parent == home and sum(each.size for each in _files(home)) > limit_bytes():
        prune(home)


def clear(kinds: Collection[str] = (), folder: Path | None = None) -> tuple[Kept, ...]:
    """Remove all entries of some kinds, or of all kinds if none is named; gives the removed."""
    home = folder or root()
    going = [each for each in kept(home) if not kinds or each.kind in kinds]
    _remove([*going, *_abandoned(home)])
    return tuple(going)


def _files(home: Path) -> Iterator[Kept]:
    """All files of a cache but its lock files."""
    if not home.is_dir():
        return
    for part in home.iterdir():
        for path in part.iterdir() if part.is_dir() else ():
            with contextlib.suppress(OSError):  # another process removed it
                stat = path.stat()
                if not path.name.endswith(_LOCK):
                    yield Kept(part.name, path, stat.st_size, stat.st_mtime)


def _abandoned(home: Path) -> list[Kept]:
    """Unfinished files whose writers must have ended."""
    before = time.time() - _ABANDONED
    return [each for each in _files(home) if each.path.name.startswith(".") and each.used < before]


def _remove(files: Collection[Kept]) -> None:
    for each in files:
        with contextlib.suppress(OSError):
            each.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[bool]:
    """Try to be the only process that prunes; gives whether this one is."""
    from filelock import FileLock, Timeout

    lock = FileLock(home / f".prune{_LOCK}")
    alone = home.is_dir()
    if alone:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            alone = False
        except (OSError, NotImplementedError):
            pass  # no locks here, see `Shelf`: two may remove the same
    try:
        yield alone
    finally:
        lock.release()


# Entries of one kind in the cache: one file each, written whole or not at all.

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
