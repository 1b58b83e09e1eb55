"""Rows before a chain of products as a family of the planner: chosen, explained, compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.cascade.plan import CascadePlan, plan_cascade, ranked_cascade
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.explain.explanation import apart
from crossfuse.planner.families import EAGER, ROWS_CHAIN
from crossfuse.planner.families.registry import CASCADE_FAMILIES, cascade_families, read_tiles
from crossfuse.planner.plan import ranked
from crossfuse.planner.tune.kernel_space import cascade_space_of
from null.planner.cascades import NORM_FFN, NORM_GEMM

H100 = device("nvidia-h100")
RATES = rates_of(H100)
FAMILY = CASCADE_FAMILIES[ROWS_CHAIN]


def test_a_chain_behind_rows_has_a_family_of_its_own() -> None:
    assert [each.name for each in cascade_families(NORM_FFN)] == [ROWS_CHAIN]
    assert ROWS_CHAIN not in {each.name for each in cascade_families(NORM_GEMM)}


def test_one_kernel_is_chosen_and_travels() -> None:
    found = plan_cascade(NORM_FFN)
    assert (found.family, found.place) == (ROWS_CHAIN, "rows and intermediate in L2")
    assert [each.family for each in found.runners] == [EAGER]
    assert CascadePlan.from_json(found.to_json()) == found
    assert sum(found.terms.values()) == pytest.approx(found.microseconds)
    assert found.terms["rows"] > 0
    # Inputs and the output: the rows and the intermediate stay in L2.
    assert found.bytes["hbm"] == NORM_FFN.product.hbm_bytes < found.bytes["l2"]
    assert found.taken is not None and found.taken.shared_bytes <= H100.max_shared_bytes


def test_separate_kernels_are_those_of_the_chain_and_one_of_rows() -> None:
    """Groups of a model with the norm and without it are compared with the same library."""
    assert NORM_FFN.product is not None
    (alone,) = ranked(NORM_FFN.product.chain, H100, only=(EAGER,))
    (whole,) = ranked_cascade(NORM_FFN, H100, only=(EAGER,))
    kernel = RATES.fitted.eager_kernel
    assert kernel < whole.microseconds - alone.microseconds < 1.1 * kernel


def test_an_explanation_has_the_kernels_that_one_replaces() -> None:
    reasons = plan_cascade(NORM_FFN).explain()
    text = reasons.text()
    assert "Rows first, then both products in the same kernel: rows=64" in text
    assert "rows (stream), then their" in text
    assert list(reasons.pruned) == [ROWS_CHAIN]
    left = [each.candidates for each in reasons.pruned[ROWS_CHAIN]]
    assert left == sorted(left, reverse=True)
    assert json.loads(json.dumps(reasons.to_json()))["plan"]["family"] == ROWS_CHAIN


def test_two_kernels_are_told_in_both_ways() -> None:
    """Rows alone, then the chain; or rows with the only first product, then the second one."""
    product = NORM_FFN.product
    assert product is not None
    (gated,) = apart(NORM_FFN, H100, RATES)
    assert gated[0].startswith("rows (stream), then their chain")
    first = replace(product.chain.products[0], rights=("B_gate",))
    tensors = tuple(each for each in product.chain.tensors if each.name != "B_up")
    plain = replace(product.chain, products=(first, *product.chain.products[1:]), tensors=tensors)
    ways = dict(apart(replace(NORM_FFN, product=replace(product, chain=plain)), H100, RATES))
    assert [each.partition(" (")[0] for each in ways] == ["rows", "rows with their product"]
    assert not [*apart(NORM_GEMM, H100, RATES)]


def test_sums_leave_room_for_what_makes_rows() -> None:
    family = FAMILY(NORM_FFN)
    _, tiles = family.candidates(H100)
    for each in tiles[:: max(1, len(tiles) // 200)]:
        phases = each.kernel.phases(NORM_FFN.product.shape)
        most = {1: 216, 2: 176, 3: 112}[int(phases[0].warpgroups)]
        assert sum(int(phase.sums) for phase in phases) <= most
        assert max(int(phase.sums) for phase in phases) <= 160


def test_tiles_are_those_of_the_rule() -> None:
    tiles = read_tiles(ROWS_CHAIN, {"rows": 64, "columns": 80, "cluster": 8, "split2": 8})
    assert tiles.phases == {
        "first": {
            **{"rows": 64, "columns": 80, "cluster": 8, "split": 1},
            **{"across": 1, "stacked": False},
        },
        "second": {"rows": 64, "columns": 64, "cluster": 1, "split": 8},
    }
    with pytest.raises(PlanRefused) as caught:
        read_tiles(ROWS_CHAIN, {"chunk": 64})
    assert "found chunk: unknown; limit: at most rows, columns, cluster" in str(caught.value)


def test_a_search_knows_all_tiles() -> None:
    space = cascade_space_of(NORM_FFN, H100, RATES)
    family, tiles = space.tiles(int(space.order[0]))
    assert (family, tiles) == (ROWS_CHAIN, dict(plan_cascade(NORM_FFN).tiles))
    assert space.find(family, tiles) == space.order[0]


def test_a_shape_without_products_has_no_such_kernel() -> None:
    with pytest.raises(PlanRefused, match="found a cascade whose family is 'stream'"):
        ranked_cascade(CascadeShape("rows", NORM_FFN.product.rows), only=(ROWS_CHAIN,))
