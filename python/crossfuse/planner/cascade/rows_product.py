"""Products whose first left operand a cascade makes row by row, as the planner counts them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from crossfuse.cascade.rewrite.work import Pass, Work
from crossfuse.planner.chain.spec import Chain
from crossfuse.planner.kernels.shape import Shape, shape_of

if TYPE_CHECKING:
    from crossfuse.cascade.rewrite.rows_first import RowsFirst

#: Elements of a chunk of a row: of 512 and 1024 kernels written by hand took 93.7 and 94.3 us.
CHUNK = 512


@dataclass(frozen=True)
class RowsProduct:
    """Rows that a cascade makes, and the products that load them."""

    #: One product, of the rows and of weights, or several one behind the other.
    chain: Chain
    #: Whether weights are stored as [n, k].
    k_major: bool
    #: Work of the cascade that makes the rows.
    rows: Work
    #: Elements of the chunks that rows can be made in; 0 if they are made as a whole alone.
    chunk: int = 0
    #: Whether CTAs can share the product's reduction: not where its epilogue reads what else the
    #: cascade makes, such as scales of rows.
    splits: bool = True

    @cached_property
    def shape(self) -> Shape:
        """Extents of the products."""
        return shape_of(self.chain, k_major=self.k_major)

    @property
    def is_chain(self) -> bool:
        """Whether there are several products."""
        return len(self.chain.products) > 1

    @property
    def hbm_bytes(self) -> int:
        """Bytes of inputs and output, once each: what makes the rows counts instead of the rows."""
        chain, rows = self.chain, self.rows
        left = chain.products[0].left
        ends = [e for e in chain.tensors if e.name != left and e.role != "intermediate"]
        product = sum(chain.elements(each.name) * each.item // each.repeats for each in ends)
        return product + rows.rows * rows.length * (rows.read + rows.late)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The kernels if a chain is not fused, in order.

        Rows are one: libraries have kernels of norms. The others are as
        `crossfuse.planner.cost.estimate.eager` counts them: weights of one operand are one product,
        whose results an activation and a multiplication make the intermediate of.
        """
        chain, rows = self.chain, self.rows
        read = rows.rows * rows.length * (rows.read + rows.late)
        found = [Pass(f"{chain.products[0].left}, rows", read, self.left_bytes)]
        for product in chain.products:
            inputs = (product.left, *product.rights, *product.further)
            read, made = sum(map(self._bytes, inputs)), self._bytes(product.output)
            count, depth = len(product.rights), chain.extents[product.reduction]
            flops = 2 * count * chain.elements(product.output) * depth
            found.append(Pass(f"{product.output} by {inputs[1]}", read, count * made, flops))
            if product.output != chain.output.name:
                found += [
                    Pass(f"{product.output}, {n} of {count}", made, made) for n in range(count)
                ]
        return tuple(found)

    def _bytes(self, name: str) -> int:
        tensor = self.chain.tensor(name)
        return self.chain.elements(name) * tensor.item // tensor.repeats

    @property
    def left_bytes(self) -> int:
        """Bytes of the rows as they are stored for the product."""
        return self.rows.rows * self.rows.length * self.rows.written


def chunk_of(parts: Any, site: Any, derivation: Any) -> int:
    """Elements of a chunk by which the rows of a function can be made; 0 if they cannot.

    `parts` is a `crossfuse.cascade.rewrite.rows_first.RowsFirst`, the others the cascade of its
    rows.
    """
    from crossfuse.cascade.rewrite.row_chunks import row_chunks
    from crossfuse.errors import CascadeRefused

    try:
        return CHUNK if row_chunks(parts, site, derivation, CHUNK).chunks > 1 else 0
    except CascadeRefused:
        return 0


def rows_product_of(func: Any) -> RowsProduct | None:
    """Count an unscheduled function whose last product reads rows that a cascade makes.

    None of a function of another form, and of rows that do not stream.
    """
    from crossfuse.cascade.rewrite.rows_first import rows_first

    return _counted(rows_first(func), chunks=True)


def rows_chain_of(func: Any) -> RowsProduct | None:
    """Count an unscheduled function of rows that a cascade makes, and a chain of products of them.

    None as of `rows_product_of`.
    """
    from crossfuse.cascade.rewrite.rows_first import rows_before_chain

    return _counted(rows_before_chain(func), chunks=False)


def _counted(parts: RowsFirst | None, *, chunks: bool) -> RowsProduct | None:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.cascade.algebra import derive
    from crossfuse.cascade.detect import detect
    from crossfuse.cascade.rewrite.streaming import streaming
    from crossfuse.cascade.rewrite.work import work_of
    from crossfuse.errors import CascadeRefused, PlanRefused, ScheduleRefused
    from crossfuse.planner.extract.chain import chain_from

    if parts is None:
        return None
    try:
        sites = detect(parts.rows)
        if len(sites) != 1:
            return None
        derivation = derive(sites[0].cascade)
        streaming(sites[0], derivation)
        k_major = read_chain(ir.Schedule(parts.product)).k_major
        rows = work_of(sites[0], derivation)
        chunk = chunk_of(parts, sites[0], derivation) if chunks else 0
        splits = len(parts.passed) == 1
        return RowsProduct(chain_from(parts.product), k_major, rows, chunk, splits)
    except (CascadeRefused, PlanRefused, ScheduleRefused):
        return None
