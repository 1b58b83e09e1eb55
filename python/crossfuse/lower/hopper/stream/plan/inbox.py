"""Where the states of CTAs that share keys are handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.stream.program.parts import Kind
from crossfuse.lower.hopper.stream.program.stream import StreamProgram
from crossfuse.lower.refusal import refuse

_FLOAT = 4


@dataclass(frozen=True)
class Inbox:
    """Slots for the states of all CTAs, in the order of ranks: the columns that one CTA merges.

    In the shared memory of that CTA; or in global memory, all columns of a tile of rows.

    Attributes
    ----------
    size : int
        CTAs that share the keys.
    rows : int
        Rows that are stored; others are not handed over.
    columns : int
        Columns of a slice; the last CTAs may have fewer.
    all_columns : int
        Columns of all slices.
    of_rows : tuple
        Slabs of values of rows. They lie side by side, padded to pairs, behind the columns of all
        slots.
    of_elements : Any
        The slab of the second product's sums.
    in_memory : bool
        Whether it lies in global memory, one for each tile of rows.
    """

    size: int
    rows: int
    columns: int
    all_columns: int
    of_rows: tuple[Any, ...]
    of_elements: Any
    in_memory: bool = False

    @property
    def pairs(self) -> int:
        """Pairs of values of a row."""
        return -(-len(self.of_rows) // 2)

    @property
    def bytes(self) -> int:
        """All slots."""
        return self.size * self.rows * (self.columns + 2 * self.pairs) * _FLOAT

    def element(self, slot: Any, row: Any, column: Any) -> Any:
        """Offset of an element of a slot."""
        return ((slot * self.rows + row) * self.columns + column) * _FLOAT

    def of_row(self, slot: Any, row: Any, pair: int) -> Any:
        """Offset of a pair of values of a row."""
        behind = self.size * self.rows * self.columns
        return (behind + ((slot * self.rows + row) * self.pairs + pair) * 2) * _FLOAT

    def expected(self, width: Any) -> Any:
        """Bytes that a CTA receives whose slice has so many columns."""
        return (width + 2 * self.pairs) * (self.size * self.rows * _FLOAT)


def plan_inbox(program: StreamProgram) -> Inbox | None:
    """Lay the inbox of a stream out; None if its CTAs share no keys.

    Raises
    ------
    LoweringRefused
        If slices have odd numbers of columns: a thread sends pairs.
    """
    split = program.split
    if split is None:
        return None
    if split.columns % 2:
        raise refuse(
            "stream-split",
            f"loop '{split.place.var.name}'",
            found=f"slices of {split.columns} columns for {split.place.extent} CTAs",
            limit="slices of an even number of columns, since threads send pairs",
            instead="pass another number of CTAs a cluster, such as a power of two",
        )
    of_rows = tuple(each.target for each in split.slabs if each.kind is Kind.ROW)
    sums = [each for each in split.slabs if each.kind is not Kind.ROW]
    if len(sums) != 1:
        raise refuse(
            "stream-split",
            f"loop '{split.place.var.name}'",
            found=f"{len(sums)} slabs of rows and columns",
            limit="one, that of the second product's sums",
            instead="hand over one slab of columns",
        )
    return Inbox(
        split.place.extent,
        program.output.rows,
        split.columns,
        program.output.columns,
        of_rows,
        sums[0].target,
        split.in_memory,
    )
