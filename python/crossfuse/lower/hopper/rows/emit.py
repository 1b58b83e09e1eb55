"""The warps that make rows of the left operand, while others load and multiply."""

from __future__ import annotations

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.body import Body
from crossfuse.lower.hopper.flags import Flags, FlagWriter
from crossfuse.lower.hopper.rows.program import RowProgram
from crossfuse.lower.hopper.statements import Variable, let, run, when

#: Warps of the loading warpgroup that make rows, and the first of them: those before it load.
ROW_WARPS, FIRST_WARP = 2, 2


def emit_rows(body: Body, rows: RowProgram, flags: Flags) -> None:
    """Write the warps that make rows.

    Row r is that of warp ``r // ctas`` of CTA ``r % ctas``, so that the first rows of all CTAs are
    under way together. A warp counts each row at the flag of its tile; rows of the last tile that
    the matrix does not have are counted too.

    Parameters
    ----------
    body : Body
        Of the kernel.
    rows : RowProgram
        What to make.
    flags : Flags
        Of the tiles that a product loads.
    """
    where, size = body.where, body.plan.cluster_size
    ctas = body.plan.clusters * size
    cta = where.cluster * size + where.rank
    row = Variable("row", "int32", (where.warp - FIRST_WARP) * ctas + cta)
    writer = FlagWriter(body.placed(flags))
    with ir.script.While(row.value < flags.down * flags.rows):
        with when(row.value < rows.rows):
            ir.script.add_to_parent(rows.of(let("own_row", row.value), let("lane", where.lane)))
        # All lanes have stored their elements.
        run(ir.script.cuda.warp_sync())
        with when(where.lane == 0):
            writer.raise_flag(ir.script.min(row.value, rows.rows - 1), 0)
        row.set(row.value + ROW_WARPS * ctas)
