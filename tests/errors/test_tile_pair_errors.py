"""Pairs of CTAs that the rule and the Hopper pipeline refuse, by the text."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.markers import PAIRED
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import parse, prim_func

FFN = "gated_ffn:M=64,K=64,N=256,L=64,dtype=bfloat16"


def scheduled(text: str = FFN, **options: Any) -> Any:
    return schedule_tiled_ffn(prim_func(parse(text)), **options)


@pytest.mark.parametrize(
    ("text", "tiles", "found"),
    [
        ("gemm_chain:M=64,K=64,N=256,L=64,dtype=bfloat16", TensorTiles(), "1 products for 2"),
        (FFN, TensorTiles(cluster=4), "2 products for 4"),
    ],
    ids=["one product", "four CTAs"],
)
def test_rule_takes_two_products_and_two_ctas(text: str, tiles: TensorTiles, found: str) -> None:
    with pytest.raises(ScheduleRefused) as caught:
        scheduled(text, first=tiles, paired=True)
    assert str(caught.value).startswith("rule: tiled_ffn, block 'hidden': found " + found)
    assert "paired CTAs; limit: two products of one input, one for each CTA" in str(caught.value)


def test_mark_where_products_are_split() -> None:
    """Each CTA sums a part of one product: there is no other one to make."""
    schedule = scheduled()
    schedule.annotate(schedule.get_sblock("out"), PAIRED, "x")
    with pytest.raises(LoweringRefused) as caught:
        recover(only_function(schedule))
    assert str(caught.value).startswith(
        "tile-program: blocks 'out': found crossfuse.paired of a block inside a nest; limit: "
    )


@pytest.mark.parametrize(
    ("axis", "found"),
    [
        (
            "x",
            "2 products of 64 rows from 0; limit: two products, whose rows alone differ between "
            "the CTAs of axis cluster.x",
        ),
        (
            "z",
            "a pair along axis 'z' in a cluster with cluster.y of 1, cluster.x of 2; limit: an "
            "axis of two CTAs",
        ),
    ],
)
def test_marked_block_is_no_pair(axis: str, found: str) -> None:
    """CTAs that differ in columns, and an axis that the tile has not."""
    schedule = scheduled(first=TensorTiles(cluster=2))
    schedule.annotate(schedule.get_sblock("hidden"), PAIRED, axis)
    with pytest.raises(LoweringRefused) as caught:
        recover(only_function(schedule))
    assert str(caught.value).startswith(f"tile-program: block 'hidden': found {found}")


def test_more_tiles_than_clusters() -> None:
    """What the other CTA sends has one place, so a cluster has one tile."""
    schedule = scheduled(
        FFN.replace("M=64", "M=1024").replace("N=256", "N=512"),
        first=TensorTiles(columns=32),
        paired=True,
    )
    with pytest.raises(LoweringRefused) as caught:
        plan_kernel(recover(only_function(schedule))[0], device("nvidia-h100"))
    assert str(caught.value).startswith(
        "grid-stage: clusters of 2 on nvidia-h100: found 128 tiles of paired CTAs; limit: 66 "
        "clusters that run at the same time, each with one tile"
    )
