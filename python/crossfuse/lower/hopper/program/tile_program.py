"""What a scheduled function does tile by tile, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, GatheredTile, KeptTile, Place, Store, Tile

if TYPE_CHECKING:
    from crossfuse.lower.hopper.rows.program import RowProgram
    from crossfuse.lower.hopper.stream.program import RowReductions, StreamProgram


#: Neighbours in a row that a thread loads at once.
UNIT = 4


@dataclass(frozen=True)
class SumProgram:
    """The last phase of a reduction that is split over clusters: adds the partial tiles.

    Each CTA adds a slice of all of them.
    """

    #: Outermost first, as in the preceding phase.
    places: tuple[Place, ...]
    #: Partial sums in global memory, [part, row, column].
    partial: Any
    #: Number of parts.
    parts: int
    #: Counts the elements of a CTA's slice.
    element: Any
    #: Their number, a multiple of `UNIT`.
    elements: int
    #: Row and column of an element in the output.
    index: tuple[Any, Any]
    #: The buffer that the epilogue reads.
    sums: Any
    #: The epilogue.
    store: Store
    #: All buffers in global memory.
    parameters: tuple[Any, ...]

    @property
    def results(self) -> tuple[Any, ...]:
        """Buffers that the epilogue reads."""
        return (self.sums,)

    @property
    def first(self) -> tuple[Any, ...]:
        """Row and column of a slice's first element."""
        known = ir.sym.Analyzer()
        return tuple(known.simplify(ir.at_zero(each, self.element)) for each in self.index)

    @property
    def analyzer(self) -> Any:
        """An analyzer that knows the ranges of all places and of the elements."""
        places = ((each.var, 0, each.extent) for each in self.places)
        return ir.ranged(*places, (self.element, 0, self.elements))

    def has_tail(self, dimension: int) -> bool:
        """Whether elements may lie beyond the output: dimension 0 is rows, 1 columns."""
        inside = self.index[dimension] < self.store.tile.extents[dimension]
        return not self.analyzer.can_prove(inside)

    def begins_inside(self, dimension: int) -> bool:
        """Whether all slices begin within the output: dimension 0 is rows, 1 columns."""
        inside = self.first[dimension] < self.store.tile.extents[dimension]
        return bool(self.analyzer.can_prove(inside))


@dataclass(frozen=True)
class Product:
    """One product of a contraction: ``accumulator[m, n] += left[m, k] * right[n, k]``."""

    #: Loaded in each step.
    right: Tile
    #: Whether the right tile is stored as [k, n] rather than [n, k].
    is_transposed: bool
    #: The float32 buffer in registers.
    accumulator: Any

    @property
    def columns(self) -> int:
        """Columns of the product's tile."""
        return self.right.shape[1 if self.is_transposed else 0]


@dataclass(frozen=True)
class Correction:
    """Sums of row i so far are multiplied by ``factors[c, i]`` where chunk c begins."""

    #: A float32 matrix in global memory.
    factors: Any
    #: Elements of the reduction in a chunk.
    chunk: int


@dataclass(frozen=True)
class Contraction:
    """A loop that multiplies tiles, once or several times by the same left one."""

    #: Variable of the loop over the reduction.
    step: Any
    #: Its extent.
    steps: int
    #: Stages of the pipeline; 0 for as many as fit.
    stages: int
    #: Loaded in each step.
    left: Tile
    products: tuple[Product, ...]
    #: Whether no kernel that may still be running writes the right tiles.
    constant: bool = False
    #: What to add to a column of the left tensor for its place in the right one: other than 0 where
    #: a cluster has gathered a part of the columns.
    offset: Any = 0
    #: Factors for the sums so far where a chunk of the reduction begins.
    correction: Correction | None = None

    @property
    def rows(self) -> int:
        """Rows of the products' tiles."""
        return self.left.shape[0]

    @property
    def columns(self) -> int:
        """Columns of each product's tile."""
        return self.products[0].columns

    @property
    def depth(self) -> int:
        """Elements of the reduction in a step."""
        return self.left.shape[1]

    def result(self, buffer: Any) -> Tile:
        """The result of a product, as a tile of `buffer`."""
        product = self.products[0]
        columns = product.right.origin[1 if product.is_transposed else 0]
        return Tile(buffer, (self.left.origin[0], columns), (self.rows, self.columns))


@dataclass(frozen=True)
class Exchange:
    """Partial sums of the CTAs that share a reduction: each CTA adds a slice of all of them."""

    #: The cluster axis.
    place: Place
    #: Of a slice; CTA r combines elements ``r * elements`` to ``(r + 1) * elements`` of the tile,
    #: counted row by row.
    elements: int
    #: Columns of the tile; fewer than the product's if the tensor has fewer.
    width: int
    #: The buffer of sums that the epilogue reads.
    combined: Any

    @property
    def rows(self) -> int:
        """Rows of a slice; 0 if slices are no whole rows."""
        return 0 if self.elements % self.width else self.elements // self.width


@dataclass(frozen=True)
class TileProgram:
    """A kernel: for each place, one contraction and the store of its results."""

    #: Outermost first.
    places: tuple[Place, ...]
    contraction: Contraction
    #: If the reduction is split over the cluster.
    exchange: Exchange | None
    store: Store
    #: All buffers in global memory: parameters of the function, then intermediates.
    parameters: tuple[Any, ...]
    #: Whether its left operand, and nothing else that it loads, is an intermediate.
    follows: bool = False
    #: Whether a later phase of the same kernel loads what it stores, see `grid_stage`.
    staged: bool = False
    #: Adds the partial tiles that it stores.
    summed: SumProgram | None = None
    #: Reductions of the rows of its sums, which are stored in place of these.
    reduced: RowReductions | None = None
    #: Makes its left operand in the same kernel, row by row.
    rows: RowProgram | None = None
    #: Makes its left operand in the same kernel, tile by tile.
    streamed: StreamProgram | None = None

    def has_tail(self, dimension: int) -> bool:
        """Whether tiles of the output may reach beyond it: dimension 0 is rows, 1 columns."""
        tile = self.store.tile
        end = tile.origin[dimension] + tile.shape[dimension]
        return not self.analyzer.can_prove(end <= tile.extents[dimension])

    @property
    def gives(self) -> Gather | None:
        """The gather that its store goes to, if the result stays in the cluster."""
        tile = self.store.tile
        return tile.gather if isinstance(tile, GatheredTile) else None

    @property
    def takes(self) -> Gather | None:
        """The gather that its left operand comes from, if the cluster's preceding phase made it."""
        tile = self.contraction.left
        return tile.gather if isinstance(tile, GatheredTile) else None

    @property
    def splits(self) -> bool:
        """Whether the CTAs of a cluster share its reduction."""
        return self.exchange is not None

    @property
    def keeps(self) -> bool:
        """Whether its result stays in registers, for the next phase."""
        return isinstance(self.store.tile, KeptTile)

    @property
    def reuses(self) -> bool:
        """Whether its left operand is in registers, from the preceding phase."""
        return isinstance(self.contraction.left, KeptTile)

    @property
    def analyzer(self) -> Any:
        """An analyzer that knows the ranges of all places."""
        return ir.ranged(*((each.var, 0, each.extent) for each in self.places))

    @property
    def results(self) -> tuple[Any, ...]:
        """Buffers in registers that the epilogue reads, in the order of the products."""
        if self.exchange is not None:
            return (self.exchange.combined,)
        return tuple(each.accumulator for each in self.contraction.products)

    @property
    def grid(self) -> tuple[Place, ...]:
        """Places that count clusters, outermost first."""
        return tuple(each for each in self.places if not each.in_cluster)

    @property
    def cluster(self) -> tuple[Place, ...]:
        """Places within a cluster, outermost first."""
        return tuple(each for each in self.places if each.in_cluster)

    @property
    def cluster_size(self) -> int:
        """Number of CTAs in a cluster."""
        return prod(each.extent for each in self.cluster)

    @property
    def tiles(self) -> int:
        """Number of tiles that clusters compute."""
        return prod(each.extent for each in self.grid)
