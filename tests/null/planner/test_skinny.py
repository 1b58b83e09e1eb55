"""Products of few rows on plain multiply-adds, as the planner counts them."""

from __future__ import annotations

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.explain.explanation import explain
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.planner.families.skinny import SkinnyKernel
from crossfuse.planner.kernels.shape import shape_of
from crossfuse.planner.plan import plan, ranked
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


#: Products of decoders of 1 and 8 billion parameters: QKV, output, gate and up, down.
LAYERS = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (4096, 6144), (14336, 4096)]


@pytest.mark.parametrize("target", ["nvidia-h100", "nvidia-h200"])
def test_it_is_planned_of_one_row_and_not_of_eight(target: str) -> None:
    one = plan(parse("gemm:M=1,K=8192,N=2048,weights=nk"), target)
    assert one.family == "skinny"
    assert {"gemm", "eager"} <= {each.family for each in one.runners}
    for k, n in LAYERS:
        found = plan(parse(f"gemm:M=8,K={k},N={n},weights=nk"), target)
        assert found.family != "skinny"
        assert "skinny" in {each.family for each in found.runners}


def test_what_has_to_be_of_the_pipeline_is() -> None:
    text = "gemm:M=1,K=8192,N=2048,weights=nk"
    found = ranked(text, "nvidia-h200", keep=4, pipelined=True)
    assert {each.family for each in found} == {"gemm", "eager"}
    with pytest.raises(PlanRefused, match="skinny is no family of the Hopper pipeline"):
        ranked(text, "nvidia-h200", only=("skinny",), pipelined=True)


@pytest.mark.parametrize(
    ("k", "n", "microseconds"),
    [(2048, 2048, 5.27), (2048, 16384, 23.9), (8192, 2048, 14.9), (4096, 6144, 18.7)],
)
def test_estimates_are_near_what_an_h100_took(k: int, n: int, microseconds: float) -> None:
    target = device("nvidia-h100")
    shape = shape_of(chain_of(parse(f"gemm:M=1,K={k},N={n},weights=nk")))
    found = estimate(SkinnyKernel(32, 1, 8, 4), shape, target, rates_of(target))
    assert float(found.microseconds) == pytest.approx(microseconds, rel=0.06)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemm:M=9,K=2048,N=2048,weights=nk", "skinny has kernels of at most 8 rows"),
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
