"""Products of few rows on plain multiply-adds, as the planner counts them."""

from __future__ import annotations

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.explain.explanation import explain
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.planner.plan import plan
from crossfuse.workload import parse


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_named_family_is_planned_and_explained(rows: int) -> None:
    found = plan(parse(f"gemm:M={rows},K=2048,N=3072,weights=nk"), "nvidia-h200", only=("skinny",))
    assert found.family == "skinny"
    assert set(found.tiles) == {"lanes", "columns", "groups", "loads"}
    (kernel,) = found.kernels
    assert kernel.ctas * found.tiles["columns"] * found.tiles["groups"] == 3072
    assert kernel.threads == found.tiles["lanes"] * found.tiles["groups"]
    assert 3072 * 2048 * 2 / 4.6e6 < found.microseconds < 20
    assert "through L2 into registers" in explain(found).text()


def test_other_plans_do_not_have_it() -> None:
    found = plan(parse("gemm:M=1,K=2048,N=2048,weights=nk"), "nvidia-h200")
    assert "skinny" not in {found.family, *(each.family for each in found.runners)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemm:M=9,K=2048,N=2048,weights=nk", "'at most 8 rows' leaves 0"),
        ("gemm:M=1,K=2048,N=2048", "stored as \\[n, k\\]' leaves 0"),
        ("gemm:M=1,K=2048,N=2050,weights=nk", "'CTAs divide the columns' leaves 0"),
        ("gemm:M=1,K=2056,N=2048,weights=nk", "'steps divide the reduction' leaves 0"),
    ],
)
def test_what_it_has_no_kernels_of_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanRefused, match=said):
        plan(parse(text), "nvidia-h200", only=("skinny",))


def test_tiles_are_read_as_they_are_written() -> None:
    tiles = {"lanes": 16, "columns": 2, "groups": 8, "loads": 4}
    assert FAMILIES["skinny"].read(tiles).tiles() == tiles
    assert FAMILIES["skinny"].named_only
