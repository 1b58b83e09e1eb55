"""Top-k as plain reductions."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def top_of(
    values: te.Tensor, k: int, names: tuple[str, str] = ("top", "top_at")
) -> tuple[te.Tensor, te.Tensor]:
    """The k largest of each row [rows, cols] in float32, and their places in int32, both [rows, k].

    An element's rank is the number of elements before it: larger ones, and equal ones of lower
    index. The number of rank t is the sum of all that have this rank, of which there is exactly
    one. So top-k is written in plain reductions, which `crossfuse.cascade.detect` recognises.
    `names` are those of the blocks.
    """
    rows, cols = values.shape
    other, at, of = (te.reduce_axis((0, cols), name) for name in ("other", "at", "of"))

    def ahead(i: Any, j: Any) -> Any:
        before = tirx.all(values[i, other] == values[i, j], other < j)
        stands = tirx.any(values[i, other] > values[i, j], before)
        return te.sum(tirx.Select(stands, 1, 0), axis=other)

    ranks = te.compute((rows, cols), ahead, names[0] + "_rank")
    zero = tirx.const(0, "float32")
    top = te.compute(
        (rows, k),
        lambda i, t: te.sum(tirx.Select(ranks[i, at] == t, values[i, at], zero), axis=at),
        names[0],
    )
    places = te.compute(
        (rows, k),
        lambda i, t: te.sum(tirx.Select(ranks[i, of] == t, of, 0), axis=of),
        names[1],
    )
    return top, places
