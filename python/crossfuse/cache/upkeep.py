"""The cache as a whole: its contents, its size limit, and what is evicted first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from crossfuse.errors import EnvironmentRefused, refuse

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
