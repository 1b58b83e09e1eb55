"""Coordinates of CTAs, boxes of tensors that are written in them, and stores of such boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from crossfuse import _tvm as ir

_Tile = TypeVar("_Tile", bound="Tile")


@dataclass(frozen=True)
class Place:
    """A coordinate of a CTA.

    Attributes
    ----------
    tag : str
        ``"blockIdx.x"`` or ``"cluster.x"``, with the other axes.
    var : tvm.ir.Var
        The loop variable, which origins of tiles are written in.
    extent : int
        Its number of values.
    """

    tag: str
    var: Any
    extent: int

    @property
    def in_cluster(self) -> bool:
        """Whether it tells CTAs of one cluster apart."""
        return self.tag.startswith("cluster.")


@dataclass(frozen=True)
class Tile:
    """A box of a tensor in global memory.

    Attributes
    ----------
    buffer : Any
        The tensor, a parameter of the function.
    origin : tuple
        Index of the first element, in the variables of places and of the reduction's step.
    shape : tuple[int, int]
        Extents of the box. It may reach beyond the tensor: loads find zeros there, and nothing is
        stored.
    """

    buffer: Any
    origin: tuple[Any, ...]
    shape: tuple[int, int]

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the tensor: of the last two dimensions, if there are parts."""
        return tuple(int(each) for each in self.buffer.ty.shape)[-2:]

    @property
    def dtype(self) -> str:
        """Element type of the tensor."""
        return str(self.buffer.ty.dtype)

    def with_parameters(self: _Tile, images: Mapping[Any, Any]) -> _Tile:
        """The same box of the image of its buffer, if it has one."""
        return replace(self, buffer=images.get(self.buffer, self.buffer))


@dataclass(frozen=True)
class Gather:
    """An intermediate that stays in a cluster: each CTA makes a slice, all of them get the whole.

    Attributes
    ----------
    place : Place
        The cluster axis whose CTAs make the slices, in the order of their ranks.
    slab : Any
        The buffer of slices, [rank, row, column] or [rank, part, row, column] where clusters make
        different parts, in scope ``shared.dsm``.
    whole : Any
        The buffer in each CTA's shared memory that all slices are copied to.
    ring : bool
        Whether slices are multiplied as they arrive: CTA r begins with slice r.
    bulk : bool
        Whether they are sent by bulk copies; else by stores from registers.
    """

    place: Place
    slab: Any
    whole: Any
    ring: bool = False
    bulk: bool = False

    @property
    def width(self) -> int:
        """Columns of a slice."""
        return int(self.slab.ty.shape[-1])

    @property
    def extents(self) -> tuple[int, int]:
        """Rows of the intermediate, and columns of all slices of a cluster."""
        return int(self.slab.ty.shape[-2]), self.place.extent * self.width


@dataclass(frozen=True)
class GatheredTile(Tile):
    """A box of what a cluster gathers, as if slices lay side by side in one matrix.

    Attributes
    ----------
    gather : Gather
        The intermediate.
    """

    gather: Gather

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the matrix."""
        return self.gather.extents


@dataclass(frozen=True)
class KeptTile(Tile):
    """A box of an intermediate that stays in the registers of the CTA that makes it."""


@dataclass(frozen=True)
class Rows:
    """Kernels run on fewer rows than the function has.

    Attributes
    ----------
    count : tvm.ir.Var
        How many there are in a call: a parameter of kernels that ask for it.
    tensors : tuple
        Parameters of the function that have as many.
    """

    count: Any
    tensors: tuple[Any, ...]

    def end(self, buffer: Any) -> Any:
        """Where the rows of a buffer end; None if all of them are there."""
        return self.count if any(buffer.same_as(each) for each in self.tensors) else None

    def with_parameters(self, images: Mapping[Any, Any]) -> Rows:
        """The same, of buffers with their images."""
        tensors = tuple(images.get(each, each) for each in self.tensors)
        return Rows(images.get(self.count, self.count), tensors)


@dataclass(frozen=True)
class Store:
    """What leaves registers.

    Attributes
    ----------
    tile : Tile
        Where it goes: the whole tile of the product.
    row, column : tvm.ir.Var
        Variables that `value` is written in: the element's index in the tensor.
    value : Any
        Expression over the accumulator and further tensors at that index.
    part : Any
        Index of the matrix among several partial ones, [part, row, column]; None for one matrix.
    adds : int
        Number of clusters that add a tile each to the same one, which is zero before; 0 where each
        tile is stored once.
    zeros_from : int | None
        Column from which on elements are zero: the tile stays in the cluster or in registers, and
        reaches beyond the intermediate. None if it does not.
    rows : Rows | None
        Of functions that take fewer rows.
    """

    tile: Tile
    row: Any
    column: Any
    value: Any
    part: Any = None
    adds: int = 0
    zeros_from: int | None = None
    rows: Rows | None = None

    def with_parameters(self, images: Mapping[Any, Any]) -> Store:
        """The same store, of buffers with their images."""
        value = ir.substitute(self.value, lambda var: images.get(var, var))
        rows = None if self.rows is None else self.rows.with_parameters(images)
        return replace(self, tile=self.tile.with_parameters(images), value=value, rows=rows)

    def end_of_rows(self, buffer: Any) -> Any:
        """Where the rows of a buffer end in a call of fewer; None if all of them are there."""
        return None if self.rows is None else self.rows.end(buffer)


def covers(tile: Tile, wanted: Tile, known: Any) -> bool:
    """Whether two tiles are the same, but for what lies outside their tensor."""
    return all(
        known.can_prove_equal(a, b) and (has == size or min(has, size) == extent)
        for a, b, has, size, extent in zip(
            tile.origin, wanted.origin, tile.shape, wanted.shape, tile.extents, strict=True
        )
    )
