"""The manifest: facts about a kernel library, as JSON beside it and inside it.

Among them are the resources that ptxas reports of each kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crossfuse._compat import installed_version
from crossfuse.errors import ArtefactRefused, Rule
from crossfuse.hardware import Device
from crossfuse.lower.image import BufferSpec, Launch
from crossfuse.schema import Damaged, parse, typed, versioned

unreadable = Rule(
    ArtefactRefused, "manifest", instead="build the library again with the installed crossfuse"
)

# Resources of a kernel as ptxas reports them: registers, spills, shared memory, advisories.


@dataclass(frozen=True)
class ResourceUsage:
    """What ptxas reports for one kernel.

    Attributes
    ----------
    kernel : str
        Name of the ``__global__`` function.
    registers : int
        Registers of one thread.
    spill_store_bytes, spill_load_bytes : int
        Register spills of one thread, in bytes.
    static_shared_bytes : int
        Static shared memory of one CTA, in bytes.
    stack_bytes : int
        Stack frame of one thread, in bytes.
    barriers : int
        Named barriers in use.
    advisories : tuple[str, ...]
        Numbers of ptxas' remarks on how it compiled wgmma, such as ``"C7510"``: it waits for each
        product before the next. A sound kernel of the Hopper pipeline has none.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> kernel.artefact.manifest.resources[0].spill_store_bytes
    0
    """

    kernel: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    stack_bytes: int
    barriers: int
    advisories: tuple[str, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Bytes that one thread spills and loads back."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def complaints(self) -> tuple[str, ...]:
        """What costs time and was not meant: spills, and wgmma that does not overlap."""
        spills = (f"{self.spill_bytes} bytes spilled",) if self.spill_bytes else ()
        return (*spills, *(f"ptxas {number}" for number in self.advisories))

    @property
    def summary(self) -> str:
        """In words, such as ``168 registers, no spills``."""
        return ", ".join((f"{self.registers} registers", *(self.complaints or ("no spills",))))


def parse_resources(log: str) -> tuple[ResourceUsage, ...]:
    """Read the output of ``ptxas -v``: one entry for each entry function.

    Device functions that were not inlined are left out.
    """
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'", 1)[0]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        # The frame of the kernel itself, not of a device function printed after it.
        frame = part[max(part.find(f"Function properties for {kernel}\n"), 0) :]
        found.append(
            ResourceUsage(
                kernel,
                registers=number(r"Used (\d+) registers"),
                spill_store_bytes=number(r"(\d+) bytes spill stores", frame),
                spill_load_bytes=number(r"(\d+) bytes spill loads", frame),
                static_shared_bytes=number(r"(\d+) bytes smem"),
                stack_bytes=number(r"(\d+) bytes stack frame", frame),
                barriers=number(r"used (\d+) barriers"),
                advisories=_advisories(log, kernel),
            )
        )
    return tuple(found)


def _advisories(log: str, kernel: str) -> tuple[str, ...]:
    """Numbers C75xx that name a kernel, or no function at all; each once."""
    lines = re.findall(r"\((C75\d\d)\)([^\n]*)", log)
    names = ((number, re.search(r"in (?:the )?function '([^']+)'", rest)) for number, rest in lines)
    return tuple(dict.fromkeys(n for n, name in names if name is None or name[1] == kernel))


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
