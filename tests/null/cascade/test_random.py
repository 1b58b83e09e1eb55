"""Random cascades stream as two passes do, or are refused."""

from __future__ import annotations

import numpy as np
import sympy
from hypothesis import assume, event, given
from hypothesis import strategies as st

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.run import merge_tree, stream, two_pass
from crossfuse.cascade.spec import LOGADDEXP, MAX, MIN, PROD, SUM, Cascade, Monoid, Stage
from crossfuse.errors import CascadeRefused

X, Y = sympy.symbols("x y", real=True)
WEIGHT = sympy.Symbol("weight", positive=True)
PLACE = sympy.Symbol("place", integer=True, nonnegative=True)
LENGTH = sympy.Symbol("length", integer=True, positive=True)

OF_ELEMENTS = (
    X,
    Y,
    X * Y,
    X**2,
    WEIGHT * X,
    sympy.Abs(X),
    sympy.exp(X),
    sympy.exp(Y) * WEIGHT,
    sympy.Max(X, 0),
    sympy.Piecewise((X, PLACE < 3), (0, True)),
    sympy.Piecewise((sympy.exp(X), Y < 0), (0, True)),
)


def of_results(result: sympy.Symbol) -> tuple[sympy.Expr, ...]:
    return (
        result,
        result**2,
        1 / (1 + result**2),
        1 / sympy.sqrt(1 + result**2),
        sympy.Abs(result),
        sympy.exp(-sympy.Abs(result)),
        sympy.Max(result, 0),
        result / LENGTH,
    )


def of_both(element: sympy.Expr, result: sympy.Symbol) -> tuple[sympy.Expr, ...]:
    return (
        element - result,
        element - result / LENGTH,
        (element - result / LENGTH) ** 2,
        (element - result / LENGTH) ** 3 * WEIGHT,
        sympy.Abs(element * result),
        sympy.exp(element - result),
        sympy.Abs(element - result),  # refused, as are the next two
        sympy.exp(element * result),
        sympy.Max(element - result, 0),
    )


@st.composite
def terms(draw: st.DrawFn, results: list[sympy.Symbol]) -> sympy.Expr:
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        part = draw(st.sampled_from(OF_ELEMENTS))
        if results and draw(st.booleans()):
            part = part * draw(st.sampled_from(of_results(draw(st.sampled_from(results)))))
        if results and draw(st.booleans()):
            part = draw(st.sampled_from(of_both(X, draw(st.sampled_from(results)))))
        parts.append(part)
    return sympy.Add(*parts)


@st.composite
def cascades(draw: st.DrawFn) -> Cascade:
    stages: list[Stage] = []
    monoids: list[Monoid] = [SUM, SUM, SUM, MAX, MIN, PROD, LOGADDEXP]
    for number in range(draw(st.integers(2, 4))):
        term = draw(terms([each.symbol for each in stages]))
        stages.append(Stage(f"d{number}", draw(st.sampled_from(monoids)), term))
    elements, fixed = (X, Y, WEIGHT, PLACE), (LENGTH,)
    return Cascade(tuple(stages), elements, fixed, index=PLACE, length=LENGTH)


@given(cascades(), st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_streams_or_is_refused(cascade: Cascade, seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    data = {
        "x": rng.uniform(-2, 2, (3, length)),
        "y": rng.uniform(-2, 2, (3, length)),
        "weight": rng.uniform(0.5, 2, (3, length)),
    }
    try:
        derivation = derive(cascade)
    except CascadeRefused as found:
        event("refused")
        rules = ("separable", "sign", "form", "cancels", "range")
        assert found.refusal.rule in [f"cascade-{each}" for each in rules]
        assert found.refusal.where in {f"stage {each.name}" for each in cascade.stages}
        return
    event("streams")
    wanted = two_pass(cascade, data)
    # Beyond that, exponentials of sums overflow, and powers of large numbers cancel.
    assume(all(np.isfinite(each).all() and np.abs(each).max() < 1e4 for each in wanted.values()))
    third = length // 3
    for found in (
        stream(derivation, data, 1),
        stream(derivation, data, 4),
        merge_tree(derivation, data, [third, 0, length - third], tile=2),
    ):
        for name, array in wanted.items():
            scale = max(1.0, max(float(np.abs(each).max()) for each in wanted.values()))
            np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7 * scale)
