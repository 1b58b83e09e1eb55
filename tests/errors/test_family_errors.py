"""Tiles that a family of kernels has not."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse.errors import ScheduleRefused
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.workload import parse, prim_func

CHAIN = "gemm_chain:M=64,K=64,N=128,L=64,dtype=bfloat16"


@pytest.mark.parametrize(
    ("family", "tiles", "text"),
    [
        (
            "dsm",
            {"rows": 64, "part": 2},
            "family 'dsm': found part: unknown; limit: at most rows, cluster",
        ),
        (
            "registers",
            {"row": 64},
            "family 'registers': found row: unknown; limit: at most rows, co",
        ),
        (
            "l2",
            {"third": {}},
            "family 'l2': found third: unknown; limit: at most first, second. Ins",
        ),
        (
            "global",
            {"first": {"row": 64}},
            "family 'global': found first.row: unknown; limit: at most row",
        ),
    ],
)
def test_unknown_tiles(family: str, tiles: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleRefused) as caught:
        FAMILIES[family].schedule(prim_func(parse(CHAIN)), tiles, "nvidia-h100")
    assert f"tiles: {text}" in str(caught.value)
