"""Statements of a step and of a merge, and exponentials to the base of two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import Fence, unopened
from crossfuse.cascade.rewrite.phases import moderate
from crossfuse.cascade.rewrite.tiled.skipping import limited
from crossfuse.cascade.rewrite.tiled.steps import (
    LOG2E,
    Carry,
    Combine,
    Factor,
    Guard,
    Keep,
    Multiply,
    Reduce,
    Tile,
    base_two,
    merge_steps,
    steps,
)
from crossfuse.cascade.spec import (
    MAX,
    SUM,
    Cascade,
    Slot,
    Stage,
    guarded,
    left,
    new,
    old,
    right,
    value,
)
from crossfuse.errors import CascadeRefused

x, v, w, a = sympy.symbols("x v w a", real=True)
key = sympy.Symbol("key", integer=True, nonnegative=True)
M, S, OUT = (sympy.Symbol(name, real=True) for name in "mso")
SCALE = sympy.Rational(1, 8)
ATTENTION = Cascade(
    (
        Stage("m", MAX, x * SCALE),
        Stage("s", SUM, sympy.exp(x * SCALE - M)),
        Stage("o", SUM, sympy.exp(x * SCALE - M) * v),
    ),
    (x, v),
    results={"out": OUT / S, "lse": M + sympy.log(S)},
)


def test_attention_step_by_step() -> None:
    slots = base_two(derive(ATTENTION)).slots
    found = steps(slots, frozenset({v}))
    kinds = [(type(each), getattr(each, "slot", None) and each.slot.name) for each in found]
    assert kinds == [
        (Keep, "m"),
        (Reduce, "m"),
        (Guard, "m"),
        (Factor, None),
        (Tile, None),
        (Carry, "s"),
        (Reduce, "s"),
        (Carry, "o"),
        (Multiply, "o"),
    ]
    factor, tile = found[3], found[4]
    assert factor.expression == 2 ** (old("m") - guarded("m"))
    assert tile.expression == 2 ** (LOG2E * SCALE * x - guarded("m"))
    assert found[6].expression == tile.symbol
    assert (found[8].left, found[8].right) == (tile.symbol, v)


def test_the_maximum_is_kept_times_log2_of_e() -> None:
    plain = derive(ATTENTION)
    made = base_two(plain)
    assert made.slot("m").contribution == LOG2E * SCALE * x
    assert made.slot("m").merge == plain.slot("m").merge
    assert not any(each.contribution.has(sympy.exp) for each in made.slots)
    names = {symbol.name: symbol for symbol in made.results["lse"].free_symbols}
    at = {names[name]: number for name, number in (("m", 3.0), ("m~", 3.0)) if name in names}
    at |= {names[name]: number for name, number in (("s", 2.0), ("s~", 2.0)) if name in names}
    assert float(made.results["lse"].subs(at)) == pytest.approx(
        3.0 / float(LOG2E) + float(sympy.log(2))
    )


def test_infinities_stay() -> None:
    masked = sympy.Piecewise((x * SCALE, key < 4), (-sympy.oo, True))
    cascade = Cascade((Stage("m", MAX, masked), Stage("s", SUM, sympy.exp(masked - M))), (x, key))
    made = base_two(derive(cascade)).slot("m")
    assert made.contribution.args[1][0] == -sympy.oo
    assert made.guard is not None
    assert made.guard.args[0] == (0, sympy.Eq(new("m"), -sympy.oo, evaluate=False))


def test_a_merge_shares_its_factors() -> None:
    found = merge_steps(base_two(derive(ATTENTION)).slots)
    assert [type(each) for each in found] == [Keep, Combine, Guard, *[Factor] * 2, *[Combine] * 2]
    factors = {each.expression: each.symbol for each in found if isinstance(each, Factor)}
    own = factors[2 ** (old("m") - guarded("m"))]
    other = factors[2 ** (right("m") - guarded("m"))]
    assert found[-1].expression == left("o") * own + right("o") * other


def test_elements_beyond_the_axis_bring_nothing() -> None:
    slots = limited(base_two(derive(ATTENTION)).slots, key < 5, [x, v])
    masked = slots[0].contribution
    assert masked == sympy.Piecewise((LOG2E * SCALE * x, key < 5), (-sympy.oo, True))
    assert slots[1].contribution == 2 ** (masked - guarded("m"))


def test_masks_go_into_sums() -> None:
    """``exp(x + b - m)``: the masked element is the same as that of the maximum."""
    b = sympy.Symbol("b", real=True)
    biased = Cascade((Stage("m", MAX, x + b), Stage("s", SUM, sympy.exp(x + b - M))), (x, b))
    first, second = limited(base_two(derive(biased)).slots, key < 5, [x])
    assert isinstance(first.contribution, sympy.Piecewise)
    assert second.contribution == 2 ** unopened(LOG2E, first.contribution - guarded("m"))


@pytest.mark.parametrize(
    ("bias", "scaled"), [(w, False), (-w, False), (3 * w, True), (0 * w, True), (0 * w - 5, True)]
)
def test_a_factor_that_nothing_takes_in_stands_behind_the_difference(
    bias: sympy.Expr, scaled: bool
) -> None:
    """A mask that is the least number of its type is none times log2(e)."""
    element = x * SCALE + bias
    stages = (Stage("m", MAX, element), Stage("s", SUM, sympy.exp(element - M)))
    plain = derive(Cascade(stages, (x, w), results={"lse": M + sympy.log(S)}))
    made = base_two(plain)
    assert (made.slot("m") != plain.slot("m")) == scaled
    (power,) = made.slot("s").contribution.atoms(sympy.Pow)
    at = {x: 3.0, w: -1.5, guarded("m"): 0.25 * (float(LOG2E) if scaled else 1)}
    found = power.replace(Fence, lambda inner: inner).xreplace(at)
    due = sympy.exp(element - M).xreplace({x: 3.0, w: -1.5, M: 0.25})
    assert float(found) == pytest.approx(float(due))
    assert {value("s"), new("s"), guarded("s")} <= moderate(made.slots)


def test_zeros_need_no_mask() -> None:
    norm = Cascade(
        (
            Stage("q", SUM, x**2),
            Stage("y", SUM, x * w / sympy.sqrt(sympy.Symbol("q", real=True) + 1)),
        ),
        (x, w),
        results={"out": sympy.Symbol("y", real=True)},
    )
    slots = derive(norm).slots
    assert limited(slots, key < 5, [x, w]) == slots


def slot(contribution: sympy.Expr, monoid: object = SUM) -> Slot:
    return Slot("y", monoid, contribution, value("y"), left("y") + right("y"), sympy.S.Zero)


@pytest.mark.parametrize("contribution", [x * w**2, x + w, sympy.Max(x * w, 0), x * w * v])
def test_columns_without_a_product_are_refused(contribution: sympy.Expr) -> None:
    with pytest.raises(CascadeRefused, match="cascade-tiles: slot y: found a contribution"):
        steps([slot(contribution)], frozenset({w, v}))


def test_reductions_of_columns_other_than_sums_are_refused() -> None:
    with pytest.raises(CascadeRefused, match="slot y: found a max for each column"):
        steps([replace(slot(x * w), monoid=MAX)], frozenset({w}))


def test_values_before_a_step_are_kept() -> None:
    """A mean that moves is needed as it was by what its elements bring."""
    count = Slot("n", SUM, sympy.S.One, value("n"), None, sympy.S.Zero)
    mean = Slot("u", SUM, (x - value("u")) / new("n"), value("u"), None, sympy.S.Zero)
    found = steps([count, mean], frozenset())
    assert [type(each) for each in found] == [Reduce, Keep, Reduce]
    assert found[-1].expression == (x - old("u")) / new("n")
