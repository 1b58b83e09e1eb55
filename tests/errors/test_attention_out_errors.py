"""Refusals of attention and its output product in one kernel."""

from __future__ import annotations

from typing import Any

import pytest

from cpu.hopper.attention.products import of_spec, spec
from crossfuse.cascade.rewrite.rows_first import attention_first
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import resolve

APART = (
    "limit: tiles of as many rows, at most 192, in clusters of one size: the same warpgroups go "
    "through both. Instead: give both tiles of the same rows and one cluster size."
)


def text_of(make: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        make()
    return str(caught.value)


def test_tiles_of_other_rows() -> None:
    sch = of_spec(spec(q_len=64), rows=128)
    assert text_of(lambda: lower(sch)) == (
        "grid-stage: a stream and a product of one kernel: found tiles of 64 and 128 rows, in "
        f"clusters of 1 and 1; {APART}"
    )


def test_clusters_of_another_size() -> None:
    sizes = CascadeTiles(rows=64, elements=64, cluster=2)
    assert text_of(lambda: of_spec(spec(), sizes)) == (
        "cluster_bind: loop 'i0_0_1': found extent 1 on axis x; limit: extent 2, as loop 'part' "
        "has on that axis. Instead: split both loops by the same number of CTAs."
    )


def test_rows_of_the_next_sequence() -> None:
    assert text_of(lambda: of_spec(spec(batch=2, q_len=70))) == (
        "tiles: tensor 'attended': found 2 sequences of 70 queries, in tiles of 64 rows; limit: a "
        "multiple of the tile's rows: rows of one sequence lie below those of another. Instead: "
        "take other rows a tile, or schedule attention and its product apart."
    )


def test_more_tiles_than_clusters() -> None:
    sizes = CascadeTiles(rows=64, elements=64, cluster=4)
    sch = of_spec(spec(heads=32, kv_heads=8, kv_len=512, hidden=512), sizes, split=4)
    assert text_of(lambda: lower(sch)) == (
        "grid-stage: clusters of 4 on nvidia-h100: found 32 tiles whose keys CTAs share; limit: 30 "
        "clusters that run at the same time, each with one tile. Instead: take fewer CTAs a tile "
        "(CascadeTiles.cluster), or leave grid_stage out."
    )


def test_states_that_a_second_kernel_merges() -> None:
    sizes = CascadeTiles(rows=64, elements=64, cluster=2, merge="kernel")
    with pytest.raises(LoweringRefused):
        lower(of_spec(spec(), sizes))


def test_slices_beyond_a_head() -> None:
    sizes = CascadeTiles(rows=64, elements=32, cluster=3)
    assert text_of(lambda: of_spec(spec(heads=3, kv_heads=1), sizes, split=3)) == (
        "tiles: tensor 'attended': found 64 columns of a head, of which 3 CTAs merge a slice each; "
        "limit: slices of a multiple of 8 columns that make up a head. Instead: take another "
        "number of CTAs a tile (CascadeTiles.cluster)."
    )


def test_fewer_rows() -> None:
    sch = of_spec(spec())
    accept_fewer_rows(sch)
    assert text_of(lambda: lower(sch)) == (
        "crossfuse.rows: tensor 'context': found a left operand that a stream of tiles makes in "
        "the kernel; limit: operands that the call passes, or rows. Instead: leave "
        "accept_fewer_rows out, and compile for each number of rows."
    )


def test_a_cascade_that_no_product_follows() -> None:
    func = prim_func(resolve("attention:batch=1,heads=2,q_len=64,kv_len=64,head_dim=64"))
    assert attention_first(func) is None
    with pytest.raises(ScheduleRefused) as caught:
        schedule_cascade_of(func, "attention_out", {})
    assert str(caught.value) == (
        "plan: family 'attention_out': found a cascade that no product follows; limit: attention, "
        "and the product of all heads of a token and weights. Instead: plan this function, which "
        "leaves the family out."
    )
