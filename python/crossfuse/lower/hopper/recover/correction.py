"""Reads what a product multiplies its sums by where a chunk of the reduction begins."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.blocks.facts import corrected, is_reduction
from crossfuse.lower.hopper.program.tile_nest import TileNest, refuse_program
from crossfuse.lower.hopper.program.tile_program import Correction


def read_correction(nest: TileNest) -> Correction | None:
    """Read what a product multiplies its sums by, before it adds to them.

    Parameters
    ----------
    nest : TileNest
        Of ``C[i, j] = C[i, j] * (F[k // c, i] if k % c == 0 else 1) + A[i, k] * B[j, k]``.

    Returns
    -------
    Correction | None
        None of a product that only adds.

    Raises
    ------
    LoweringRefused
        If the factor is any other expression.
    """
    body = nest.block.body
    found = corrected(body)
    if found is None:
        return None
    _, factor = found
    row = body.indices[-2]
    (element,) = [each.var for each in nest.block.iter_vars if is_reduction(each)]
    load = getattr(factor, "true_value", None)
    if isinstance(load, ir.TensorLoad) and len(load.indices) == 2:
        chunk = ir.constant(getattr(load.indices[0], "b", 0)) or 0
        place = [ir.tirx.floordiv(element, chunk), row] if chunk else []
        first = ir.tirx.EQ(ir.tirx.floormod(element, chunk), 0) if chunk else None
        one = ir.tirx.const(1.0, "float32")
        wanted = ir.tirx.Select(first, load.source[tuple(place)], one) if chunk else None
        if wanted is not None and ir.tvm_ffi.structural_equal(wanted, factor):
            return Correction(load.source, chunk)
    raise refuse_program(
        nest.where,
        f"sums that are multiplied by {factor}",
        "a factor of the row where a chunk of the reduction begins: "
        "Select(k % chunk == 0, factors[k // chunk, i], 1)",
    )
