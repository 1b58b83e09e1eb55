"""Families ``phases`` and ``launches``: chains of three layers or more.

The tiles of `crossfuse.planner.families.tiled`, in one persistent kernel or one each::

    phases    a phase for each layer; intermediates pass through the L2 cache, tile by tile
    launches  a kernel for each layer; intermediates pass through global memory as a whole

All phases have tiles of the same rows, and clusters of the same size; each has columns of its own,
and its clusters lie along the columns, along the rows, or along the reduction. Trying all of that
together would multiply with every layer. But the time of a phase hardly depends on the tiles of
others: for each height of tiles and size of clusters every phase is improved alone, twice around,
and only the best few options of each are combined (`_COMBINED`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, ClassVar, TypeVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.family import ChainFamily
from crossfuse.planner.families.tiled import (
    SEPARATE,
    SHARES,
    STAGED,
    WHOLE,
    WIDE,
    PhasedKernel,
    splits,
)
from crossfuse.planner.kernels.memory import resident
from crossfuse.planner.kernels.phase import Phase, widest_of
from crossfuse.planner.kernels.shape import (
    CLUSTERS,
    NOTHING,
    ROWS,
    Count,
    Flag,
    Shape,
    TileRule,
    all_kept,
    choose,
    column_options,
    flags,
    given_or,
    grid,
    read_extents,
    row_options,
)
from crossfuse.schema import Damaged

_T = TypeVar("_T", bound="LayeredKernel")

#: Combinations of the phases' best options, at most, for each height of tiles and size of clusters.
_COMBINED = 256
#: Where the CTAs of a cluster lie in a phase: they share rows, share weights, or sum parts.
COLUMNS, ROWS_OF, REDUCTION = "columns", "rows", "reduction"
ALONG = (COLUMNS, ROWS_OF, REDUCTION)


@dataclass(frozen=True)
class LayeredKernel(PhasedKernel):
    """Tiles of one candidate, or of many."""

    #: Of a tile, in all phases.
    rows: Count
    #: CTAs of a cluster, in all phases.
    size: Count
    #: Columns of a tile in each phase.
    columns: tuple[Count, ...]
    #: Whether clusters of a phase stand along the rows, and share weights; else, and unless they
    #: sum a part of the reduction each, they lie along the columns, and share rows.
    stacked: tuple[Flag, ...]
    split: tuple[Flag, ...]

    @classmethod
    def possible(cls, shape: Shape, given: Mapping[str, int] = NOTHING) -> LayeredKernel:
        """What is tried depends on the device: see `LayeredFamily.tried`."""
        raise AssertionError("tiles of long chains are listed for a device")

    @classmethod
    def read(cls: type[_T], tiles: Mapping[str, Any]) -> _T:
        """Make a kernel of `ChainTiles`."""
        rows, size = read_extents(tiles, "rows", "cluster")
        phases = tiles.get("phases", ())
        if not phases:
            raise Damaged("no phases", "a phase for each layer")
        columns = tuple(read_extents(each, "columns")[0] for each in phases)
        along = [each.get("along", COLUMNS) for each in phases]
        stacked = tuple(each == ROWS_OF for each in along)
        return cls(rows, size, columns, stacked, tuple(each == REDUCTION for each in along))

    @property
    def cluster(self) -> Count:
        """CTAs of a cluster."""
        return self.size

    def phases(self, shape: Shape) -> tuple[Phase, ...]:
        """Phases of a CTA, one after another."""
        return tuple(self.phase(shape, number) for number in range(len(shape.layers)))

    def phase(self, shape: Shape, number: int) -> Phase:
        """Make the phase of a layer."""
        layer, last = shape.layers[number], number == len(shape.layers) - 1
        split, stacked = self.split[number], self.stacked[number]
        down = choose(stacked, self.size, 1)
        beside = choose(np.asarray(stacked) | np.asarray(split), 1, self.size)
        made = (self.columns[number], layer.columns, shape.out if last else shape.item)
        cluster, staged = (down, beside), self.staged and not last
        found = self._phase(shape, made, layer.depth, split, cluster, layer.products, staged=staged)
        return replace(found, functions=layer.functions)

    def rules(self, shape: Shape, device: Device) -> tuple[TileRule, ...]:
        """Conditions of the rule and of the lowering on tiles, other than shared memory."""
        parts = [self.rules_of(shape, number, device) for number in range(len(shape.layers))]
        most = f"at most {device.max_cluster} CTAs"
        return (
            TileRule("cluster", most, self.size <= device.max_cluster),
            *(
                replace(rules[0], keeps=reduce(np.logical_and, [each.keeps for each in rules]))
                for rules in zip(*parts, strict=True)
            ),
        )

    def rules_of(self, shape: Shape, number: int, device: Device) -> tuple[TileRule, ...]:
        """Conditions on the tiles of one phase."""
        layer, last = shape.layers[number], number == len(shape.layers) - 1
        split, columns = np.asarray(self.split[number], bool), self.columns[number]
        wide = (columns % 8 == 0) & (columns <= widest_of(self.rows, layer.products))
        allowed = layer.products == 1 and (last or not self.staged)
        whole = (layer.columns % columns == 0) & (shape.m % self.rows == 0)
        text = "a reduction is split of one product, of phases that of the last one"
        room: Flag = True
        if self.staged:
            # A cluster computes one tile of a split reduction, and waits for tiles of others.
            room = self.phase(shape, number).tiles <= resident(device, self.size)
        alone = np.asarray(self.stacked[number], bool) | split
        return (
            TileRule("columns", WIDE, wide),
            TileRule(
                "fills",
                "a tile within the layer, or of all of a multiple of 8 columns, or of a split",
                (columns <= layer.columns) | (layer.columns % 8 == 0) | split,
            ),
            TileRule("along", "one CTA alone lies along the columns", ~alone | (self.size > 1)),
            TileRule("split", text, ~split | allowed),
            TileRule(
                "shares",
                SHARES,
                splits(split, shape, (layer.depth, layer.columns), self.rows, columns, self.size),
            ),
            TileRule(
                "whole", WHOLE, ~split | np.asarray(whole, bool) | np.asarray(self.rows >= shape.m)
            ),
            TileRule("resident", "clusters of a split all run at once", ~split | room),
        )

    def tiles(self) -> dict[str, Any]:
        """Fields of `ChainTiles`, of one candidate."""
        phases = [
            {
                "columns": int(columns),
                "along": REDUCTION if split else ROWS_OF if stacked else COLUMNS,
            }
            for columns, stacked, split in zip(self.columns, self.stacked, self.split, strict=True)
        ]
        return {"rows": int(self.rows), "cluster": int(self.size), "phases": phases}

    def tile_of(self, phase: int, cta: int) -> tuple[int, int, int]:
        """Along the cluster lie columns, rows, or shares of a reduction."""
        if self.split[phase]:
            return 0, 0, cta
        return (cta, 0, 0) if self.stacked[phase] else (0, cta, 0)


class PhasesKernel(LayeredKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "phases"
    staged: ClassVar[bool] = True
    way: ClassVar[str] = "stored by a phase, read by the next when a flag says so"


class LaunchesKernel(LayeredKernel):
    """Tiles of one candidate, or of many."""

    family: ClassVar[str] = "launches"
    way: ClassVar[str] = "stored by a kernel, read by the next"


@dataclass(frozen=True)
class LayeredFamily(ChainFamily):
    """Kernels of chains of three layers or more."""

    def tried(
        self, shape: Shape, device: Device, given: Mapping[str, int] = NOTHING
    ) -> LayeredKernel:
        """List the best options of all phases for each height of tiles and size of clusters.

        `given` may name rows and size. Times are those of the device's own rates.
        """
        kind: Any = self.kernel
        rows, size = grid(
            given_or(given, "rows", row_options(shape, ROWS)), given_or(given, "size", CLUSTERS)
        )
        search = _Search(kind, shape, device, rows, size)
        count = len(shape.layers)
        few = max(1, int(_COMBINED ** (1 / count) + 1e-9))
        best = [[[_START]] * len(rows) for _ in range(count)]
        for number in (*range(count), *range(count)):
            best[number] = search.improved(best, number, few)
        return search.combined(best)


#: Columns of a tile; whether clusters stand along the rows, and whether they split the reduction.
_Option = tuple[float, float, float]
#: Options of a phase, the best first, for each height of tiles and size of clusters.
_Best = list[list[_Option]]
#: Where the search begins.
_START: _Option = (64.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Search:
    """Improves the tiles of a chain phase by phase."""

    kind: type[LayeredKernel]
    shape: Shape
    device: Device
    #: Height of tiles and size of clusters, each of all pairs.
    rows: np.ndarray
    size: np.ndarray

    def improved(self, best: Sequence[_Best], number: int, few: int) -> _Best:
        """Find the best few options of a phase, while the others have the best that is known."""
        width = self.shape.layers[number].columns
        pairs = [float(each) for each in range(len(self.rows))]
        pair, columns, along = grid(pairs, column_options(width), (0.0, 1.0, 2.0))
        place = pair.astype(np.int64)
        chosen = [np.array([options[0] for options in each])[place] for each in best]
        chosen[number] = np.stack([columns, along == 1, along == 2], 1)
        kernel = self._kernel(place, chosen)
        rules = kernel.rules_of(self.shape, number, self.device)
        kept = flags(kernel, all_kept(rules)) & flags(kernel, kernel.fits(self.shape, self.device))
        times = estimate(kernel, self.shape, self.device, rates_of(self.device)).microseconds
        found: _Best = []
        order = np.lexsort((np.where(kept, times, np.inf), place))
        for each in np.split(order, len(self.rows)):
            options = [_option(chosen[number][i]) for i in each[:few] if kept[i]]
            found.append(options or [_START])
        return found

    def combined(self, best: Sequence[_Best]) -> LayeredKernel:
        """Combine the options of all phases."""
        listed = [
            (place, options)
            for place in range(len(self.rows))
            for options in product(*(each[place] for each in best))
        ]
        places = np.array([place for place, _ in listed])
        chosen = np.array([options for _, options in listed])
        return self._kernel(places, [chosen[:, number] for number in range(chosen.shape[1])])

    def _kernel(self, places: np.ndarray, chosen: Sequence[np.ndarray]) -> LayeredKernel:
        """Make kernels of their height and size, and of an option of each phase."""
        columns, stacked, split = (
            tuple(each[:, field] if not field else each[:, field] > 0 for each in chosen)
            for field in range(3)
        )
        return self.kind(self.rows[places], self.size[places], columns, stacked, split)


def _option(values: Any) -> _Option:
    columns, stacked, split = map(float, values)
    return columns, stacked, split


#: Names of the fields that divide the second phase.
_SECOND = ("columns 2", "stacked 2", "split 2")

PHASES = LayeredFamily(
    PhasesKernel,
    "in the L2 cache, one persistent kernel with a phase for each layer",
    products=3,
    rule="phases.schedule_phases",
    tiles={"tiles": "phases.ChainTiles"},
    fixed={"staged": True},
    placements=STAGED.placements,
    second=_SECOND,
    fits_all=True,
    longer=True,
)
LAUNCHES = LayeredFamily(
    LaunchesKernel,
    "in global memory, one kernel for each layer",
    products=3,
    rule="phases.schedule_phases",
    tiles={"tiles": "phases.ChainTiles"},
    fixed={"staged": False},
    placements=SEPARATE.placements,
    second=_SECOND,
    fits_all=True,
    longer=True,
)
