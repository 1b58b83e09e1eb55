"""Kernels for every number of rows: a folder of libraries, and the choice of one at each call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.calls import checked
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.files import read_text, sha256, write_atomically
from crossfuse.lower.image import BufferSpec
from crossfuse.runtime.artefact import Artefact
from crossfuse.runtime.dispatch_table import TABLE, Bin, DispatchTable, unreadable_table
from crossfuse.runtime.kernel import LoadedKernel, Runnable
from crossfuse.runtime.kernel_table import check_listed
from crossfuse.runtime.load import load
from crossfuse.runtime.manifest import Manifest
from crossfuse.schema import Damaged


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
    write_atomically(home / TABLE, text.encode())
    # Read back, so that the caller holds what a loader will hold.
    return DispatchTable.from_json(text, str(home / TABLE))


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
    path = Path(folder) / TABLE
    try:
        text = read_text(path)
    except Damaged as error:
        raise unreadable_table(str(path), error.found, "a table") from None
    table = DispatchTable.from_json(text, str(path))
    listed = {path.with_name(each.shared_object): each.manifest_sha256 for each in table.bins}
    check_listed(listed, TABLE, unreadable_table)
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
