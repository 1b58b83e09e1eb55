"""What a scheduled function does tile by tile, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from crossfuse import _tvm as ir


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
        """Extents of the tensor."""
        return tuple(int(each) for each in self.buffer.ty.shape)

    @property
    def dtype(self) -> str:
        """Element type of the tensor."""
        return str(self.buffer.ty.dtype)


@dataclass(frozen=True)
class Contraction:
    """A loop that multiplies tiles: ``accumulator[m, n] += left[m, k] * right[n, k]``.

    Attributes
    ----------
    step : tvm.ir.Var
        Variable of the loop over the reduction.
    steps : int
        Its extent.
    stages : int
        Stages of the pipeline; 0 for as many as fit.
    left, right : Tile
        What is loaded in each step.
    right_is_transposed : bool
        Whether the right tile is stored as [k, n] rather than [n, k].
    accumulator : Any
        The float32 buffer in registers.
    """

    step: Any
    steps: int
    stages: int
    left: Tile
    right: Tile
    right_is_transposed: bool
    accumulator: Any

    @property
    def rows(self) -> int:
        """Rows of the product's tile."""
        return self.left.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the product's tile."""
        return self.right.shape[1 if self.right_is_transposed else 0]

    @property
    def depth(self) -> int:
        """Elements of the reduction in a step."""
        return self.left.shape[1]


@dataclass(frozen=True)
class Store:
    """What leaves registers.

    Attributes
    ----------
    tile : Tile
        Where it goes.
    row, column : tvm.ir.Var
        Variables that `value` is written in: the element's index in the tensor.
    value : Any
        Expression over the accumulator and further tensors at that index.
    """

    tile: Tile
    row: Any
    column: Any
    value: Any


@dataclass(frozen=True)
class TileProgram:
    """A kernel: for each place, one contraction and the store of its result.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs, outermost first.
    contraction : Contraction
        The product.
    store : Store
        Its epilogue.
    parameters : tuple
        Parameters of the function, in order.
    """

    places: tuple[Place, ...]
    contraction: Contraction
    store: Store
    parameters: tuple[Any, ...]

    def with_parameters(self, images: Mapping[Any, Any]) -> TileProgram:
        """Return the program on other buffers than the function's parameters."""

        def tile(each: Tile) -> Tile:
            return replace(each, buffer=images[each.buffer])

        loop, store = self.contraction, self.store
        return replace(
            self,
            contraction=replace(loop, left=tile(loop.left), right=tile(loop.right)),
            store=replace(
                store,
                tile=tile(store.tile),
                value=ir.substitute(store.value, lambda var: images.get(var, var)),
            ),
            parameters=tuple(images[each] for each in self.parameters),
        )

    @property
    def grid(self) -> tuple[Place, ...]:
        """Places that count clusters, outermost first."""
        return tuple(each for each in self.places if each.tag.startswith("blockIdx."))

    @property
    def cluster(self) -> tuple[Place, ...]:
        """Places within a cluster, outermost first."""
        return tuple(each for each in self.places if each.tag.startswith("cluster."))

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return prod(each.extent for each in self.cluster)

    @property
    def tiles(self) -> int:
        """Tiles that clusters compute."""
        return prod(each.extent for each in self.grid)
