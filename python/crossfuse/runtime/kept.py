"""Built kernels in the cache: built once, copied to where they are wanted.

A kind of build, `LIBRARIES` or `OBJECTS`, says what is built, and how it lies in files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from crossfuse.cache import Entry, shelf
from crossfuse.files import write_atomically
from crossfuse.runtime.artefact import Artefact, KernelObject, build_library, build_object
from crossfuse.runtime.manifest import Manifest
from crossfuse.schema import Damaged

Built = TypeVar("Built", Artefact, KernelObject)


@dataclass(frozen=True)
class Kind(Generic[Built]):
    """A kind of build.

    Attributes
    ----------
    name : str
        Of its entries in the cache.
    suffix : str
        Of its files.
    build : Callable
        Builds an image into a folder: `build_library` or `build_object`.
    read : Callable
        Content and manifest of what was built.
    write : Callable
        Writes these to a path.
    """

    name: str
    suffix: str
    build: Callable[..., Built]
    read: Callable[[Built], tuple[bytes, str]]
    write: Callable[[Path, bytes, str], Built]


def _read_library(made: Artefact) -> tuple[bytes, str]:
    return made.shared_object.read_bytes(), made.manifest_path.read_text(encoding="utf-8")


def _write_library(path: Path, data: bytes, text: str) -> Artefact:
    beside = path.with_suffix(".json")
    manifest = Manifest.from_json(text, str(beside))
    write_atomically(path, data, mode=0o755)
    write_atomically(beside, text.encode())
    return Artefact(path, beside, manifest)


def _read_object(made: KernelObject) -> tuple[bytes, str]:
    return made.path.read_bytes(), made.manifest.to_json()


def _write_object(path: Path, data: bytes, text: str) -> KernelObject:
    manifest = Manifest.from_json(text, str(path))
    write_atomically(path, data)
    return KernelObject(path, manifest)


#: Shared libraries with a manifest beside them.
LIBRARIES = Kind("library", ".so", build_library, _read_library, _write_library)
#: Object files, which somebody else links.
OBJECTS = Kind("object", ".o", build_object, _read_object, _write_object)


def kept(kind: Kind[Built], key: str, path: Path) -> Built | None:
    """Copy a build out of the cache.

    Parameters
    ----------
    kind : Kind
        `LIBRARIES` or `OBJECTS`.
    key : str
        What it was kept under, see `crossfuse.cache.keys.content_key`; its name is part of it.
    path : pathlib.Path
        The file to write; the manifest of a library goes beside it.

    Returns
    -------
    Artefact | KernelObject | None
        What was built; None where the cache has none.
    """
    return shelf(kind.name).read(key, partial(written, kind, path))


def built_once(kind: Kind[Built], key: str, path: Path, build: Callable[[], Built]) -> Built:
    """Copy a build out of the cache, or build and keep it; one process builds, others wait.

    Parameters
    ----------
    kind, key, path
        See `kept`.
    build : Callable
        Builds it, anywhere.

    Returns
    -------
    Artefact | KernelObject
        What was built, at `path`.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        What `build` raises.
    """

    def entry() -> Entry:
        made = build()
        data, text = kind.read(made)
        about: dict[str, Any] = {
            "label": f"{made.manifest.name} for {made.manifest.device}",
            "manifest": text,
        }
        return Entry(data, about)

    return shelf(kind.name).made(key, entry, partial(written, kind, path))


def written(kind: Kind[Built], path: Path, entry: Entry) -> Built:
    """Write the files of an entry.

    Parameters
    ----------
    kind, path
        See `kept`.
    entry : Entry
        Of the cache, or a copy of one.

    Returns
    -------
    Artefact | KernelObject
        What was built.

    Raises
    ------
    Damaged, ArtefactRefused
        If the entry is none of a build.
    EnvironmentRefused
        If it cannot be written.
    """
    text = entry.about.get("manifest")
    if not isinstance(text, str):
        raise Damaged("no manifest", "a build with its manifest")
    if Manifest.from_json(text, "entry of the cache").to_json().encode() not in entry.data:
        raise Damaged("a manifest of another build", "the one inside")
    return kind.write(path, entry.data, text)
