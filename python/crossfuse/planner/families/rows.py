"""Family ``rows``: a product's own kernel makes rows before it loads them.

Its tiles, their rules and its time are in `crossfuse.planner.cascade.rows_space`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cascade import rows_space
from crossfuse.planner.cascade.choice import Taken
from crossfuse.planner.cascade.rows_product import RowsProduct
from crossfuse.planner.cascade.rows_space import RowsTiles
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.own import with_own
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.explain.levels import instructions
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.cascade import CascadeFamily, CascadeKernel, Steps, Timed
from crossfuse.planner.families.family import of_rules
from crossfuse.planner.families.gemm import GemmKernel
from crossfuse.planner.kernels.arrays import flags

if TYPE_CHECKING:
    from crossfuse.cascade.derivation import Derivation
    from crossfuse.cascade.site import Site


class Rows(CascadeFamily[RowsTiles]):
    """A norm, or another cascade of rows, and the product of what it makes."""

    name: ClassVar[str] = ROWS
    text: ClassVar[str] = "rows of a cascade, then their product, in one kernel"
    form: ClassVar[str] = "Rows first, and their product in the same kernel"
    rule: ClassVar[str] = "rows_gemm.schedule_rows_gemm"
    kind: ClassVar[Any] = RowsTiles
    axes: ClassVar[tuple[str, ...]] = ("rows", "columns", "cluster", "split", "across", "chunk")
    second: ClassVar[tuple[str, ...]] = ("columns",)
    # Estimates of one plan after the other are slow.
    most: ClassVar[int] = 8

    @classmethod
    def matches(cls, shape: CascadeShape) -> bool:
        """Whether a cascade makes the rows of a product."""
        return shape.product is not None and not shape.product.is_chain

    @property
    def product(self) -> RowsProduct:
        """What is counted of the cascade."""
        assert self.shape.product is not None
        return self.shape.product

    def candidates(self, device: Device) -> tuple[Steps, tuple[RowsTiles, ...]]:
        """List tiles that keep all rules, and how many tiles each rule leaves."""
        steps, kernels = rows_space.rows_kernels(self.product, device)
        whole = rows_space.listed(kernels)
        return steps, (*whole, *rows_space.by_chunks(self.product, device, whole))

    def time(self, tiles: RowsTiles, device: Device, rates: Rates) -> Estimate:
        """Estimate one kernel, without a user's own terms."""
        chunked = bool(tiles.chunk)
        return rows_space.rows_estimate(self.product, tiles.kernel, device, rates, chunked)

    def timed(self, device: Device, rates: Rates) -> tuple[Steps, tuple[Timed[RowsTiles], ...]]:
        """Time all tiles at once: asking the learned trees one by one is slow."""
        product = self.product
        steps, kernels = rows_space.rows_kernels(product, device)
        tiles = rows_space.listed(kernels)
        if not tiles:
            return steps, ()
        times = dict(zip(tiles, self._together(kernels, device, rates, 0), strict=True))
        chunked = rows_space.by_chunks(product, device, tiles)
        if chunked:
            every = self._together(kernels, device, rates, product.chunk)
            of_tiles = dict(zip(tiles, every, strict=True))
            times |= {each: of_tiles[replace(each, chunk=0)] for each in chunked}
        return steps, tuple(self.ordered([(time, each) for each, time in times.items()]))

    def _together(
        self, kernels: GemmKernel, device: Device, rates: Rates, chunk: int
    ) -> list[float]:
        """Microseconds of kernels of arrays, all with rows in chunks of one size."""
        found = rows_space.rows_estimate(self.product, kernels, device, rates, bool(chunk))
        every = CascadeKernel(self, rows_space.together(kernels, chunk))
        whole = np.asarray(with_own(found, rates.own, every, self.shape, device).microseconds)
        times: list[float] = np.broadcast_to(
            whole.astype(np.float64), flags(kernels, True).shape
        ).tolist()
        return times

    def ordered(self, times: Sequence[Timed[RowsTiles]]) -> list[Timed[RowsTiles]]:
        """Sort tiles by their times, the best first; of equal ones those of fewer rows."""
        return rows_space.ordered(times)

    def moved(self, tiles: RowsTiles, device: Device) -> dict[str, int]:
        """Bytes that one kernel moves by level."""
        return rows_space.rows_bytes(self.product, tiles.kernel)

    def place_of(self, tiles: RowsTiles) -> str:
        """Describe where rows are stored."""
        return "chunks of rows in L2" if tiles.chunk else "rows in L2"

    def taken(self, tiles: RowsTiles, device: Device) -> Taken:
        """Resources of the product's kernel; the warps that make rows are part of it anyway."""
        product = self.product
        (found,) = tiles.kernel.resources(product.shape, device)
        (phase,) = tiles.kernel.phases(product.shape)
        waves = int(phase.tiles) * found.cluster / found.busy
        return Taken(
            found.ctas,
            found.cluster,
            found.threads,
            1,
            found.sums,
            int(rows_space.rows_memory(product, tiles.kernel, device).size),
            round(max(1.0, waves), 2),
        )

    def computed(self, tiles: RowsTiles) -> dict[str, int]:
        """Operations of the product, and instructions for each element of a row."""
        product = self.product
        return {"tensor": product.chain.flops, **instructions(product.rows)}

    @classmethod
    def schedule(
        cls, site: Site, derivation: Derivation, tiles: RowsTiles, *, constant: bool
    ) -> Any:
        """Take the function apart, and write rows and product as one kernel."""
        return of_rules("rows_gemm.rows_before_product")(site.function, tiles, constant)
