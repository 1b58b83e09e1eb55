"""The table of a dispatch over rows: one kernel library for each bin of M."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from crossfuse.errors import ArtefactRefused, Rule, refuse
from crossfuse.schema import Damaged, FileName, read

unreadable_table = Rule(
    ArtefactRefused, "dispatch-table", instead="build the bins again, or copy the whole folder"
)

TABLE = "dispatch.json"
"""Name of the table in its folder, beside the libraries."""

TABLE_VERSION = 1
"""Raised whenever a reader of the older format would misread the newer."""


@dataclass(frozen=True)
class Bin:
    """A kernel library, and the calls that it serves."""

    #: Most rows of a call.
    rows: int
    #: File in the table's folder; the manifest lies beside it.
    shared_object: Annotated[str, FileName]
    #: Hash of the manifest's file, which holds that of the library.
    manifest_sha256: str


@dataclass(frozen=True)
class Piece:
    """Rows of a call that one launch computes, by the kernels of one bin."""

    first: int
    rows: int
    #: Index of the bin.
    bin: int


@dataclass(frozen=True)
class DispatchTable:
    """Bins of M, from few rows to many.

    Attributes
    ----------
    name : str
        What the kernels compute, for messages.
    bins : tuple[Bin, ...]
        At least one, each of more rows than the one before.
    metadata : Mapping[str, Any]
        What the builder recorded: the workload, where each bin's intermediate lives.

    Raises
    ------
    ArtefactRefused
        If there is no bin, or bins are not in order.

    Examples
    --------
    >>> bins = tuple(Bin(rows, f"main_{rows}.so", manifest_sha256="") for rows in (16, 64))
    >>> table = DispatchTable("ffn", bins, {})
    >>> table.rows
    (16, 64)
    >>> [each.rows for each in table.pieces(90)]  # rows of each launch
    [64, 26]
    """

    name: str
    bins: tuple[Bin, ...]
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        rows = [each.rows for each in self.bins]
        whole = all(isinstance(each, int) and each >= 1 for each in rows)
        if not rows or not whole or sorted(set(rows)) != rows:
            raise unreadable_table(
                self.name, f"bins of {rows} rows", "at least one, and each of more rows than before"
            )

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that each bin takes at most."""
        return tuple(each.rows for each in self.bins)

    def pieces(self, rows: int) -> tuple[Piece, ...]:
        """Which kernels compute a call.

        The smallest bin that holds all rows. Of more rows than the last bin holds, as many calls of
        that as are full, and then the smallest bin that holds the rest: rows do not depend on each
        other, but each call reads the weights again.

        Parameters
        ----------
        rows : int
            Rows of the call.

        Returns
        -------
        tuple[Piece, ...]
            In the order of the rows; none for no rows.

        Raises
        ------
        ArtefactRefused
            If the number is negative.

        Examples
        --------
        >>> bins = tuple(Bin(rows, f"main_{rows}.so", "") for rows in (16, 64))
        >>> [(each.first, each.rows, each.bin) for each in DispatchTable("", bins, {}).pieces(90)]
        [(0, 64, 1), (64, 26, 1)]
        """
        if rows < 0:
            raise refuse(
                ArtefactRefused,
                "dispatch-rows",
                self.name,
                found=f"{rows} rows",
                limit="0 rows or more",
                instead="pass tensors",
            )
        most = self.rows[-1]
        full, rest = divmod(rows, most)
        sizes = [most] * full + [rest] * bool(rest)
        return tuple(
            Piece(number * most, size, self._smallest(size)) for number, size in enumerate(sizes)
        )

    def _smallest(self, rows: int) -> int:
        return next(index for index, each in enumerate(self.rows) if rows <= each)

    def to_json(self) -> str:
        """Render as stable, indented JSON.

        Raises
        ------
        ArtefactRefused
            If `metadata` holds something that JSON has no word for.
        """
        record = {"format_version": TABLE_VERSION} | asdict(self)
        try:
            return json.dumps(record, indent=1, sort_keys=True) + "\n"
        except (TypeError, ValueError) as error:
            raise unreadable_table(f"metadata of {self.name}", str(error), "JSON values") from error

    @classmethod
    def from_json(cls, text: str, where: str) -> DispatchTable:
        """Parse the JSON of `to_json`.

        Parameters
        ----------
        text : str
            The JSON.
        where : str
            File that it came from, for messages.

        Returns
        -------
        DispatchTable
            The table.

        Raises
        ------
        ArtefactRefused
            If it is no JSON, of another format version, or incomplete; if bins are not in order, or
            name files of another folder.
        """
        try:
            return read(cls, text, version=TABLE_VERSION)
        except Damaged as error:
            raise unreadable_table(where, error.found, error.limit) from None


# Default bins of row counts, apart from the code that builds them, which needs TVM.

#: Rows of the bins unless the caller names others: a decode step, then powers of two that each fill
#: tiles of 64, 128 and 256 rows.
BINS = (16, 64, 128, 256, 512)
