"""What a scheduled function does tile by tile, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.program.tile import Gather, GatheredTile, KeptTile, Place, Store, Tile

if TYPE_CHECKING:
    from crossfuse.lower.hopper.reduced.program import RowReductions
    from crossfuse.lower.hopper.rows.program import RowProgram

# A reduction that is split over clusters: each CTA adds a slice of all partial tiles.

#: Neighbours of a row that a thread loads at once.
UNIT = 4


@dataclass(frozen=True)
class SumProgram:
    """The last phase of a kernel whose phase before stores partial tiles.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs, outermost first: of the phase before, too.
    partial : Any
        Partial sums in global memory, [part, row, column].
    parts : int
        Number of parts.
    element : tvm.ir.Var
        Counts the elements of a CTA's slice.
    elements : int
        Their number, a multiple of `UNIT`.
    index : tuple
        Row and column of an element in the output.
    sums : Any
        The buffer that the epilogue reads.
    store : Store
        The epilogue.
    parameters : tuple
        Everything in global memory.
    accumulated : bool
        Whether the parts are added already: `partial` is their sum, [row, column], which has to be
        zero again behind this phase.
    """

    places: tuple[Place, ...]
    partial: Any
    parts: int
    element: Any
    elements: int
    index: tuple[Any, Any]
    sums: Any
    store: Store
    parameters: tuple[Any, ...]
    accumulated: bool = False

    @property
    def results(self) -> tuple[Any, ...]:
        """Buffers that the epilogue reads."""
        return (self.sums,)

    @property
    def first(self) -> tuple[Any, ...]:
        """Row and column of a slice's first element."""
        zero = ir.tirx.IntImm(str(self.element.ty), 0)

        def start(var: Any) -> Any:
            return zero if var.same_as(self.element) else var

        return tuple(ir.sym.Analyzer().simplify(ir.substitute(each, start)) for each in self.index)

    @property
    def analyzer(self) -> Any:
        """An analyzer that knows the ranges of all places and of the elements."""
        known = ir.sym.Analyzer()
        for place in self.places:
            known.bind(place.var, ir.tvm.ir.Range(0, place.extent))
        known.bind(self.element, ir.tvm.ir.Range(0, self.elements))
        return known

    def has_tail(self, dimension: int) -> bool:
        """Whether elements may lie beyond the output: rows are 0, columns 1."""
        inside = self.index[dimension] < self.store.tile.extents[dimension]
        return not self.analyzer.can_prove(inside)

    def begins_inside(self, dimension: int) -> bool:
        """Whether all slices begin within the output: rows are 0, columns 1."""
        inside = self.first[dimension] < self.store.tile.extents[dimension]
        return bool(self.analyzer.can_prove(inside))

    def with_parameters(self, images: Mapping[Any, Any]) -> SumProgram:
        """Return the program on other buffers than the function's parameters."""
        return replace(
            self,
            partial=images[self.partial],
            store=self.store.with_parameters(images),
            parameters=tuple(images[each] for each in self.parameters),
        )


@dataclass(frozen=True)
class Product:
    """One product of a contraction: ``accumulator[m, n] += left[m, k] * right[n, k]``.

    Attributes
    ----------
    right : Tile
        What is loaded in each step.
    is_transposed : bool
        Whether the right tile is stored as [k, n] rather than [n, k].
    accumulator : Any
        The float32 buffer in registers.
    instead : Product | None
        What the second CTA of a pair makes, while the first one makes this.
    """

    right: Tile
    is_transposed: bool
    accumulator: Any
    instead: Product | None = None

    @property
    def both(self) -> tuple[Product, ...]:
        """The product of either CTA of a pair; else the one that there is."""
        return (self,) if self.instead is None else (self, self.instead)

    def with_parameters(self, images: Mapping[Any, Any]) -> Product:
        """Return the product of other buffers than the function's parameters."""
        instead = None if self.instead is None else self.instead.with_parameters(images)
        return replace(self, right=self.right.with_parameters(images), instead=instead)

    @property
    def columns(self) -> int:
        """Columns of the product's tile."""
        return self.right.shape[1 if self.is_transposed else 0]


@dataclass(frozen=True)
class Correction:
    """Sums of row i so far are multiplied by ``factors[c, i]`` where chunk c begins.

    Attributes
    ----------
    factors : Any
        A float32 matrix in global memory.
    chunk : int
        Elements of the reduction in a chunk.
    """

    factors: Any
    chunk: int


@dataclass(frozen=True)
class Contraction:
    """A loop that multiplies tiles, once or several times by the same left one.

    Attributes
    ----------
    step : tvm.ir.Var
        Variable of the loop over the reduction.
    steps : int
        Its extent.
    stages : int
        Stages of the pipeline; 0 for as many as fit.
    left : Tile
        The left tile, loaded in each step.
    products : tuple[Product, ...]
        What it is multiplied by.
    constant : bool
        Whether no kernel that may still be running writes the right tiles.
    offset : Any
        What to add to a column of the left tensor for its place in the right one: other than 0
        where a cluster has gathered a part of the columns.
    correction : Correction | None
        What sums so far are multiplied by where a chunk of the reduction begins.
    """

    step: Any
    steps: int
    stages: int
    left: Tile
    products: tuple[Product, ...]
    constant: bool = False
    offset: Any = 0
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
        """What a product computes, as a tile of `buffer`."""
        product = self.products[0]
        columns = product.right.origin[1 if product.is_transposed else 0]
        return Tile(buffer, (self.left.origin[0], columns), (self.rows, self.columns))


@dataclass(frozen=True)
class Exchange:
    """Tiles of several CTAs that belong together: each CTA combines a slice of all of them.

    They are partial sums of a reduction that is split, or the two products of a pair of CTAs.

    Attributes
    ----------
    place : Place
        The cluster axis.
    elements : int
        Of a slice; CTA r combines elements ``r * elements`` to ``(r + 1) * elements`` of the tile,
        counted row by row.
    width : int
        Columns of the tile; fewer than the product's if the tensor has fewer.
    combined : Any
        The buffer of sums that the epilogue reads; None for a pair: it reads both products.
    pair : bool
        Whether CTAs make different products.
    """

    place: Place
    elements: int
    width: int
    combined: Any
    pair: bool = False

    @property
    def rows(self) -> int:
        """Rows of a slice; 0 if slices are no whole rows."""
        return 0 if self.elements % self.width else self.elements // self.width


@dataclass(frozen=True)
class TileProgram:
    """A kernel: for each place, one contraction and the store of its results.

    Attributes
    ----------
    places : tuple[Place, ...]
        Coordinates of CTAs, outermost first.
    contraction : Contraction
        The products.
    exchange : Exchange | None
        If their reduction is split over the cluster.
    store : Store
        Its epilogue.
    parameters : tuple
        Everything in global memory: parameters of the function, then intermediates.
    follows : bool
        Whether its left operand, and nothing else that it loads, is an intermediate.
    staged : bool
        Whether what it stores is loaded by a later phase of the same kernel, see `grid_stage`.
    summed : SumProgram | None
        What adds the partial tiles that it stores.
    reduced : RowReductions | None
        What is made of the rows of its sums, and stored in their place.
    rows : RowProgram | None
        What makes its left operand in the same kernel, row by row.
    """

    places: tuple[Place, ...]
    contraction: Contraction
    exchange: Exchange | None
    store: Store
    parameters: tuple[Any, ...]
    follows: bool = False
    staged: bool = False
    summed: SumProgram | None = None
    reduced: RowReductions | None = None
    rows: RowProgram | None = None

    def with_parameters(self, images: Mapping[Any, Any]) -> TileProgram:
        """Return the program on other buffers than the function's parameters."""
        loop = self.contraction
        products = tuple(each.with_parameters(images) for each in loop.products)
        correction = loop.correction
        if correction is not None:
            correction = replace(correction, factors=images[correction.factors])
        left = loop.left.with_parameters(images)
        return replace(
            self,
            contraction=replace(loop, left=left, products=products, correction=correction),
            store=self.store.with_parameters(images),
            summed=None if self.summed is None else self.summed.with_parameters(images),
            reduced=None if self.reduced is None else self.reduced.with_parameters(images),
            rows=None if self.rows is None else self.rows.with_parameters(images),
            parameters=tuple(images[each] for each in self.parameters),
        )

    def has_tail(self, dimension: int) -> bool:
        """Whether tiles of the output may reach beyond it: rows are 0, columns 1."""
        tile = self.store.tile
        end = tile.origin[dimension] + tile.shape[dimension]
        return not self.analyzer.can_prove(end <= tile.extents[dimension])

    @property
    def gives(self) -> Gather | None:
        """What its store goes to, if that stays in the cluster."""
        tile = self.store.tile
        return tile.gather if isinstance(tile, GatheredTile) else None

    @property
    def takes(self) -> Gather | None:
        """What its left operand comes from, if the cluster's phase before has made it."""
        tile = self.contraction.left
        return tile.gather if isinstance(tile, GatheredTile) else None

    @property
    def keeps(self) -> bool:
        """Whether what it stores stays in registers, for the next phase."""
        return isinstance(self.store.tile, KeptTile)

    @property
    def reuses(self) -> bool:
        """Whether its left operand is in registers, from the phase before."""
        return isinstance(self.contraction.left, KeptTile)

    @property
    def analyzer(self) -> Any:
        """An analyzer that knows the ranges of all places."""
        known = ir.sym.Analyzer()
        for place in self.places:
            known.bind(place.var, ir.tvm.ir.Range(0, place.extent))
        return known

    @property
    def results(self) -> tuple[Any, ...]:
        """Buffers in registers that the epilogue reads, in the order of the products."""
        if self.exchange is not None and not self.exchange.pair:
            return (self.exchange.combined,)
        return tuple(
            each.accumulator for product in self.contraction.products for each in product.both
        )

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
        """CTAs in a cluster."""
        return prod(each.extent for each in self.cluster)

    @property
    def tiles(self) -> int:
        """Tiles that clusters compute."""
        return prod(each.extent for each in self.grid)
