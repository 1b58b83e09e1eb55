"""Rows before a product as a family of the planner: against what was measured, and as values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.cascade.plan import CascadePlan, plan_cascade, ranked_cascade
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families import EAGER, ROWS
from crossfuse.planner.families.registry import cascade_families, read_tiles
from crossfuse.planner.families.rows import Rows, RowsTiles, rows_estimate
from crossfuse.planner.kernels.shape import count
from crossfuse.planner.tune.kernel_space import cascade_space_of
from null.planner.cascades import NORM_GEMM, SOFTMAX

H100 = device("nvidia-h100")
RATES = rates_of(H100)

#: Rows, columns, cluster and tiles across: microseconds on an H100, and of the product alone. Rows
#: are made by warpgroups, of the second beside 24 KiB of weights; see docs/hopper-measured.md.
MEASURED = {
    (128, 192, 2, 1): (43.2, 38.8),
    (256, 96, 1, 1): (43.6, 38.8),
}


@pytest.mark.parametrize("tiles", MEASURED)
def test_measured_kernels(tiles: tuple[int, ...]) -> None:
    """Products are told 10 to 16 % too slow, also alone; what rows add is told too little."""
    rows, columns, cluster, across = tiles
    kernel = RowsTiles(rows, columns, cluster, across=across).kernel
    assert NORM_GEMM.product is not None
    found = rows_estimate(NORM_GEMM.product, kernel, H100, RATES)
    whole, alone = MEASURED[tiles]
    assert float(found.microseconds) == pytest.approx(whole, rel=0.12)
    assert found.terms["rows"] == pytest.approx(whole - alone, abs=2.0)


def test_the_first_choice_is_the_fastest_measured() -> None:
    found = plan_cascade(NORM_GEMM)
    assert (found.family, found.place) == (ROWS, "rows in L2")
    tiles = RowsTiles(**found.tiles)
    assert (tiles.rows, tiles.columns, tiles.cluster, tiles.across) == min(
        MEASURED, key=lambda each: MEASURED[each]
    )
    assert [each.family for each in found.runners] == [EAGER]
    assert found.bytes["hbm"] == 104 * 2**20
    assert found.taken is not None
    # Five left stages of 16 KiB and six right ones of 24: see tests/cpu/hopper/rows.
    assert found.taken.shared_bytes == 229560


def test_a_plan_travels_and_says_why() -> None:
    found = plan_cascade(NORM_GEMM)
    assert CascadePlan.from_json(found.to_json()) == found
    assert sum(found.terms.values()) == pytest.approx(found.microseconds)
    reasons = found.explain()
    text = reasons.text()
    for words in (
        "Rows first, and their product in the same kernel: rows=128",
        " rows  ",
        "all run at once",
    ):
        assert words in text
    assert list(reasons.pruned) == [ROWS]
    left = [each.candidates for each in reasons.pruned["rows"]]
    assert left == sorted(left, reverse=True)
    assert left[-1] == count(Rows(NORM_GEMM).kernels_beside_rows(H100)[1])
    assert json.loads(json.dumps(reasons.to_json()))["plan"]["shape"]["product"]["k_major"]


def test_sums_leave_room_for_rows() -> None:
    assert NORM_GEMM.product is not None
    _, kernels = Rows(NORM_GEMM).kernels_beside_rows(H100)
    (phase,) = kernels.phases(NORM_GEMM.product.shape)
    assert phase.sums.max() == 160


def test_families_are_asked_for_by_name() -> None:
    plans = ranked_cascade(NORM_GEMM, only=(ROWS,))
    assert {each.family for each in plans} == {ROWS} and len(plans) == 8
    with pytest.raises(PlanRefused, match="found a cascade whose family is 'stream'"):
        ranked_cascade(SOFTMAX, only=(ROWS,))
    with pytest.raises(PlanRefused) as caught:
        read_tiles(ROWS, {"elements": 64})
    assert "found elements: unknown; limit: at most rows, columns, cluster" in str(caught.value)


def test_a_search_knows_all_tiles() -> None:
    space = cascade_space_of(NORM_GEMM, H100, RATES)
    assert [each.family for each in space.groups] == [ROWS]
    family, tiles = space.tiles(int(space.order[0]))
    assert (family, tiles) == (ROWS, dict(plan_cascade(NORM_GEMM).tiles))
    assert space.find(family, tiles) == space.order[0]
    assert sorted(space.order) == list(range(len(space)))
    assert space.find("tiles", {}) is None


def test_without_rows_there_are_families_of_tiles() -> None:
    whole = replace(NORM_GEMM, product=None)
    assert [each.name for each in cascade_families(whole)] == ["tiles", "warps"]
    assert plan_cascade(whole).family == EAGER
