"""Cost terms that users add: every family has them, not fusing too, and plans follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.cost.own import OwnTerm
from crossfuse.planner.cost.rates import Rates, rates_of
from crossfuse.planner.cost.terms import told
from crossfuse.planner.plan import ranked

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
    assert next(iter(after[0].runners[0].loses)) == "gap"


def test_terms_of_many_kernels_choose_among_them() -> None:
    """A family's tiles are compared as arrays."""
    narrow = with_term(lambda kernel, shape, spec: 0.0 if kernel is None else kernel.rows)
    (best,) = ranked("G1:M=512", only=("registers",), rates=narrow)
    assert best.tiles["rows"] == best.terms["gap"] == 64


@pytest.mark.parametrize("name", ["hbm", "learned", "exponentials"])
def test_names_of_the_estimate_are_refused(name: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        OwnTerm(name, lambda kernel, shape, spec: 0.0)
    assert str(caught.value) == (
        f"own-term: term '{name}': found the name of a term of the estimate; limit: a name of its "
        "own, since both are added. Instead: take another name; to change the estimate's own term, "
        "change its rates."
    )
