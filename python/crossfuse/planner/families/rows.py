"""Family ``rows``: a product's own kernel makes rows before it loads them.

How long rows and products take in one kernel is counted here for `rows_chain` too: the products
alone, and what rows add to them.

All CTAs start together, as they wait for one another. The first tile of rows is waited for; those
after it are made while tiles are multiplied. Weights are loaded meanwhile, as many as their ring
holds::

    time = product + start together + what the streams take longer:
        hbm      by what is left of the wait when the ring is full
        tensor   by the wait
        rows     a stream of its own: all rows of the busiest warp

Rows that multiplying warpgroups make count as those of warps: a row of 8 KiB is made 5.1 us
after a CTA began, for 4.7 to 5.5 of a warp, most of it behind the sum: its stores and its flag.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from crossfuse.cascade.rewrite.work import Work
from crossfuse.hardware import Device
from crossfuse.planner.cascade.shape import RowsProduct
from crossfuse.planner.cost.estimate import (
    active_clusters,
    corrected,
    ingest_speed,
    memory_speed,
    overlapped,
)
from crossfuse.planner.cost.rates import OF_ROWS, Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.family import (
    CascadeFamily,
    CascadeKernel,
    ChainFamily,
    Steps,
    Taken,
    Timed,
)
from crossfuse.planner.families.tiled import GEMM, GemmKernel, TiledKernel
from crossfuse.planner.kernels.memory import BEFORE_ROWS, Memory, memory, resident
from crossfuse.planner.kernels.phase import (
    MOST_ROWS,
    ROW_WARPS,
    SUMS_BESIDE_CHUNKS,
    SUMS_BESIDE_ROWS,
    TALLEST_BY_CHUNKS,
    pages,
    row_batches,
)
from crossfuse.planner.kernels.shape import (
    Shape,
    Share,
    TileRule,
    ceil_div,
    choose,
    count,
    least,
    most,
    narrowed,
    select,
)
from crossfuse.schema import Tile

#: Rows of a CTA from which on they are made chunk by chunk.
_MANY = 8
#: Microseconds of a row however short, and bytes of it that a warp takes in in one, beside what it
#: waits for behind weights. A row of 8 KiB took 3.8 us on an H100 behind the weights that are asked
#: for now (4.6 behind 7.7 MB, 5.8 behind 9.4 MB); how that divides was not measured.
ROW, BYTES = 1.2, 3.9e3
#: Microseconds that kernels lose whose CTAs have to start together: a norm and its product took
#: 43.4 and 43.9 us on an H100 with 12 and 24 KiB of weights on their way, and 42.6 and 42.8 where
#: nobody waited for room.
TOGETHER = 1.1
#: Times as long as alone that a product takes while chunks of its rows are made beside it: 94.5 us
#: on an H100, of which about 4 for the first chunk, where it takes 82.7 alone.
BESIDE_CHUNKS = 1.1
_STREAMS = ("hbm", "l2", "ingest", "tensor")


@dataclass(frozen=True)
class RowsTiles:
    """Tiles of the product; how rows are made follows from the device.

    All but the chunk are those of `crossfuse.schedule.rules.tensor_tiles.TensorTiles`.
    """

    rows: Tile = 128
    columns: Tile = 128
    cluster: Tile = 1
    split: Tile = 1
    across: Tile = 1
    #: Elements of a chunk of a row, which the product takes in as they come; 0 makes whole rows.
    chunk: Tile = 0

    @property
    def product(self) -> dict[str, Any]:
        """Fields of the product's tiles."""
        return {name: each for name, each in asdict(self).items() if name != "chunk"}

    @property
    def kernel(self) -> GemmKernel:
        """The product's kernel, as it would be alone."""
        return GemmKernel.read(self.product)


class _RowsFirstTiles(Protocol):
    """Tiles of products that make their rows first."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""

    @property
    def kernel(self) -> TiledKernel:
        """The products' kernel, as it would be alone."""


T = TypeVar("T", bound=_RowsFirstTiles)


def rules_beside_rows(kernel: Any, shape: Shape, device: Device) -> tuple[TileRule, ...]:
    """Conditions on kernels of products, beside their own, under which they make rows."""
    sums = reduce(most, [each.sums for each in kernel.phases(shape)])
    together = np.asarray(kernel.clusters(shape, device)[0]) <= resident(device, kernel.cluster)
    return (
        TileRule(
            "sums",
            f"{SUMS_BESIDE_ROWS} registers for sums at most beside those of rows",
            sums <= SUMS_BESIDE_ROWS,
        ),
        TileRule("resident", "CTAs, which wait for one another's rows, all run at once", together),
    )


class RowsFirstFamily(CascadeFamily[T, Work]):
    """A norm, or another cascade of rows, and one product of what it makes, or a chain of two."""

    #: Kernels of the products alone.
    products: ClassVar[ChainFamily]
    # Estimates of one plan after the other are slow.
    most: ClassVar[int] = 8

    @property
    def product(self) -> RowsProduct:
        """What is counted of rows and products."""
        assert self.shape.product is not None
        return self.shape.product

    @abstractmethod
    def joined(self, kernels: Any) -> T:
        """Make kernels of arrays tiles of arrays."""

    def listed(self, kernels: Any) -> tuple[T, ...]:
        """Split kernels of arrays into tiles, one by one."""
        fields = [np.asarray(each) for each in vars(self.joined(kernels)).values()]
        plain = [each if each.dtype == bool else each.astype(int) for each in fields]
        columns = [np.broadcast_to(each, (count(kernels),)).tolist() for each in plain]
        return tuple(self.kind(*each) for each in zip(*columns, strict=True))

    def rules(self, kernel: Any, device: Device) -> tuple[TileRule, ...]:
        """Conditions on kernels of the products, beside their own, under which they make rows."""
        return rules_beside_rows(kernel, self.product.shape, device)

    def kernels_beside_rows(self, device: Device) -> tuple[Steps, Any]:
        """List the kernels of the products that may make rows, as one of arrays.

        The steps tell how many tiles each rule leaves.
        """
        shape = self.product.shape
        found = self.products.every(shape, device)
        steps = self.products.pruned(shape, device)
        if not count(found):
            return steps, found
        ruled, left = narrowed(np.ones(count(found), bool), self.rules(found, device))
        return (*steps, *ruled), select(found, left)

    def candidates(self, device: Device) -> tuple[Steps, tuple[T, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        steps, kernels = self.kernels_beside_rows(device)
        return steps, self.listed(kernels)

    def time(self, tiles: T, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return rows_estimate(self.product, tiles.kernel, device, rates)

    def timed(self, device: Device, rates: Rates) -> tuple[Steps, tuple[Timed[T], ...]]:
        """Time all tiles, the best first; also how many tiles each rule leaves."""
        steps, kernels = self.kernels_beside_rows(device)
        times = self.times_together(kernels, device, rates) if count(kernels) else []
        return steps, tuple(self.ordered(times))

    def times_together(self, kernels: Any, device: Device, rates: Rates) -> list[Timed[T]]:
        """Time kernels of arrays at once: asking the learned trees one by one is slow."""
        found = rows_estimate(self.product, kernels, device, rates)
        times = self.one_by_one(found, self.joined(kernels), count(kernels), device, rates)
        return list(zip(times, self.listed(kernels), strict=True))

    def one_by_one(
        self, found: Estimate, tiles: T, size: int, device: Device, rates: Rates
    ) -> list[float]:
        """Microseconds of an estimate of tiles of arrays, with a user's own terms."""
        found = rates.with_own(found, CascadeKernel(self, tiles), self.shape, device)
        times = np.asarray(found.microseconds).astype(np.float64)
        split: list[float] = np.broadcast_to(times, (size,)).tolist()
        return split

    def preference(self, time: float, tiles: T) -> tuple[float, ...]:
        """Order tiles of equal times: those that wait for fewer rows first.

        A norm before 256 x 4096 by 12288 took 44.0 us in tiles of 128 rows, 44.1 and 46.5 in tiles
        of 256.
        """
        return (tiles.rows, time)

    def moved(self, tiles: T, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level: rows go to L2 and come from there."""
        moved = tiles.kernel.moved_bytes(self.product.shape)
        through_l2 = moved["l2"] + self.product.left_bytes
        return {**moved, "hbm": self.product.hbm_bytes, "l2": through_l2}

    def taken(self, tiles: T, device: Device) -> Taken:
        """Resources of the products' kernel; the warps that make rows are part of it anyway."""
        shape = self.product.shape
        (found,) = tiles.kernel.resources(shape, device)
        tasks = max(int(each.tiles) for each in tiles.kernel.phases(shape)) * found.cluster
        return Taken(
            found.ctas,
            found.cluster,
            found.threads,
            1,
            found.sums,
            int(rows_memory(self.product, tiles.kernel, device).size),
            round(max(1.0, tasks / found.busy), 2),
        )

    def computed(self, tiles: T) -> dict[str, int]:
        """Operations of the products, and instructions for each element of a row."""
        return {"tensor": self.product.chain.flops, **instructions(self.product.rows)}


class Rows(RowsFirstFamily[RowsTiles]):
    """A norm, or another cascade of rows, and the product of what it makes."""

    name: ClassVar[str] = ROWS
    text: ClassVar[str] = "rows of a cascade, then their product, in one kernel"
    form: ClassVar[str] = "Rows first, and their product in the same kernel"
    rule: ClassVar[str] = "rows.schedule_rows_gemm"
    kind: ClassVar[Any] = RowsTiles
    axes: ClassVar[tuple[str, ...]] = ("rows", "columns", "cluster", "split", "across", "chunk")
    second: ClassVar[tuple[str, ...]] = ("columns",)
    products: ClassVar[ChainFamily] = GEMM
    of_rows: ClassVar[int] = 1

    def joined(self, kernels: GemmKernel) -> RowsTiles:
        """Make kernels of arrays tiles of arrays."""
        split: Any = choose(kernels.split, kernels.size, 1)
        tiles: Any = (kernels.rows, kernels.columns, kernels.size // split, split, kernels.across)
        return RowsTiles(*tiles)

    def rules(self, kernel: GemmKernel, device: Device) -> tuple[TileRule, ...]:
        """Conditions on kernels of the product, beside their own, under which they make rows."""
        alone = self.product.splits | ~np.asarray(kernel.split, bool)
        text = "a reduction is split where the epilogue reads no more of the rows' cascade"
        return (TileRule("split", text, alone), *super().rules(kernel, device))

    def candidates(self, device: Device) -> tuple[Steps, tuple[RowsTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        steps, whole = super().candidates(device)
        return steps, (*whole, *self._by_chunks(whole, device))

    def time(self, tiles: RowsTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        return rows_estimate(self.product, tiles.kernel, device, rates, bool(tiles.chunk))

    def times_together(
        self, kernels: GemmKernel, device: Device, rates: Rates
    ) -> list[Timed[RowsTiles]]:
        """Time kernels of arrays at once, those that can take rows chunk by chunk in both ways."""
        whole = super().times_together(kernels, device, rates)
        tiles = [each for _, each in whole]
        chunked = self._by_chunks(tiles, device)
        if not chunked:
            return whole
        found = rows_estimate(self.product, kernels, device, rates, chunked=True)
        every = replace(self.joined(kernels), chunk=self.product.chunk)
        times = self.one_by_one(found, every, len(tiles), device, rates)
        of_tiles = dict(zip(tiles, times, strict=True))
        return [*whole, *((of_tiles[replace(each, chunk=0)], each) for each in chunked)]

    def _by_chunks(self, tiles: Sequence[RowsTiles], device: Device) -> tuple[RowsTiles, ...]:
        """Tiles that can take rows chunk by chunk, where a CTA has many rows."""
        product = self.product
        if not product.chunk or product.rows.rows < _MANY * device.sms:
            return ()
        fits = (each for each in tiles if _takes_chunks(each.kernel, product))
        return tuple(replace(each, chunk=product.chunk) for each in fits)

    def place_of(self, tiles: RowsTiles) -> str:
        """Describe where rows are stored."""
        return "chunks of rows in L2" if tiles.chunk else "rows in L2"


def _takes_chunks(kernel: GemmKernel, product: RowsProduct) -> bool:
    (phase,) = kernel.phases(product.shape)
    wide, across = int(kernel.columns * kernel.across), int(kernel.across)
    sharers = -(-product.shape.n // wide) * across
    batches, batch = row_batches(int(kernel.rows), sharers, product.chunk)
    held = int(kernel.rows) <= TALLEST_BY_CHUNKS and int(phase.sums) <= SUMS_BESIDE_CHUNKS
    return held and batches * batch <= MOST_ROWS


def rows_estimate(
    product: RowsProduct,
    kernel: TiledKernel,
    device: Device,
    rates: Rates,
    chunked: bool = False,
) -> Estimate:
    """Estimate kernels that make rows and multiply them: those of products, with a term ``rows``.

    The user's own terms are left out here: they are of the whole kernel, and added by the caller.
    `kernel` is one candidate, or many as arrays; `chunked` rows are made chunk by chunk.
    """
    found = corrected(kernel, product.shape, device, replace(rates, own=()))
    ctas = active_clusters(kernel, product.shape, device) * kernel.cluster
    # Rings of tiles wait for rows: what begins is a kernel that loads rows.
    start = rates.start_time(kernel.cluster, ctas, OF_ROWS)
    found = replace(found, terms={**found.terms, "start": _plain(start)})
    rows = product.rows
    asked, filled = _weights(product, kernel, device, rates, ctas)
    if chunked:
        return _by_chunks(product, found, rates)
    each = ROW + rows.length * rows.read / BYTES + asked
    # Rows are made in order, those of all CTAs at once.
    first = ceil_div(least(kernel.rows, rows.rows), ROW_WARPS * ctas) * each
    wait = first + rates.measured.flag
    hbm, l2, ingest, tensor = (found.busy[name] for name in _STREAMS)
    hidden = np.minimum(wait, filled)
    made = ceil_div(rows.rows, ROW_WARPS * ctas) * each
    more = overlapped(hbm + wait - hidden, l2, ingest, tensor + wait, made)
    added = TOGETHER + more - overlapped(hbm, l2, ingest, tensor)
    terms = {**found.terms, ROWS: _plain(added)}
    return replace(found, terms=terms, busy={**found.busy, ROWS: made})


def _by_chunks(product: RowsProduct, found: Estimate, rates: Rates) -> Estimate:
    """Estimate products that take rows in as they come: late by a chunk, and slower throughout."""
    first = ROW + product.chunk * product.rows.read / BYTES + rates.measured.flag
    added = TOGETHER + first + (BESIDE_CHUNKS - 1) * sum(found.terms.values())
    terms = {**found.terms, ROWS: _plain(added)}
    return replace(found, terms=terms)


def _plain(time: Share) -> Share:
    """Convert the time of a single kernel to a float."""
    return time if np.ndim(time) else float(time)


def rows_memory(product: RowsProduct, kernel: TiledKernel, device: Device) -> Memory:
    """Shared memory of the kernel: boxes of the first phase lie in left stages, whatever its rows.

    Where its tiles have too few steps, those of a chain's kernel have a place of their own.
    """
    first, *others = kernel.phases(product.shape)
    inside = least(first.steps, pages(first.columns)) >= pages(first.columns)
    boxes = choose(inside, 0, first.boxes) if others else 0
    return memory((replace(first, boxes=boxes), *others), device, waits=True)


def _weights(
    product: RowsProduct, kernel: TiledKernel, device: Device, rates: Rates, ctas: Share
) -> tuple[Share, Share]:
    """Microseconds of memory for the weights that are in flight, and for all that rings hold."""
    phase, *_ = kernel.phases(product.shape)
    speed = memory_speed(rates) * phase.right_sharers / ctas
    speed = np.minimum(ingest_speed(rates), speed)
    stages = np.minimum(rows_memory(product, kernel, device).right, phase.steps)
    asked = np.maximum(1, BEFORE_ROWS * phase.right_sharers // phase.right)
    return np.minimum(stages, asked) * phase.right / speed, stages * phase.right / speed
