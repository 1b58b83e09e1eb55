"""What a kernel computes: the extents of a chain of one product or two, and how weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfuse.errors import PlanRefused, refuse
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.counts import Count, choose
from crossfuse.planner.kernels.boxes import ROW_BYTES

if TYPE_CHECKING:
    from crossfuse.blocks import chain as blocks


@dataclass(frozen=True)
class Shape:
    """Extents of ``C[m,n] = act(A[m,k] B)`` and ``E[m,l] = C[m,n] D``.

    Attributes
    ----------
    m, n, k, l : int
        Rows, columns of the first products, their reduction, and columns of the second product; l
        is 0 where there is none.
    products : int
        First products: 2 for gate and up.
    item, out : int
        Bytes of an element of the operands, and of the output.
    k_major : bool
        Whether weights are stored as [n, k]; else as [k, n].
    further : int
        Bytes of what is read besides operands: scales, biases, a residual.
    """

    m: int
    n: int
    k: int
    l: int  # noqa: E741  (the field's name for the width of the second product)
    products: int = 1
    item: int = 2
    out: int = 2
    k_major: bool = True
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
    def separate(self) -> Count:
        """Kernels of a library that compute it: one for each product and each activation."""
        # Of gate and up: one product of both weights, an activation and a multiplication.
        return choose(self.l > 0, 2 + self.products, 1)


def shape_of(chain: Chain, *, k_major: bool = True) -> Shape:
    """Read the extents of a chain.

    Parameters
    ----------
    chain : Chain
        One product, or two.
    k_major : bool
        See `Shape`: a chain does not say how its tensors lie in memory.

    Raises
    ------
    PlanRefused
        If no rule builds kernels of such a chain: a batch, or more than two products.
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
    """Read the extents of a chain of which the blocks are at hand."""
    products = len(chain.first)
    kept = (chain.item, chain.out, chain.k_major, chain.further)
    return Shape(chain.m, chain.n, chain.k, chain.l, products, *kept)


def _further_bytes(chain: Chain) -> int:
    names = {name for each in chain.products for name in each.further}
    found = [chain.tensor(each) for each in names]
    return sum(chain.elements(each.name) * each.item // each.repeats for each in found)
