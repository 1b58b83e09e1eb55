"""Block extents along one dim, without those that another extent makes needless.

Of two extents with as many tiles, the smaller one moves no more on any level: cluster tiles, lanes
and steps follow from the number of tiles, `ceil(ceil(x / b) / c) = ceil(x / (b c))`, and tiles are
clipped at the edge. Tensor cores read an operand once for each instruction along the dim that only
the other operand has, so that extents with more instructions stand apart:

```
extent 192   block 96    2 tiles of 96, 2 + 2 instructions of 64 rows       both stay
             block 128   tiles of 128 and 64, 2 + 1
             block 112   tiles of 112 and 80, 2 + 2                         as 96: left out
```
"""

from __future__ import annotations

from collections.abc import Mapping

from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import ceil_div
from crossfuse.planner.space.domain import STEP, blocks_of

#: Rows and columns that one wgmma instruction makes.
ROWS, COLUMNS = 64, 256


def dividing(chain: Chain, step: int = STEP) -> dict[str, tuple[int, ...]]:
    """Extents that divide, by dim; one step for dims that are smaller."""
    return {
        dim: tuple(each for each in blocks if chain.extents[dim] % each == 0) or blocks[:1]
        for dim, blocks in blocks_of(chain, step).items()
    }


def even(chain: Chain, step: int = STEP) -> dict[str, tuple[int, ...]]:
    """Extents that no other one makes needless, by dim, those that divide too.

    Parameters
    ----------
    chain : Chain
        Of any number of products.
    step : int
        Extents are its multiples.

    Returns
    -------
    dict[str, tuple[int, ...]]
        Ascending; about 2 sqrt(extent / step) of them, where there are extent / step in all.
    """
    sizes = _instructions(chain)
    return {
        dim: _smallest(chain.extents[dim], blocks, sizes.get(dim, 0))
        for dim, blocks in blocks_of(chain, step).items()
    }


def _smallest(extent: int, blocks: tuple[int, ...], size: int) -> tuple[int, ...]:
    found: dict[tuple[int, int], int] = {}
    for block in blocks:
        found.setdefault((-(-extent // block), _reads(extent, block, size)), block)
    return tuple(sorted(found.values()))


def _reads(extent: int, block: int, size: int) -> int:
    """Instructions along a dim; none where the instruction has no extent of its own."""
    if not size:
        return 0
    whole, rest = divmod(extent, block)
    return int(whole * ceil_div(block, size) + ceil_div(rest, size))


def _instructions(chain: Chain) -> Mapping[str, int]:
    columns = {chain.column(index): COLUMNS for index in range(len(chain.products))}
    return {**columns, chain.rows[-1]: ROWS}
