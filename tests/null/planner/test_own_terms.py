"""Cost terms that users add: every family has them, not fusing too, and plans follow.

Of chains and of cascades.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.cascade.plan import plan_cascade, ranked_cascade
from crossfuse.planner.chain.build import chain_of
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.cost.terms import OwnTerm, told
from crossfuse.planner.explain.explanation import explain_plan
from crossfuse.planner.families import ROWS
from crossfuse.planner.families.registry import CASCADE_FAMILIES
from crossfuse.planner.families.rows import RowsTiles
from crossfuse.planner.plan import ranked
from crossfuse.workload import parse
from null.planner.cascades import DECODE, NORM_GEMM, SOFTMAX

H100 = device("nvidia-h100")


def with_term(time: Any) -> Rates:
    return replace(rates_of(H100), own=(OwnTerm("gap", time),))


def test_every_family_has_the_term_and_plans_follow_it() -> None:
    def gap(kernel: Any, shape: Any, spec: Any) -> float:
        assert spec == H100
        return 5.0 if kernel is None else 3.0 * len(kernel.kernels(shape))

    before = {each.family: each for each in ranked("G6:M=128")}
    after = ranked("G6:M=128", rates=with_term(gap))
    added = {each.family: each.terms["gap"] for each in after}
    assert added == {"registers": 3.0, "dsm": 3.0, "l2": 3.0, "global": 6.0, "eager": 5.0}
    for each in after:
        assert each.microseconds == pytest.approx(
            before[each.family].microseconds + added[each.family]
        )
        assert told(each.terms)[-1] == "gap"
    assert min(before.values(), key=lambda each: each.microseconds).family == "global"
    assert after[0].family == "l2"
    assert after[0].runners[0].loses["gap"] == 3.0


def test_terms_of_many_kernels_choose_among_them() -> None:
    """A family's tiles are compared as arrays."""
    narrow = with_term(lambda kernel, shape, spec: 0.0 if kernel is None else kernel.rows)
    (best,) = ranked("G1:M=512", only=("registers",), rates=narrow)
    assert best.tiles["rows"] == best.terms["gap"] == 64


def gap(kernel: Any, shape: Any, spec: Any) -> Any:
    """The same function for chains and cascades."""
    assert spec == H100
    return 3.0 * (shape.separate if kernel is None else len(kernel.kernels(shape)))


def test_chains_and_cascades_count_launches_alike() -> None:
    """A merge in a second kernel is a launch; of not fusing each pass is one."""
    rates = with_term(gap)
    runners = plan_cascade(DECODE, rates=rates).runners
    added = {each.family: each.loses.get("gap") for each in runners}
    assert added["tiles: states in global memory"] == 3.0
    for shape in (SOFTMAX, NORM_GEMM):
        every = {each.family: each.terms["gap"] for each in ranked_cascade(shape, rates=rates)}
        (eager,) = (every.pop("eager"),)
        assert set(every.values()) == {3.0}
        assert eager == 3.0 * len(shape.passes)
    chain = {each.family: each.terms["gap"] for each in ranked("G6:M=128", rates=rates)}
    assert chain == {"registers": 3.0, "dsm": 3.0, "l2": 3.0, "global": 6.0, "eager": 9.0}


def test_terms_choose_among_tiles_of_cascades_and_are_printed() -> None:
    """Clusters that a user's other work has no room for."""

    def crowded(kernel: Any, shape: Any, spec: Any) -> float:
        return 10.0 if kernel is None else 2.0 * (kernel.tiles.cluster - 1)

    rates = with_term(crowded)
    only = ("tiles", "eager")
    assert plan_cascade(DECODE, only=only).tiles["cluster"] == 8
    found = plan_cascade(DECODE, only=only, rates=rates)
    assert found.tiles["cluster"] == 4
    assert found.terms["gap"] == 6.0
    assert found.microseconds == pytest.approx(sum(found.terms.values()))
    text = explain_plan(found, rates=rates).text()
    assert " gap             6.00    21 %" in text
    assert "do not fuse                    39.34   kernels +15.55, gap +4.00," in text
    assert told(found.terms)[-1] == "gap"


def test_rows_before_a_product_have_the_term_once() -> None:
    """Of arrays and of one; chunks of rows slow the product down, and nothing of the user's."""
    product = NORM_GEMM.product
    assert product is not None
    chain = chain_of(parse("gemm:M=2048,K=4096,N=12288,dtype=bfloat16,weights=nk"))
    many = replace(product, chain=chain, rows=replace(product.rows, rows=2048), chunk=512)
    shape = replace(NORM_GEMM, product=many)

    def chunks(kernel: Any, *_: Any) -> Any:
        return 1000.0 * (kernel.tiles.chunk == 0) + kernel.tiles.rows

    assert plan_cascade(shape, only=(ROWS,)).tiles["chunk"] == 0
    found = plan_cascade(shape, only=(ROWS,), rates=with_term(chunks))
    assert found.tiles["chunk"] == 512
    assert found.terms["gap"] == found.tiles["rows"] == 128
    plain = CASCADE_FAMILIES[ROWS](shape).estimate(RowsTiles(**found.tiles), H100, rates_of(H100))
    assert found.microseconds == pytest.approx(float(plain.microseconds) + 128)


@pytest.mark.parametrize("name", ["hbm", "learned", "exponentials"])
def test_names_of_the_estimate_are_refused(name: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        OwnTerm(name, lambda kernel, shape, spec: 0.0)
    assert str(caught.value) == (
        f"own-term: term '{name}': found the name of a term of the estimate; limit: a name of its "
        "own, since both are added. Instead: take another name; to change the estimate's own term, "
        "change its rates."
    )
