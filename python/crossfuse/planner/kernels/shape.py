"""Extents of a chain of one product or two, layout of its weights, and rules on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import Count, Flag, both, ceil_div, choose
from crossfuse.planner.kernels.boxes import ROW_BYTES

if TYPE_CHECKING:
    from crossfuse.blocks import chain as blocks


@dataclass(frozen=True)
class Shape:
    """Extents of ``C[m,n] = act(A[m,k] B)`` and ``E[m,l] = C[m,n] D``."""

    #: Rows, columns of the first products, their reduction, and columns of the second product; l is
    #: 0 where there is none.
    m: int
    n: int
    k: int
    l: int  # noqa: E741  (the field's name for the width of the second product)
    #: First products: 2 for gate and up.
    products: int = 1
    #: Bytes of an element of the operands, and of the output.
    item: int = 2
    out: int = 2
    #: Whether weights are stored as [n, k]; else as [k, n].
    k_major: bool = True
    #: Bytes of what is read besides operands: scales, biases, a residual.
    further: int = 0

    @property
    def depth(self) -> int:
        """Elements of an operand in a row of a tile: a step of the first products."""
        return ROW_BYTES // self.item

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights of the first products, and of the second."""
        return self.products * self.n * self.k * self.item, self.n * self.l * self.item

    @property
    def multiplies(self) -> bool:
        """Whether wgmma multiplies operands of this width, as they are stored."""
        return self.item == 2 or (self.item == 1 and self.k_major)

    @property
    def separate(self) -> Count:
        """Kernels of a library that compute it: one for each product and each activation."""
        # Of gate and up: one product of both weights, an activation and a multiplication.
        return choose(self.l > 0, 2 + self.products, 1)


def shape_of(chain: Chain, *, k_major: bool = True) -> Shape:
    """Read the extents of a chain of one product or two, without a batch; others are refused.

    A chain does not say how its weights lie in memory: `k_major` does.
    """
    if len(chain.products) > 2 or len(chain.rows) != 1:
        raise refuse(
            PlanRefused,
            "kernel-chain",
            f"chain of {len(chain.products)} products",
            found=f"rows {', '.join(chain.rows)}",
            limit="one product or two, over one dim of rows: no rule builds a kernel of others",
            instead="cut the chain into pairs of products, and make the batch part of the rows",
        )
    first, last = chain.products[0], chain.products[-1]
    second = len(chain.products) == 2
    extents = chain.extents
    return Shape(
        extents[chain.rows[0]],
        extents[chain.column(0)],
        extents[first.reduction],
        extents[chain.column(1)] if second else 0,
        len(first.rights),
        chain.tensor(first.left).item,
        chain.tensor(last.output).item,
        k_major,
        _further_bytes(chain),
    )


def shape_of_blocks(chain: blocks.Chain) -> Shape:
    """Read the extents of a chain whose blocks are known."""
    products = len(chain.first)
    kept = (chain.item, chain.out, chain.k_major, chain.further)
    return Shape(chain.m, chain.n, chain.k, chain.l, products, *kept)


def _further_bytes(chain: Chain) -> int:
    names = {name for each in chain.products for name in each.further}
    found = [chain.tensor(each) for each in names]
    return sum(chain.elements(each.name) * each.item // each.repeats for each in found)


# Rules on tiles, each with a name, so that what they leave out can be counted.


@dataclass(frozen=True)
class TileRule:
    """One condition that tiles must keep for their kernel to be built."""

    name: str
    #: What the rule asks for, in a few words.
    text: str
    #: Whether a candidate, or each of many, keeps it.
    keeps: Flag


def all_kept(rules: Sequence[TileRule]) -> Flag:
    """Whether candidates keep every rule."""
    start: Flag = True
    return reduce(both, (each.keeps for each in rules), start)


# Division of a reduction, or of a sum of parts, among CTAs.

#: Neighbours that a thread adds at once.
_UNIT = 4


def has_equal_shares(extent: Count, size: Count, depth: Count) -> Flag:
    """Whether each of `size` CTAs has a share of a reduction, of equally many steps of `depth`.

    The last share may reach beyond the reduction, where operands are zero, but begins within.
    """
    share = ceil_div(extent, size * depth) * depth
    return (size - 1) * share < extent


def divides_equally(extent: int, size: int, depth: int) -> bool:
    """`has_equal_shares` of one reduction."""
    return bool(has_equal_shares(extent, size, depth))


def rows_in_parts(rows: Count, columns: Count, parts: Count) -> Count:
    """Least number of rows, at least `rows`, of which each part adds equally many neighbours."""
    unit = parts * _UNIT
    if isinstance(unit, np.ndarray) or isinstance(columns, np.ndarray):
        common = np.gcd(np.asarray(unit, np.int64), np.asarray(columns, np.int64))
        return ceil_div(np.asarray(rows, np.float64), unit / common) * (unit / common)
    multiple = int(unit // np.gcd(unit, columns))
    return ceil_div(rows, multiple) * multiple
