"""Built kernels in the cache: built once, and copied to wherever they are wanted.

A kind of build, `LIBRARIES` or `OBJECTS`, says what is built and as which files.
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
    """How one kind of build is made, read into a cache entry, and written out again."""

    #: Of its shelf in the cache.
    name: str
    suffix: str
    #: Builds an image into a folder: `build_library` or `build_object`.
    build: Callable[..., Built]
    #: Content and manifest of a build.
    read: Callable[[Built], tuple[bytes, str]]
    #: Writes content and manifest to a path.
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
    """Copy a build out of the cache to `path`, a library's manifest beside it; None if not cached.

    The key is of `crossfuse.cache.content_key`, and must cover the name.
    """
    return shelf(kind.name).read(key, partial(written, kind, path))


def built_once(kind: Kind[Built], key: str, path: Path, build: Callable[[], Built]) -> Built:
    """Copy a build out of the cache to `path`; build and cache it first if it is missing.

    One process builds, while others wait. `build` may build anywhere; its refusals pass through.
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
    """Write the files of a cache entry, or of a copy of one, to `path`.

    `Damaged` or `ArtefactRefused` says that it is no build, `EnvironmentRefused` that writing
    failed.
    """
    text = entry.about.get("manifest")
    if not isinstance(text, str):
        raise Damaged("no manifest", "a build with its manifest")
    if Manifest.from_json(text, "entry of the cache").to_json().encode() not in entry.data:
        raise Damaged("a manifest of another build", "the one inside")
    return kind.write(path, entry.data, text)
