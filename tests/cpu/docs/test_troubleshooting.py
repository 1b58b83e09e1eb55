"""Messages that the troubleshooting page quotes are those that the code gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm

from crossfuse.errors import ScheduleRefused
from crossfuse.workload import parse, prim_func

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def product() -> tuple[Any, Any, list[Any]]:
    sch = tvm.s_tir.Schedule(prim_func(parse("gemm:M=32,K=64,N=32")))
    block = sch.get_sblock("gemm0")
    return sch, block, list(sch.get_loops(block))


def too_large() -> None:
    sch, _, (i, _, _) = product()
    sch.cluster_bind(i)


def too_many_parts() -> None:
    sch, block, (i, j, k) = product()
    sch.reorder(k, i, j)
    sch.dsm_reduce(block, k)


def bound_by_hand() -> None:
    sch, _, (i, _, _) = product()
    sch.bind(sch.split(i, [None, 4])[1], "clusterCtaIdx.x")
    sch.verify_cluster()


def odd_tile() -> None:
    sch = tvm.s_tir.Schedule(prim_func(parse("gemm_chain:M=32,K=64,N=126,L=32,act=relu")))
    hidden, second = sch.get_sblock("hidden"), sch.get_sblock("gemm1")
    i, j, k = sch.get_loops(second)
    c, j1 = sch.split(j, [4, None])
    r, k1 = sch.split(k, [4, None])
    sch.reorder(c, r, i, k1, j1)
    sch.cluster_bind(c)
    sch.dsm_shuffle(hidden, second, 0, r)


@pytest.mark.parametrize("mistake", [too_large, too_many_parts, bound_by_hand, odd_tile])
def test_the_page_quotes_what_a_mistake_gives(mistake: Callable[[], None]) -> None:
    with pytest.raises(ScheduleRefused) as caught:
        mistake()
    assert str(caught.value) in " ".join(PAGE.read_text(encoding="utf-8").split())
