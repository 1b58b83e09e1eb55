"""Products of few rows by tensor cores of a warp, as the planner counts them."""

from __future__ import annotations

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of, matrix_chain
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.explain.explanation import explain
from crossfuse.planner.families.registry import FAMILIES
from crossfuse.planner.families.skinny import SkinnyKernel, behind_another, best_tiles, together
from crossfuse.planner.kernels.shape import Shape, shape_of
from crossfuse.planner.plan import plan, ranked
from crossfuse.workload import parse


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_named_family_is_planned_and_explained(rows: int) -> None:
    found = plan(parse(f"gemm:M={rows},K=2048,N=3072,weights=nk"), "nvidia-h200", only=("skinny",))
    assert found.family == "skinny"
    assert set(found.tiles) == {"lanes", "warps", "loads"}
    (kernel,) = found.kernels
    assert kernel.ctas * 16 == 3072
    assert kernel.threads == found.tiles["warps"] * 32
    assert 3072 * 2048 * 2 / 4.6e6 < found.microseconds < 20
    assert "through L2 into registers" in explain(found).text()


#: Products of decoders of 1 and 8 billion parameters: QKV, output, gate and up, down.
LAYERS = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (4096, 6144), (14336, 4096)]


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(("k", "n"), LAYERS)
def test_an_h200_has_it_of_layers_in_which_others_took_longer(rows: int, k: int, n: int) -> None:
    found = plan(parse(f"gemm:M={rows},K={k},N={n},weights=nk"), "nvidia-h200")
    # Of the widest, eight rows took as long by the pipeline.
    if (rows, n) != (8, 16384):
        assert found.family == "skinny"
    assert {"gemm", "eager"} <= {found.family, *(each.family for each in found.runners)}


def test_wide_layers_of_more_rows_are_left_to_the_pipeline() -> None:
    assert plan(parse("gemm:M=16,K=2048,N=2048,weights=nk"), "nvidia-h200").family == "skinny"
    assert plan(parse("gemm:M=32,K=4096,N=6144,weights=nk"), "nvidia-h200").family != "skinny"


def test_what_has_to_be_of_the_pipeline_is() -> None:
    text = "gemm:M=1,K=8192,N=2048,weights=nk"
    found = ranked(text, "nvidia-h200", keep=4, pipelined=True)
    assert {each.family for each in found} == {"gemm", "eager"}
    with pytest.raises(PlanRefused, match="skinny is no family of the Hopper pipeline"):
        ranked(text, "nvidia-h200", only=("skinny",), pipelined=True)


@pytest.mark.parametrize(
    ("rows", "k", "n", "tiles", "microseconds"),
    [
        (1, 2048, 2048, (8, 8, 2), 4.35),
        (8, 2048, 2048, (4, 16, 2), 4.93),
        (1, 8192, 2048, (8, 8, 2), 10.1),
        (1, 4096, 6144, (8, 8, 2), 13.8),
        (8, 4096, 6144, (4, 4, 4), 15.5),
        (2, 14336, 4096, (8, 8, 2), 29.0),
        (1, 2048, 128256, (8, 4, 2), 117.7),
        (16, 2048, 3072, (4, 8, 4), 7.0),
    ],
)
def test_estimates_are_near_what_an_h200_took(
    rows: int, k: int, n: int, tiles: tuple[int, ...], microseconds: float
) -> None:
    target = device("nvidia-h200")
    shape = shape_of(chain_of(parse(f"gemm:M={rows},K={k},N={n},weights=nk")))
    found = estimate(SkinnyKernel(*tiles), shape, target, rates_of(target))
    assert float(found.microseconds) == pytest.approx(microseconds, rel=0.12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gemm:M=33,K=2048,N=2048,weights=nk", "skinny has kernels of at most 32 rows"),
        ("gemm:M=1,K=2048,N=2048", "stored as \\[n, k\\]' leaves 0"),
        ("gemm:M=1,K=2048,N=2050,weights=nk", "'CTAs divide the columns' leaves 0"),
        ("gemm:M=1,K=2056,N=2048,weights=nk", "'steps divide the reduction' leaves 0"),
    ],
)
def test_what_it_has_no_kernels_of_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanRefused, match=said):
        plan(parse(text), "nvidia-h200", only=("skinny",))


def test_tiles_are_read_as_they_are_written() -> None:
    tiles = {"lanes": 8, "warps": 4, "loads": 2}
    assert FAMILIES["skinny"].read(tiles).tiles() == tiles


# Gate and up, and what is made of both.


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gate_and_up_are_planned_and_explained(rows: int) -> None:
    text = f"gated_gemm:M={rows},K=2048,N=8192"
    found = plan(parse(text), "nvidia-h200", only=("skinny", "eager"))
    assert found.family == "skinny"
    assert found.kernels[0].ctas * 16 == 8192
    (apart,) = found.runners
    product = plan(parse(f"gemm:M={rows},K=2048,N=8192,weights=nk"), "nvidia-h200", only=("eager",))
    assert apart.microseconds == pytest.approx(2 * product.microseconds)
    assert "through L2 into registers" in explain(found).text()


def test_loads_of_both_weights_are_counted() -> None:
    pair = shape_of(chain_of(parse("gated_gemm:M=1,K=2048,N=8192")))
    assert SkinnyKernel(4, 8, 4).broken(pair) == "not: 8 loads of a thread at a time"
    assert not SkinnyKernel(4, 8, 2).broken(pair)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "skinny"])
def test_no_other_family_has_kernels_of_gate_and_up(family: str) -> None:
    due = "has no kernels of (gate and up without a product of both|two products|one product)"
    with pytest.raises(PlanRefused, match=f"{family} {due}"):
        plan(parse("gated_gemm:M=4,K=2048,N=8192"), "nvidia-h200", only=(family,))


def shape(rows: int, columns: int) -> Shape:
    return shape_of(matrix_chain(rows, (2048, columns)))


def test_several_products_are_planned_as_one_of_all_columns() -> None:
    target = device("nvidia-h200")
    queries, keys = shape(1, 2048), shape(1, 512)
    assert together((queries, keys, keys)) == shape(1, 3072)
    tiles = best_tiles(queries, keys, keys, target=target)
    assert tiles is not None and not tiles.broken(keys)
    one = estimate(tiles, shape(1, 3072), target, rates_of(target)).microseconds
    assert float(one) == pytest.approx(5.4, rel=0.06)


def test_tiles_divide_each_product() -> None:
    tiles = best_tiles(shape(1, 96), shape(1, 32), target=device("nvidia-h200"))
    assert tiles is not None and 32 % int(tiles.width) == 0
    assert best_tiles(shape(1, 96), shape(1, 30), target=device("nvidia-h200")) is None


def test_behind_another_kernel_more_warps_of_an_sm_are_done_sooner() -> None:
    """As 104 kernels in rows of sixteen were: 8 warps of each SM by half of what 16 are."""
    target = device("nvidia-h200")
    found = ranked("gemm:M=8,K=8192,N=2048,weights=nk", target, only=("skinny",), keep=4)
    alone = {tuple(each.tiles.values()): each for each in found}
    early = {tiles: behind_another(each, target) for tiles, each in alone.items()}
    fewer, more = (8, 8, 2), (8, 16, 2)
    assert alone[fewer].microseconds < alone[more].microseconds
    assert early[fewer].microseconds > early[more].microseconds
    for tiles, share in ((fewer, 0.53), (more, 1.07)):
        sooner = alone[tiles].microseconds - early[tiles].microseconds
        assert sooner == pytest.approx(share, abs=0.01)
        assert sum(early[tiles].terms.values()) == pytest.approx(early[tiles].microseconds)


@pytest.mark.parametrize(("warps", "n"), [(16, 3072), (4, 128256)])
def test_where_no_room_is_for_all_ctas_at_once_none_are(warps: int, n: int) -> None:
    shape = shape_of(chain_of(parse(f"gemm:M=8,K=2048,N={n},weights=nk")))
    assert SkinnyKernel(4, warps, 4).ahead(shape, device("nvidia-h200")) == 0
