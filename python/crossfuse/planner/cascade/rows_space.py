"""Kernels of products that make their rows first: tiles of one product, rules and estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import log
from typing import Any, Protocol, TypeVar

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cascade.rows_product import RowsProduct
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.loop import OF_ROWS, ingest_speed, memory_speed, overlapped, start_time
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.counts import Share, ceil_div, choose, least, most
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.gemm import FAMILY as GEMM
from crossfuse.planner.families.gemm import GemmKernel
from crossfuse.planner.families.tiled import TiledKernel
from crossfuse.planner.kernels.arrays import count, select
from crossfuse.planner.kernels.boxes import pages
from crossfuse.planner.kernels.memory import BEFORE_ROWS, Memory, memory, resident
from crossfuse.planner.kernels.phase import (
    MOST_ROWS,
    ROW_WARPS,
    SUMS_BESIDE_CHUNKS,
    SUMS_BESIDE_ROWS,
    TALLEST_BY_CHUNKS,
    row_batches,
)
from crossfuse.planner.kernels.shape import Shape, TileRule
from crossfuse.planner.space.count import Step
from crossfuse.schema import Tile

#: Estimates closer than this are equal. Of equal ones tiles that wait for fewer rows come first: a
#: norm before 256 x 4096 by 12288 took 44.0 us in tiles of 128 rows, 44.1 and 46.5 in tiles of 256.
_EQUAL = 1.01
#: Rows of a CTA from which on they are made chunk by chunk.
_MANY = 8


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


class _OfRows(Protocol):
    @property
    def rows(self) -> int:
        """Rows of a tile."""


T = TypeVar("T", bound=_OfRows)


def rows_kernels(product: RowsProduct, device: Device) -> tuple[tuple[Step, ...], GemmKernel]:
    """List the kernels of the product with room for warps that make rows, as one kernel of arrays.

    The steps tell how many tiles each rule leaves.
    """
    shape = product.shape
    found: Any = GEMM.every(shape, device)
    steps = list(GEMM.pruned(shape, device))
    if not count(found):
        return tuple(steps), found
    rules = (
        TileRule(
            "split",
            "a reduction is split where the epilogue reads no more of the rows' cascade",
            product.splits | ~np.asarray(found.split, bool),
        ),
        *rules_beside_rows(found, shape, device),
    )
    return pruned_by(found, rules, steps)


def rules_beside_rows(kernel: TiledKernel, shape: Shape, device: Device) -> tuple[TileRule, ...]:
    """Conditions on kernels, beside their own, under which they may make rows."""
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


def pruned_by(
    kernels: Any, rules: Sequence[TileRule], steps: Sequence[Step]
) -> tuple[tuple[Step, ...], Any]:
    """Select the kernels that keep rules, with a step behind `steps` for each of these."""
    left, found = np.ones(count(kernels), bool), list(steps)
    for each in rules:
        left &= np.asarray(each.keeps, bool)
        found.append(Step(each.name, each.text, int(np.count_nonzero(left))))
    return tuple(found), select(kernels, left)


def listed(kernels: GemmKernel) -> tuple[RowsTiles, ...]:
    """Split kernels of arrays into tiles, one by one."""
    return tuple(RowsTiles(**select(kernels, each).tiles()) for each in range(count(kernels)))


def together(kernels: GemmKernel, chunk: int = 0) -> RowsTiles:
    """Join kernels of arrays into tiles of arrays, all with rows in chunks of one size."""
    split = choose(kernels.split, kernels.size, 1)
    fields: Any = {
        "rows": kernels.rows,
        "columns": kernels.columns,
        "cluster": kernels.size // split,
        "split": split,
        "across": kernels.across,
    }
    return RowsTiles(**fields, chunk=chunk)


def by_chunks(
    product: RowsProduct, device: Device, tiles: Sequence[RowsTiles]
) -> tuple[RowsTiles, ...]:
    """Select the tiles that can take rows chunk by chunk, where a CTA has many rows."""
    if not product.chunk or product.rows.rows < _MANY * device.sms:
        return ()
    fits = (each for each in tiles if _takes_chunks(each.kernel, product))
    return tuple(replace(each, chunk=product.chunk) for each in fits)


def _takes_chunks(kernel: GemmKernel, product: RowsProduct) -> bool:
    (phase,) = kernel.phases(product.shape)
    wide, across = int(kernel.columns * kernel.across), int(kernel.across)
    sharers = -(-product.shape.n // wide) * across
    batches, batch = row_batches(int(kernel.rows), sharers, product.chunk)
    held = int(kernel.rows) <= TALLEST_BY_CHUNKS and int(phase.sums) <= SUMS_BESIDE_CHUNKS
    return held and batches * batch <= MOST_ROWS


def ordered(times: Sequence[tuple[float, T]]) -> list[tuple[float, T]]:
    """Sort tiles by their times, the best first; of equal ones those of fewer rows."""
    best = min((time for time, _ in times), default=1.0)

    def key(pair: tuple[float, T]) -> tuple[float, ...]:
        time, tiles = pair
        return (int(log(time / best) / log(_EQUAL) + 1e-9), tiles.rows, time)

    return sorted(times, key=key)


# How long rows and their product take in one kernel: the product alone, and what rows add to it.
#
# All CTAs start together, as they wait for one another. The first tile of rows is waited for; those
# after it are made while tiles are multiplied. Weights are loaded meanwhile, as many as their ring
# holds::
#
#     time = product + start together + what the streams take longer:
#         hbm      by what is left of the wait when the ring is full
#         tensor   by the wait
#         rows     a stream of its own: all rows of the busiest warp
#
# Rows that multiplying warpgroups make count as those of warps: a row of 8 KiB is made 5.1 us
# after a CTA began, for 4.7 to 5.5 of a warp, most of it behind the sum: its stores and its flag.

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
    active = least(kernel.clusters(product.shape, device)[0], resident(device, kernel.cluster))
    ctas = active * kernel.cluster
    # Rings of tiles wait for rows: what begins is a kernel that loads rows.
    start = start_time(rates, kernel.cluster, ctas, OF_ROWS)
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


def rows_bytes(product: RowsProduct, kernel: TiledKernel) -> dict[str, int]:
    """Bytes that one kernel moves by level: rows go to L2 and come from there."""
    moved = kernel.moved_bytes(product.shape)
    return {**moved, "hbm": product.hbm_bytes, "l2": moved["l2"] + product.left_bytes}
