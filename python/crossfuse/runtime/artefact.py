"""Building a loadable kernel library and its manifest from a kernel image."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossfuse import hardware
from crossfuse.calls import Seconds, checked
from crossfuse.files import sha256, write_atomically
from crossfuse.lower.image import KernelImage
from crossfuse.runtime.cubin import Cubin, compile_cubin
from crossfuse.runtime.launcher import compile_launcher, generate_launcher
from crossfuse.runtime.limits import check_image, check_resources
from crossfuse.runtime.manifest import (
    FORMAT_VERSION,
    LIBRARY_HASH,
    Manifest,
    limits_of,
    releases,
)
from crossfuse.runtime.nvcc import NvccInfo
from crossfuse.schema import parse


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
