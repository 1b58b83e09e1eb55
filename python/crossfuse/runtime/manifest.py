"""The manifest: facts about a kernel library, as JSON beside it and inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse._compat import installed_version
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.lower.image import BufferSpec, Launch
from crossfuse.runtime.resources import ResourceUsage
from crossfuse.schema import Damaged, parse, typed, versioned

FORMAT_VERSION = 2
"""Raised whenever a reader of the older format would misread the newer."""

LIBRARY_HASH = "library_sha256"
"""Key that only the manifest's file has: a library cannot hold its own hash."""

RELEASES = {"crossfuse": "crossfuse", "tvm": "apache-tvm", "tvm-ffi": "apache-tvm-ffi"}
"""Packages whose versions records have, with their names on PyPI."""


def releases() -> dict[str, str | None]:
    """Versions that are installed here; None where not installed."""
    return {key: installed_version(name) for key, name in RELEASES.items()}


def limits_of(device: Device) -> dict[str, int]:
    """Limits of a device, as records have them."""
    return {key: value for key, value in asdict(device).items() if isinstance(value, int)}


@dataclass(frozen=True)
class Manifest:
    """What a kernel library holds and what it was made with.

    Attributes
    ----------
    format_version : int
        Version of this record.
    name : str
        The function.
    device, arch : str
        Device it was planned for, such as ``"nvidia-h100"``, and its architecture.
    versions : Mapping[str, str | None]
        Versions of crossfuse, tvm, tvm-ffi and nvcc; None where not installed.
    limits : Mapping[str, int]
        Limits of the device that the kernels were checked against.
    buffers : tuple[BufferSpec, ...]
        Arguments in order.
    launches : tuple[Launch, ...]
        Kernel launches in order.
    resources : tuple[ResourceUsage, ...]
        What each kernel needs.
    cuda_sha256, cubin_sha256 : str
        Hashes of the generated CUDA text and of the cubin.
    metadata : Mapping[str, Any]
        What the caller recorded: hashes of sources, the plan.
    trace : str | None
        Trace of the schedule, where the caller gave one.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> [each.name for each in kernel.artefact.manifest.buffers]
    ['A', 'B_gate', 'B_up', 'D', 'out']
    """

    format_version: int
    name: str
    device: str
    arch: str
    versions: Mapping[str, str | None]
    limits: Mapping[str, int]
    buffers: tuple[BufferSpec, ...]
    launches: tuple[Launch, ...]
    resources: tuple[ResourceUsage, ...]
    cuda_sha256: str
    cubin_sha256: str
    metadata: Mapping[str, Any]
    trace: str | None

    def to_json(self) -> str:
        """Render as stable, indented JSON.

        Raises
        ------
        ArtefactRefused
            If `metadata` holds something that JSON has no word for.
        """
        try:
            return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        except (TypeError, ValueError) as error:
            raise unreadable(
                f"metadata of {self.name}",
                str(error),
                "JSON values",
                "convert the metadata to text, numbers, lists and dictionaries",
            ) from error

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse the JSON of `to_json`.

        Parameters
        ----------
        text : str
            The JSON.
        where : str
            File or library that it came from, for messages.

        Returns
        -------
        Manifest
            The record.

        Raises
        ------
        ArtefactRefused
            If it is no JSON, of another format version, or incomplete.
        """
        try:
            record = parse(text)
            if isinstance(record, dict):
                record.pop(LIBRARY_HASH, None)
                versioned(record, FORMAT_VERSION)
            return typed(cls, record)
        except Damaged as error:
            raise unreadable(where, error.found, error.limit) from None


def unreadable(
    where: str,
    found: str,
    limit: str,
    instead: str = "build the library again with the installed crossfuse",
) -> RefusedError:
    """Build the refusal of a manifest that cannot be read or written."""
    return refuse(ArtefactRefused, "manifest", where, found=found, limit=limit, instead=instead)
