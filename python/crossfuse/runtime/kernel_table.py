"""A model's kernels as a folder of libraries, compiled ahead of time and loaded without TVM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, Rule
from crossfuse.files import read_bytes, read_text, sha256, write_atomically
from crossfuse.runtime.artefact import Artefact
from crossfuse.runtime.kernel import LoadedKernel, entries
from crossfuse.runtime.load import load
from crossfuse.runtime.manifest import Manifest
from crossfuse.schema import Damaged, FileName, read

_refused = Rule(
    ArtefactRefused,
    "kernel-table",
    instead="build the kernels again into one folder, or copy the whole folder",
)

# Libraries that a table in their folder lists, each with the hash of its manifest.


def check_listed(
    libraries: Mapping[Path, str], table: str, refused: Callable[[str, str, str], RefusedError]
) -> None:
    """Check that manifests are those that a table was written for, before anything is loaded.

    `libraries` gives the hash of each library's manifest as the table has it. `refused` makes a
    refusal of the place, what was found, and what was expected. A missing manifest is left to
    `crossfuse.runtime.load`.
    """
    for each, digest in libraries.items():
        manifest = each.with_suffix(".json")
        try:
            found = sha256(read_bytes(manifest))
        except Damaged:
            continue
        if found != digest:
            raise refused(str(manifest), f"a file of hash {found}", f"{digest}, as in {table}")


TABLE = "kernels.json"
"""Name of the table in its folder, beside the libraries."""

TABLE_VERSION = 2
"""Raised whenever a reader of the older format would misread the newer."""


@dataclass(frozen=True)
class KernelTable:
    """What lies in the folder.

    Attributes
    ----------
    device, arch : str
        What the kernels are for.
    limits : Mapping[str, int]
        Limits of the device that they were checked against.
    versions : Mapping[str, str | None]
        What they were made with.
    kernels : Mapping[str, str]
        Hashes of the manifests' files, which have those of the libraries, by name: the kernel
        ``name`` is ``name.so``, with its manifest beside it.
    sources : Mapping[str, str]
        Hashes of the generated CUDA text, by name.
    plans : Mapping[str, Any]
        By name what each kernel was scheduled by: family, tiles, estimated microseconds; only of
        those that were planned.
    metadata : Mapping[str, Any]
        What the builder recorded, such as the model.

    Examples
    --------
    >>> table = KernelTable(
    ...     device="nvidia-h100",
    ...     arch="sm_90a",
    ...     limits={},
    ...     versions={},
    ...     kernels={"main": "5f3a..."},
    ...     sources={"main": "77c1..."},
    ...     plans={},
    ...     metadata={"model": "mlp"},
    ... )
    >>> sorted(f"{each}.so" for each in table.kernels)
    ['main.so']
    """

    device: str
    arch: str
    limits: Mapping[str, int]
    versions: Mapping[str, str | None]
    kernels: Mapping[Annotated[str, FileName], str]
    sources: Mapping[str, str]
    plans: Mapping[str, Any]
    metadata: Mapping[str, Any]


class Kernels(Mapping[str, LoadedKernel]):
    """Loaded kernels by name.

    Parameters
    ----------
    table : KernelTable
        What lies in the folder.
    kernels : Mapping[str, LoadedKernel]
        All of it.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     kernel = crossfuse.compile(spec, directory=folder)
    ...     table = write_kernels(folder, [kernel.artefact])
    ...     kernels = load_kernels(folder, check_device=False)
    >>> {name: len(each.buffers) for name, each in kernels.items()}
    {'main': 5}
    """

    def __init__(self, table: KernelTable, kernels: Mapping[str, LoadedKernel]) -> None:
        self.table = table
        self._kernels = dict(kernels)

    def __getitem__(self, name: str) -> LoadedKernel:
        return self._kernels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def register(self) -> None:
        """Make the kernels known to tvm-ffi by their names.

        TVM's virtual machine finds there what an exported executable calls, see
        `crossfuse.relax.BuildKernels`. A function of the same name gives way.
        """
        from tvm_ffi import register_global_func

        for kernel in self._kernels.values():
            for name in entries(kernel.manifest):
                register_global_func(name, kernel.module[name], override=True)


@checked
def write_kernels(
    folder: str | os.PathLike[str],
    artefacts: Sequence[Artefact],
    metadata: Mapping[str, Any] | None = None,
) -> KernelTable:
    """Write the table of libraries that lie in a folder.

    Parameters
    ----------
    folder : path
        Where the libraries are.
    artefacts : Sequence[Artefact]
        Libraries of one device, each named as its function.
    metadata : Mapping[str, Any], optional
        JSON values to record.

    Returns
    -------
    KernelTable
        What was written.

    Raises
    ------
    ArtefactRefused
        If there is no library, one lies elsewhere, or they are for several devices.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     kernel = crossfuse.compile(spec, directory=folder)
    ...     table = write_kernels(folder, [kernel.artefact], metadata={"model": "mlp"})
    >>> list(table.kernels), table.arch
    (['main'], 'sm_90a')
    """
    home = Path(folder)
    if not artefacts:
        raise _refused(str(home), "no library", "at least one")
    first = artefacts[0].manifest
    kernels = {}
    for each in artefacts:
        expected = home / f"{each.manifest.name}.so"
        if each.shared_object.resolve() != expected.resolve():
            raise _refused(each.manifest.name, str(each.shared_object), str(expected))
        if each.manifest.device != first.device:
            found = f"a library for {each.manifest.device}"
            raise _refused(each.manifest.name, found, f"{first.device}, as {first.name}")
        kernels[each.manifest.name] = sha256(each.manifest_path.read_bytes())
    table = _table([each.manifest for each in artefacts], kernels, dict(metadata or {}))
    record = {"format_version": TABLE_VERSION} | asdict(table)
    try:
        text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise _refused("metadata", str(error), "JSON values") from error
    # Last of all: a folder that is not complete has no table.
    write_atomically(home / TABLE, text.encode())
    return table


@checked
def load_kernels(folder: str | os.PathLike[str], *, check_device: bool = True) -> Kernels:
    """Load a folder of libraries that `write_kernels` completed; needs tvm-ffi and the driver.

    Parameters
    ----------
    folder : path
        The folder, with the table and all libraries and manifests.
    check_device : bool
        See `crossfuse.runtime.load`.

    Returns
    -------
    Kernels
        By name.

    Raises
    ------
    ArtefactRefused
        If a file is missing, damaged, of another version, or not the one that the table was written
        for; or if the GPU is another one or has less than the kernels need.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     kernel = crossfuse.compile(spec, directory=folder)
    ...     table = write_kernels(folder, [kernel.artefact])
    ...     load_kernels(folder, check_device=False)["main"].buffers[-1].shape  # of the output
    (16, 64)
    """
    path = Path(folder) / TABLE
    table = _read(path)
    listed = {path.with_name(f"{name}.so"): digest for name, digest in table.kernels.items()}
    check_listed(listed, TABLE, _refused)
    loaded = [load(each, check_device=check_device) for each in listed]
    return Kernels(table, dict(zip(table.kernels, loaded, strict=True)))


def _table(
    manifests: Sequence[Manifest], kernels: Mapping[str, str], metadata: Mapping[str, Any]
) -> KernelTable:
    """The table of all kernels together, from their manifests."""
    first = manifests[0]
    return KernelTable(
        first.device,
        first.arch,
        first.limits,
        first.versions,
        kernels,
        {each.name: each.cuda_sha256 for each in manifests},
        {each.name: each.metadata["plan"] for each in manifests if "plan" in each.metadata},
        metadata,
    )


def _read(path: Path) -> KernelTable:
    try:
        return read(KernelTable, read_text(path), version=TABLE_VERSION)
    except Damaged as error:
        raise _refused(str(path), error.found, error.limit) from None
