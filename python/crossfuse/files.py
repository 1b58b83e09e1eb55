"""Reading and writing whole files and arrays, content hashes, folders that go with the process."""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import ZipFile

from crossfuse.errors import EnvironmentRefused, RefusedError, refuse
from crossfuse.schema import Damaged

if TYPE_CHECKING:
    import numpy as np

#: Bytes of a file that is read as a whole.
MOST_BYTES = 4 * 2**30
_TEMPORARY = "folder of temporary files"


def sha256(data: bytes) -> str:
    """SHA-256 of `data` as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()


@cache
def packaged_text(package: str, path: str) -> str:
    """Text of a file that one of our packages comes with."""
    return resources.files(package).joinpath(path).read_text("utf-8")


def read_bytes(path: Path) -> bytes:
    """Read a whole file, or what a link points to; `Damaged` as for `check_file`."""
    check_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(_reason(error), "a file that can be read") from None


def check_file(path: Path) -> None:
    """Raise `Damaged` unless a path is a regular file of at most `MOST_BYTES`.

    Asked before it is opened, because opening a pipe would wait for a writer.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a ValueError of names with a NUL
        raise Damaged(_reason(error), "a file that can be read") from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe", "a file")
    if found.st_size > MOST_BYTES:
        raise Damaged(f"a file of {found.st_size} bytes", f"at most {MOST_BYTES}")


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text; `Damaged` as for `read_bytes`, or where it is no UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{error.reason} at byte {error.start}", "text in UTF-8") from None


@contextmanager
def on_disk(where: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` raised inside, as of a full disk, into an `EnvironmentRefused`.

    `where` stands for the place in errors that name no file.
    """
    try:
        yield
    except OSError as error:
        raise file_refused(error, where) from error


def file_refused(error: OSError, where: str | os.PathLike[str]) -> RefusedError:
    """Build the refusal of a file or folder that the system does not read, create or write."""
    return refuse(
        EnvironmentRefused,
        "file",
        str(error.filename or os.fspath(where)),
        found=_reason(error),
        limit="a file that can be read, or written",
        instead="name another path (TMPDIR moves scratch files), or change its permissions or the "
        "space there",
    )


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file so that no reader ever sees a part of it, whoever else writes it.

    Missing folders are created. `EnvironmentRefused`, as of a full disk, leaves nothing behind.
    """
    with writing(path, mode) as file:
        file.write(data)


@contextmanager
def writing(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Write a file piece by piece; as with `write_atomically`, it appears when the context ends."""
    with on_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder for results before they are computed; `EnvironmentRefused` if that fails."""
    with on_disk(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


@contextmanager
def scratch(folder: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A new folder for the duration of the context, inside `folder` or among the temporary files.

    A disk that fills up inside the context is an `EnvironmentRefused` too.
    """
    with (
        on_disk(folder or _TEMPORARY),
        tempfile.TemporaryDirectory(prefix="crossfuse-", dir=folder) as made,
    ):
        yield Path(made)


def scratch_folder() -> Path:
    """A new folder for this process alone, removed when the process ends."""
    with on_disk(_TEMPORARY):
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


def _reason(error: Exception) -> str:
    """The system's error message, without the path."""
    text = getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]


# Archives of arrays (``.npz``) that anybody may have written.

#: Of the header of an array, which numpy evaluates.
_HEADER_BYTES = 10_000


def read_arrays(
    path: Path, names: Iterable[str], shapes: Mapping[str, tuple[object, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Read arrays of an archive of ``numpy.savez`` by name; `shapes` gives those that are known.

    `Damaged` says that it is no archive, that an array is missing or of another shape, or that a
    part was cut off.
    """
    check_file(path)
    found = {}
    name = ""
    try:
        with ZipFile(path) as archive:
            for name in names:
                found[name] = _member(archive, f"{name}.npy", (shapes or {}).get(name))
    except Damaged:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise whatever they come across
        what = f"{name}: " if name else ""
        raise Damaged(f"{what}{type(error).__name__}: {error}", "arrays as numpy.savez") from None
    return found


def _member(archive: ZipFile, name: str, shape: tuple[object, ...] | None) -> Any:
    """Read one array, once its header is known to claim no more than is stored.

    A false header would otherwise have numpy allocate what it asks for.
    """
    from numpy.lib import format as npy

    info = archive.getinfo(name)
    with archive.open(info) as file:
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        there, _, dtype = readers[npy.read_magic(file)](file, _HEADER_BYTES)
        if shape is not None and there != shape:
            raise Damaged(f"{name} of shape {list(there)}", f"{list(shape)}")
        size = math.prod(there) * dtype.itemsize
        if min(there, default=0) < 0 or size != info.file_size - file.tell():
            raise Damaged(f"{name} of {size} bytes", f"{info.file_size - file.tell()}, as stored")
    with archive.open(info) as file:
        return npy.read_array(file, allow_pickle=False, max_header_size=_HEADER_BYTES)
