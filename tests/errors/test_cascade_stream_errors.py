"""Refusals of streaming functions: sizes, states and sites that none is written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpu.cascade.rewrite.cases import site_of, stream_of
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.spec import Site
from crossfuse.errors import CascadeRefused
from crossfuse.schedule.rules.stream import schedule_stream

SIZES: dict[str, tuple[StreamTiles, str]] = {
    "none": (
        StreamTiles(unroll=0),
        "tiles, unroll: found 0; limit: 1 or more. Instead: pass a positive unroll.",
    ),
    "no power of two": (
        StreamTiles(96),
        "tiles, threads: found 96 threads for each of 1 rows; limit: a power of two, 1024 in a "
        "CTA at most. Instead: pass fewer threads or fewer rows.",
    ),
    "too many threads": (
        StreamTiles(512, rows=4),
        "tiles, threads: found 512 threads for each of 4 rows; limit: a power of two, 1024 in a "
        "CTA at most. Instead: pass fewer threads or fewer rows.",
    ),
    "large cluster": (
        StreamTiles(cluster=17),
        "tiles, cluster: found 17 CTAs for 1 rows; limit: 16 CTAs, and one row where there are "
        "several. Instead: pass cluster=1, or rows=1 and at most 16 CTAs.",
    ),
    "rows in a cluster": (
        StreamTiles(64, cluster=2, rows=2),
        "tiles, cluster: found 2 CTAs for 2 rows; limit: 16 CTAs, and one row where there are "
        "several. Instead: pass cluster=1, or rows=1 and at most 16 CTAs.",
    ),
    "rows that do not divide": (
        StreamTiles(64, rows=5),
        "tiles, rows: found 5 rows of a CTA, of 4; limit: a divisor of the number of rows. "
        "Instead: pass rows=1.",
    ),
    "unknown residence": (
        StreamTiles(resident="l2"),
        "tiles, resident: found 'l2'; limit: registers, shared, none. Instead: pass one of these.",
    ),
}


def refusal_of(site: Site, tiles: StreamTiles) -> str:
    with pytest.raises(CascadeRefused) as caught:
        stream_of(site, tiles)
    text = str(caught.value)
    assert text.startswith("cascade-stream: ")
    return text.removeprefix("cascade-stream: ")


@pytest.mark.parametrize("case", SIZES)
def test_sizes(case: str) -> None:
    tiles, expected = SIZES[case]
    assert refusal_of(site_of("softmax", 4, 64), tiles) == expected


def test_columns() -> None:
    site = site_of("softmax", 4, 64)
    stages = {**site.stages, "s": replace(site.stages["s"], columns=(site.axis,))}
    assert refusal_of(replace(site, stages=stages), StreamTiles()) == (
        f"stage s: found a result with columns ({site.axis.name}); limit: one number a row. "
        "Instead: lower it with matrix products."
    )


def test_outputs_with_loops_of_their_own() -> None:
    site = site_of("softmax", 4, 64)
    (output,) = site.outputs
    assert refusal_of(
        replace(site, outputs=(replace(output, columns=(site.axis,)),)), StreamTiles()
    ) == (
        f"output {output.name}: found loops beyond the rows ({site.axis.name}); limit: loops that "
        "the reductions have too, and the axis. Instead: compute it apart."
    )


def test_producers() -> None:
    site = site_of("softmax", 4, 64)
    (x,) = site.cascade.elements
    assert refusal_of(replace(site, producers={x: "scores"}), StreamTiles()) == (
        f"element {x}: found a result of block 'scores'; limit: elements that are loaded. "
        "Instead: lower it with matrix products."
    )


def test_a_merge_on_other_threads() -> None:
    """The lowering wants the whole loop on threadIdx.x."""
    from crossfuse import _tvm as ir
    from crossfuse.errors import LoweringRefused
    from crossfuse.lower.extract import lower

    tiles = StreamTiles(64)
    function: Any = stream_of(site_of("softmax", 4, 256), tiles)
    sch = ir.Schedule(function)
    row = sch.get_loops(sch.get_sblock("segment"))[0]
    sch.bind(row, "blockIdx.x")
    for name in ("segment", "merge", "outputs"):
        sch.bind(sch.get_loops(sch.get_sblock(name))[1], "threadIdx.y")
    with pytest.raises(LoweringRefused) as caught:
        lower(sch)
    assert str(caught.value) == (
        "merge: block 'merge': found a loop that is not bound to threadIdx.x; limit: one loop "
        "around the block, bound to a power of two of threads along x. Instead: bind the whole "
        "reduction loop of the block to threadIdx.x."
    )
    assert schedule_stream(function, tiles) is not None
