"""Tiles of a product whose rows its kernel makes first, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cascade.rows_product import RowsProduct
from crossfuse.planner.counts import choose
from crossfuse.planner.kernels.every import count, every, select
from crossfuse.planner.kernels.phase import (
    SUMS_BESIDE_CHUNKS,
    SUMS_BESIDE_ROWS,
    TALLEST_BY_CHUNKS,
)
from crossfuse.planner.kernels.pruned import pruned
from crossfuse.planner.kernels.read import read_kernel
from crossfuse.planner.kernels.resident import resident
from crossfuse.planner.kernels.tiled import TiledKernel
from crossfuse.planner.space.count import Step
from crossfuse.schema import Tile

_GEMM = "gemm"
#: Estimates closer than this are equal. Of equal ones tiles that wait for fewer rows come first: a
#: norm before 256 x 4096 by 12288 took 44.0 us in tiles of 128 rows, 44.1 and 46.5 in tiles of 256.
_EQUAL = 1.01
#: Rows of a CTA from which on they are made chunk by chunk.
_MANY = 8


@dataclass(frozen=True)
class RowsTiles:
    """Tiles of the product; how rows are made follows from the device.

    Attributes
    ----------
    rows, columns, cluster, split, across : int
        See `crossfuse.schedule.rules.tensor_tiles.TensorTiles`.
    chunk : int
        Elements of a chunk of a row, which the product takes in as they come; 0 makes whole rows.
    """

    rows: Tile = 128
    columns: Tile = 128
    cluster: Tile = 1
    split: Tile = 1
    across: Tile = 1
    chunk: Tile = 0

    @property
    def product(self) -> dict[str, Any]:
        """Fields of the product's tiles."""
        return {name: each for name, each in asdict(self).items() if name != "chunk"}

    @property
    def kernel(self) -> TiledKernel:
        """The product's kernel, as it would be alone."""
        found = read_kernel(_GEMM, self.product)
        assert isinstance(found, TiledKernel)
        return found


def rows_kernels(product: RowsProduct, device: Device) -> tuple[tuple[Step, ...], TiledKernel]:
    """List the kernels of the product that have room for warps that make rows.

    Parameters
    ----------
    product : RowsProduct
        What is computed.
    device : Device
        Limits.

    Returns
    -------
    tuple[Step, ...]
        How many tiles each rule leaves.
    TiledKernel
        Of arrays, all that keep every rule.
    """
    shape = product.shape
    found = every(_GEMM, shape, device)
    assert isinstance(found, TiledKernel)
    steps = list(pruned(_GEMM, shape, device))
    if not count(found):
        return tuple(steps), found
    (phase,) = found.phases(shape)
    rules = (
        (
            "sums",
            f"{SUMS_BESIDE_ROWS} registers for sums at most beside those of rows",
            phase.sums <= SUMS_BESIDE_ROWS,
        ),
        (
            "resident",
            "CTAs, which wait for one another's rows, all run at once",
            np.asarray(found.clusters(shape, device)[0]) <= resident(device, found.cluster),
        ),
    )
    left = np.ones(count(found), bool)
    for name, text, keeps in rules:
        left &= np.asarray(keeps, bool)
        steps.append(Step(name, text, int(np.count_nonzero(left))))
    return tuple(steps), select(found, left)


def listed(kernels: TiledKernel) -> tuple[RowsTiles, ...]:
    """Kernels of arrays as tiles, one by one."""
    return tuple(RowsTiles(**select(kernels, each).tiles()) for each in range(count(kernels)))


def together(kernels: TiledKernel, chunk: int = 0) -> RowsTiles:
    """Kernels of arrays as tiles of arrays, all with rows in chunks of one size."""
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
    """The same tiles, of those that can take rows chunk by chunk, where a CTA has many rows."""
    if not product.chunk or product.rows.rows < _MANY * device.sms:
        return ()
    fits = (each for each in tiles if _takes_chunks(each.kernel, product))
    return tuple(replace(each, chunk=product.chunk) for each in fits)


def _takes_chunks(kernel: TiledKernel, product: RowsProduct) -> bool:
    (phase,) = kernel.phases(product.shape)
    return int(kernel.rows) <= TALLEST_BY_CHUNKS and int(phase.sums) <= SUMS_BESIDE_CHUNKS


def ordered(times: Sequence[tuple[float, RowsTiles]]) -> list[tuple[float, RowsTiles]]:
    """Tiles by their times, the best first; of equal ones those of fewer rows."""
    best = min((time for time, _ in times), default=1.0)

    def key(pair: tuple[float, RowsTiles]) -> tuple[float, ...]:
        time, tiles = pair
        return (int(log(time / best) / log(_EQUAL) + 1e-9), tiles.rows, time)

    return sorted(times, key=key)
