"""Kernel images become loadable libraries: checked, built with a manifest, kept in the cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

from crossfuse import hardware
from crossfuse.cache import Entry, shelf
from crossfuse.calls import Seconds, checked
from crossfuse.errors import LoweringRefused, RefusedError, refuse
from crossfuse.files import sha256, write_atomically
from crossfuse.hardware import Device
from crossfuse.lower.image import ROW_COUNT, KernelImage, Launch
from crossfuse.runtime.launcher import compile_launcher, generate_launcher, library_functions
from crossfuse.runtime.manifest import (
    FORMAT_VERSION,
    LIBRARY_HASH,
    Manifest,
    ResourceUsage,
    limits_of,
    releases,
)
from crossfuse.runtime.nvcc import Cubin, NvccInfo, compile_cubin
from crossfuse.schema import Damaged, parse

# Checks of what a kernel image asks of a device, before anything is compiled or loaded.

# Limits of compute capability 9.0 that every sm_90 device shares.
_GRID = (2**31 - 1, 65535, 65535)
_BLOCK_Z = 64
_REGISTER_UNIT = 256  # of one warp
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_image(image: KernelImage, device: Device) -> None:
    """Raise `LoweringRefused` for an image that cannot be launched, whatever its kernels do."""
    names = [buffer.name for buffer in image.memory]
    for name in (image.name, *names, *(launch.symbol for launch in image.launches)):
        if not _IDENTIFIER.fullmatch(name):
            raise _refused("image-name", image.name, repr(name), "a C identifier", "rename it")
    if len(set(names)) != len(names):
        raise _refused(
            "image-buffers", image.name, ", ".join(names), "distinct names", "rename the buffers"
        )
    if not image.launches:
        raise _refused("image-launches", image.name, "no launch", "at least 1", "bind its loops")
    for launch in image.launches:
        _check_arguments(image, launch)
        _check_launch(image, launch, device)


def check_resources(image: KernelImage, cubin: Cubin, device: Device) -> None:
    """Raise `LoweringRefused` for kernels that need more than one CTA of the device can have.

    That is shared memory or registers; a kernel that is missing from the cubin is refused too.
    """
    for launch in image.launches:
        usage = cubin.usage(launch.symbol)
        if usage is None:
            raise _refused(
                "image-symbol",
                f"kernel {launch.symbol!r} of {image.name}",
                "a cubin of " + (", ".join(r.kernel for r in cubin.resources) or "no kernel"),
                "a cubin with every launched kernel",
                'declare the kernel extern "C" __global__ in the CUDA text',
            )
        _check_usage(image, launch, usage, device)


def _check_arguments(image: KernelImage, launch: Launch) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    known = {each.name for each in image.memory} | {each.name for each in launch.tensor_maps}
    known |= {ROW_COUNT} if image.rows is not None else set()
    if unknown := [name for name in launch.arguments if name not in known]:
        raise _refused(
            "image-arguments",
            where,
            ", ".join(unknown),
            "names of buffers and tensor maps: " + ", ".join(sorted(known)),
            "add the missing buffers to the image",
        )


def _check_launch(image: KernelImage, launch: Launch, device: Device) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    extents = (*launch.grid, *launch.block, *launch.cluster)
    if min(extents) < 1 or any(n > top for n, top in zip(launch.grid, _GRID, strict=True)):
        raise _refused(
            "launch-grid",
            where,
            f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}",
            f"extents of at least 1 and a grid of at most {_GRID}",
            "change the tile sizes",
        )
    if prod(launch.block) > device.max_threads or launch.block[2] > _BLOCK_Z:
        raise _refused(
            "launch-block",
            where,
            f"block {launch.block}",
            f"{device.max_threads} threads, and {_BLOCK_Z} along z",
            "bind fewer threads",
        )
    if launch.cluster_size > device.max_cluster:
        raise _refused(
            "cluster-extent",
            where,
            f"cluster {launch.cluster}",
            f"{device.max_cluster} CTAs",
            "bind a smaller loop to the cluster",
        )
    if any(n % size for n, size in zip(launch.grid, launch.cluster, strict=True)):
        raise _refused(
            "cluster-extent",
            where,
            f"grid {launch.grid} with cluster {launch.cluster}",
            "a grid that is a multiple of the cluster along each axis",
            "count CTAs, not clusters, in the grid",
        )


def _check_usage(image: KernelImage, launch: Launch, usage: ResourceUsage, device: Device) -> None:
    where = f"kernel {launch.symbol!r} of {image.name}"
    shared = usage.static_shared_bytes + launch.dynamic_shared_bytes
    if shared > device.max_shared_bytes:
        raise _refused(
            "shared-memory",
            where,
            f"{shared} bytes ({usage.static_shared_bytes} static, "
            f"{launch.dynamic_shared_bytes} dynamic)",
            f"{device.max_shared_bytes} bytes of one CTA",
            "use smaller tiles or fewer pipeline stages",
        )
    threads = prod(launch.block)
    warp = -(-usage.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    if warp * -(-threads // 32) > device.registers:
        raise _refused(
            "registers",
            where,
            f"{usage.registers} registers in each of {threads} threads",
            f"{device.registers} registers of one CTA",
            "set launch bounds, bind fewer threads, or use smaller tiles",
        )


def _refused(rule: str, where: str, found: str, limit: str, instead: str) -> RefusedError:
    return refuse(LoweringRefused, rule, where, found=found, limit=limit, instead=instead)


# Libraries and objects, each with its manifest.


@dataclass(frozen=True)
class Artefact:
    """A built kernel library.

    Attributes
    ----------
    shared_object : pathlib.Path
        The shared library.
    manifest_path : pathlib.Path
        The JSON file beside it.
    manifest : Manifest
        Its content.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> kernel.artefact.shared_object.suffix
    '.so'
    """

    shared_object: Path
    manifest_path: Path
    manifest: Manifest


@dataclass(frozen=True)
class KernelObject:
    """A kernel as an object file, for a library that somebody else links.

    Attributes
    ----------
    path : pathlib.Path
        The object file. It has the functions that a library has, and needs tvm-ffi where it is
        loaded.
    manifest : Manifest
        What is embedded in it.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> with TemporaryDirectory() as folder:
    ...     made = build_object(kernel.lowered.image, folder)
    >>> [(each.name, each.shape) for each in made.manifest.buffers][-1]
    ('out', (16, 64))
    """

    path: Path
    manifest: Manifest


@checked
def build_object(
    image: KernelImage,
    destination: str | os.PathLike[str],
    *,
    device: str | hardware.Device | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> KernelObject:
    """Compile an image into ``<name>.o`` with its cubin and manifest inside.

    Parameters
    ----------
    image : KernelImage
        What to build.
    destination : path
        A directory for ``<image.name>.o``.
    device : str or Device
        Device to compile for and to check limits against.
    metadata : Mapping[str, Any], optional
        See `build_library`.

    Returns
    -------
    KernelObject
        Path and manifest.

    Raises
    ------
    LoweringRefused, EnvironmentRefused
        See `build_library`.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> with TemporaryDirectory() as folder:
    ...     build_object(kernel.lowered.image, folder).path.name
    'main.o'
    """
    parts = _compiled(image, hardware.device(device), dict(metadata or {}), None)
    path = Path(destination) / f"{image.name}.o"
    write_atomically(path, compile_launcher(*parts, linked=False))
    return KernelObject(path, Manifest.from_json(parts[2], str(path)))


@checked
def build_library(
    image: KernelImage,
    destination: str | os.PathLike[str],
    *,
    device: str | hardware.Device | None = None,
    metadata: Mapping[str, Any] | None = None,
    schedule_trace: str | None = None,
    nvcc: NvccInfo | None = None,
    cache: bool | str | os.PathLike[str] = True,
    timeout: Seconds = 900.0,
) -> Artefact:
    """Compile an image into ``<name>.so`` with its cubin inside, and ``<name>.json`` beside it.

    Parameters
    ----------
    image : KernelImage
        What to build.
    destination : path
        A file name that ends in ``.so``, or a directory for ``<image.name>.so``.
    device : str or Device
        Device to compile for and to check limits against.
    metadata : Mapping[str, Any], optional
        JSON values to record: hashes of sources, the plan.
    schedule_trace : str, optional
        Trace of the schedule, recorded as text.
    nvcc : NvccInfo, optional
        The compiler; found by itself by default.
    cache : bool or path
        See `crossfuse.runtime.compile_cubin`.
    timeout : float
        Seconds for nvcc.

    Returns
    -------
    Artefact
        Paths and manifest.

    Raises
    ------
    LoweringRefused
        If the image does not fit the device, or its CUDA does not compile.
    EnvironmentRefused
        If nvcc or a C++ compiler is missing.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> with TemporaryDirectory() as folder:
    ...     made = build_library(kernel.lowered.image, folder, metadata={"layer": 3})
    ...     sorted(each.name for each in Path(folder).iterdir())
    ['main.json', 'main.so']
    >>> made.manifest.metadata
    {'layer': 3}
    """
    target = hardware.device(device)
    options = {"nvcc": nvcc, "cache": cache, "timeout": timeout}
    parts = _compiled(image, target, dict(metadata or {}), schedule_trace, **options)
    library, text = compile_launcher(*parts), parts[2]
    path = Path(destination)
    if path.suffix != ".so":
        path = path / f"{image.name}.so"
    record = parse(text) | {LIBRARY_HASH: sha256(library)}
    write_atomically(path, library, mode=0o755)
    manifest_path = path.with_suffix(".json")
    write_atomically(manifest_path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    # Read back, so that the caller holds what a loader will hold: tuples are lists in JSON.
    return Artefact(path, manifest_path, Manifest.from_json(text, str(manifest_path)))


def _compiled(
    image: KernelImage,
    target: hardware.Device,
    metadata: Mapping[str, Any],
    trace: str | None,
    **options: Any,
) -> tuple[str, bytes, str]:
    """The launcher's source, the cubin, and the manifest as text."""
    check_image(image, target)
    source = generate_launcher(image, target.arch)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(library_functions)  # beside nvcc: the first time it takes as long
        cubin = compile_cubin(image.cuda, arch=target.arch, **options)
    check_resources(image, cubin, target)
    return source, cubin.data, _manifest(image, cubin, target, metadata, trace).to_json()


def _manifest(
    image: KernelImage,
    cubin: Cubin,
    device: hardware.Device,
    metadata: Mapping[str, Any],
    trace: str | None,
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        name=image.name,
        device=device.name,
        arch=device.arch,
        versions=releases() | {"nvcc": cubin.nvcc_version},
        limits=limits_of(device),
        buffers=image.buffers,
        launches=image.launches,
        resources=cubin.resources,
        cuda_sha256=sha256(image.cuda.encode()),
        cubin_sha256=sha256(cubin.data),
        metadata=metadata,
        trace=trace,
    )


# Built kernels in the cache: built once, and copied to wherever they are wanted.
#
# A kind of build, `LIBRARIES` or `OBJECTS`, says what is built and as which files.

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
