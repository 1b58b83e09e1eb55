"""Folders of libraries, loaded without TVM: kernels by name, or one for each bin of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, Rule, refuse
from crossfuse.files import read_bytes, read_text, sha256, write_atomically
from crossfuse.lower.image import BufferSpec
from crossfuse.runtime.artefact import Artefact
from crossfuse.runtime.dispatch_table import TABLE as DISPATCH_TABLE
from crossfuse.runtime.dispatch_table import Bin, DispatchTable, unreadable_table
from crossfuse.runtime.kernel import LoadedKernel, Runnable, entries
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


# Kernels for every number of rows: a folder of libraries, and the choice of one at each call.


class Dispatch(Runnable):
    """A kernel for each bin of M, called as one kernel with any number of rows.

    ``dispatch(*inputs, *outputs)`` counts the rows of the first tensor that has any and runs the
    kernel of the smallest bin that holds them, see `DispatchTable.pieces`; `run` makes the outputs.
    Nothing is copied: kernels take the tensors as they are, and of more rows than the last bin
    holds, views of them. The choice is made on the host, at the call: a CUDA graph that captures
    the call keeps it, and is replayed for as many rows.

    Parameters
    ----------
    table : DispatchTable
        The bins.
    kernels : Sequence[LoadedKernel]
        Their kernels, in the same order.

    Raises
    ------
    ArtefactRefused
        If a kernel does not take fewer rows, has another number of rows than its bin, or other
        buffers than the first one.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     ffn = crossfuse.compile_bins(spec, bins=(16,), directory=folder)
    ...     again = crossfuse.load_dispatch(folder, check_device=False)
    >>> [each.rows for each in again.table.pieces(40)]  # launches of a call on 40 rows
    [16, 16, 8]
    >>> again(A, B_gate, B_up, D, out)  # on a GPU  # doctest: +SKIP
    """

    def __init__(self, table: DispatchTable, kernels: Sequence[LoadedKernel]) -> None:
        check_alike(table, [each.manifest for each in kernels])
        self.table = table
        self.kernels = tuple(kernels)
        self._by_row = tuple(each.rows for each in self.buffers)

    @property
    def name(self) -> str:
        """What the kernels compute."""
        return self.table.name

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """Arguments in order, with as many rows as the last bin takes."""
        return self.kernels[-1].buffers

    def __call__(self, *arguments: Any, device: int = 0) -> None:
        """Run on `arguments`, one for each buffer.

        Parameters
        ----------
        *arguments : tensor
            As of `LoadedKernel`; those of buffers with rows may have any number of them, all of
            them as many. Nothing is launched for no rows.
        device : int
            Index of the GPU that numpy arrays are copied to.

        Raises
        ------
        ArtefactRefused
            If an argument, or the GPU, does not fit.
        EnvironmentRefused
            If there is no GPU or driver, or CUDA reports a fault.
        """
        rows = self._count(arguments)
        pieces = self.table.pieces(rows)
        if len(pieces) == 1:
            self.kernels[pieces[0].bin](*arguments, device=device)
            return
        self._check_counts(arguments, rows)
        for piece in pieces:
            part = slice(piece.first, piece.first + piece.rows)
            views = self._views(arguments, part)
            self.kernels[piece.bin](*views, device=device)

    def _count(self, arguments: Sequence[Any]) -> int:
        """Number of rows of the first tensor that has rows."""
        for by_row, each in zip(self._by_row, arguments, strict=False):
            if by_row and getattr(each, "shape", None):
                return int(each.shape[0])
        names = ", ".join(each.name for each in self.buffers)
        raise self._refuse(
            "argument-count",
            f"{len(arguments)} arguments, none of them a tensor with rows",
            f"{len(self.buffers)} tensors ({names})",
            "pass the inputs and the outputs, in this order",
        )

    def _check_counts(self, arguments: Sequence[Any], rows: int) -> None:
        """Refuse tensors of other row counts, which views would hide.

        A call of one piece has no views, and its library checks.
        """
        for buffer, each in zip(self.buffers, arguments, strict=False):
            shape = tuple(getattr(each, "shape", None) or ())
            if buffer.rows and shape[:1] != (rows,):
                raise self._refuse(
                    "argument-rows",
                    f"'{buffer.name}' of shape {shape}",
                    f"{rows} rows, as the first tensor has",
                    "pass tensors of equally many rows",
                )

    def _views(self, arguments: Sequence[Any], part: slice) -> Iterator[Any]:
        flags = (*self._by_row, *[False] * len(arguments))  # the library counts the arguments
        return (x[part] if by_row else x for by_row, x in zip(flags, arguments, strict=False))

    def _refuse(self, rule: str, found: str, limit: str, instead: str) -> RefusedError:
        where = f"dispatch of {self.name}"
        return refuse(ArtefactRefused, rule, where, found=found, limit=limit, instead=instead)


@checked
def write_dispatch(
    folder: str | os.PathLike[str],
    name: str,
    artefacts: Mapping[int, Artefact],
    metadata: Mapping[str, Any] | None = None,
) -> DispatchTable:
    """Write the table of libraries that lie in a folder.

    Parameters
    ----------
    folder : path
        Where the libraries are.
    name : str
        What they compute.
    artefacts : Mapping[int, Artefact]
        Libraries by the rows of their bins.
    metadata : Mapping[str, Any], optional
        JSON values to record.

    Returns
    -------
    DispatchTable
        What was written.

    Raises
    ------
    ArtefactRefused
        If there is no library, one lies elsewhere, or they do not fit together.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     ffn = crossfuse.compile_bins(spec, bins=(16,), directory=folder)
    ...     libraries = {rows: each.artefact for rows, each in ffn.bins.items()}
    ...     table = write_dispatch(folder, "ffn", libraries, metadata={"layer": 3})
    >>> table.name, table.rows
    ('ffn', (16,))
    """
    home = Path(folder)
    bins = []
    for rows, artefact in sorted(artefacts.items()):
        if artefact.shared_object.parent.resolve() != home.resolve():
            raise unreadable_table(name, f"a library in {artefact.shared_object.parent}", str(home))
        digest = sha256(artefact.manifest_path.read_bytes())
        bins.append(Bin(rows, artefact.shared_object.name, digest))
    table = DispatchTable(name, tuple(bins), dict(metadata or {}))
    text = table.to_json()
    check_alike(table, [artefacts[each.rows].manifest for each in table.bins])
    # Last of all: a folder that is not complete has no table.
    write_atomically(home / DISPATCH_TABLE, text.encode())
    # Read back, so that the caller holds what a loader will hold.
    return DispatchTable.from_json(text, str(home / DISPATCH_TABLE))


@checked
def load_dispatch(folder: str | os.PathLike[str], *, check_device: bool = True) -> Dispatch:
    """Load a folder of libraries that `write_dispatch` completed.

    Parameters
    ----------
    folder : path
        The folder, with the table and all libraries and manifests.
    check_device : bool
        See `crossfuse.runtime.load`.

    Returns
    -------
    Dispatch
        The callable.

    Raises
    ------
    ArtefactRefused
        If a file is missing, damaged, of another format version, or not the one that the table was
        written for; or if the GPU is of another architecture.

    Examples
    --------
    >>> import crossfuse
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     spec = "gated_ffn:M=16,K=64,N=128,L=64"
    ...     ffn = crossfuse.compile_bins(spec, bins=(16,), directory=folder)
    ...     again = load_dispatch(folder, check_device=False)
    >>> again.table.rows
    (16,)
    >>> again(A, B_gate, B_up, D, out)  # on a GPU; of any number of rows  # doctest: +SKIP
    """
    path = Path(folder) / DISPATCH_TABLE
    try:
        text = read_text(path)
    except Damaged as error:
        raise unreadable_table(str(path), error.found, "a table") from None
    table = DispatchTable.from_json(text, str(path))
    listed = {path.with_name(each.shared_object): each.manifest_sha256 for each in table.bins}
    check_listed(listed, DISPATCH_TABLE, unreadable_table)
    kernels = [load(each, check_device=False) for each in listed]
    if check_device:
        kernels[0].check_device()
    return Dispatch(table, kernels)


def check_alike(table: DispatchTable, manifests: Sequence[Manifest]) -> None:
    """Refuse kernels that do not fit their bins, or each other, naming the library.

    `manifests` are those of the table's bins, in the same order.
    """
    (first, *_) = manifests
    for each, manifest in zip(table.bins, manifests, strict=True):
        counts = {buffer.shape[0] for buffer in manifest.buffers if buffer.rows}
        if counts != {each.rows}:
            found = f"kernels for at most {counts.pop()} rows" if counts else "kernels of all rows"
            raise unreadable_table(
                each.shared_object, found, f"kernels for at most {each.rows} rows"
            )
        if _one_row(manifest) != _one_row(first) or manifest.arch != first.arch:
            raise unreadable_table(
                each.shared_object,
                f"({_text(manifest)}) on {manifest.arch}",
                f"({_text(first)}) on {first.arch}, as {table.bins[0].shared_object} has them",
            )


def _one_row(manifest: Manifest) -> list[BufferSpec]:
    """Buffers of a call of one row, which are the same for all bins."""
    return [each.with_rows(1) for each in manifest.buffers]


def _text(manifest: Manifest) -> str:
    return ", ".join(f"{each.name}{list(each.shape)} {each.dtype}" for each in _one_row(manifest))
