"""A product that corrects its sums by what the rows of its left operand say of each chunk."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.rows_first import RowsFirst


def corrected_product(parts: RowsFirst, factors: Any, chunk: int) -> Any:
    """Multiply sums by the factor of each chunk where it begins.

    Parameters
    ----------
    parts : RowsFirst
        The function.
    factors : tvm.tirx.Buffer
        Of each chunk a factor for every row.
    chunk : int
        Elements of a chunk.

    Returns
    -------
    tvm.tirx.PrimFunc
        `parts.product` with such sums, and `factors` as its last parameter.
    """
    made = set(parts.passed)

    def change(block: Any, mutator: Any) -> Any:
        operand = _operand(block, made)
        if block.init is None or operand is None:
            return mutator.default_mutate(block)
        row, element = operand.indices
        sums, term = block.body.value.a, block.body.value.b
        place = ir.tirx.floordiv(element, chunk)
        one = ir.tirx.const(1.0, "float32")
        factor = ir.tirx.Select(
            ir.tirx.EQ(ir.tirx.floormod(element, chunk), 0), factors[place, row], one
        )
        body = ir.BufferStore(block.body.buffer, sums * factor + term, block.body.indices)
        read = ir.tvm.tirx.BufferRegion(factors, [_point(place), _point(row)])
        return ir.block_like(block, body=body, reads=[*block.reads, read])

    root = parts.product.body.block
    body = ir.mutate(root.body, (ir.SBlock, change))
    whole = ir.SBlockRealize([], ir.tirx.const(1, "bool"), ir.block_like(root, body=body))
    made_function = ir.with_body(parts.product, whole)
    return ir.PrimFunc(
        [*parts.product.params, factors], whole, made_function.ret_type, made_function.attrs
    )


def _operand(block: Any, made: set[Any]) -> Any:
    """The load of what is made before, in a product of it."""
    loads = ir.buffer_loads(block.body)
    found = [each for each in loads if each.source in made and len(each.indices) == 2]
    return found[0] if found else None


def _point(index: Any) -> Any:
    return ir.tvm.ir.Range.from_min_extent(index, 1)
