"""Moments about means: no cancellation in float32, whatever the offset, weights and order."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import sympy

import cascade_patterns
from cascade_patterns.stages import cascade, total
from cascade_patterns.symbols import M, N, S, mass, q
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.run import merge_tree, stream
from crossfuse.cascade.spec import Cascade, Stage
from crossfuse.errors import CascadeRefused

LENGTH = 50_000
X, Y, V = sympy.symbols("x y v", real=True)
#: Weights that are no polynomials.
P, Q = 1 / (1 + sympy.exp(-Y)), 1 / (1 + sympy.exp(-V))


def named(name: str) -> Cascade:
    return cascade_patterns.named(name).cascade


def ways(one: Cascade, data: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    derivation = derive(one)
    uneven = [LENGTH // 5, 0, LENGTH // 2, LENGTH - LENGTH // 5 - LENGTH // 2]
    return [
        stream(derivation, data, 256),
        stream(derivation, data, 4096),
        stream(derivation, data, LENGTH),
        merge_tree(derivation, data, uneven, tile=1024),
    ]


def drawn(seed: int, offset: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (offset + rng.normal(size=(3, LENGTH))).astype(np.float32)


def test_variance_of_large_numbers() -> None:
    x = drawn(0, 1e4)
    for found in ways(named("variance"), {"x": x}):
        assert found["out"].dtype == np.float32
        np.testing.assert_allclose(found["out"], x.astype(float).var(axis=1), rtol=5e-6)
        np.testing.assert_allclose(found["mean"], x.astype(float).mean(axis=1), rtol=1e-6)


def test_expanded_squares_are_squares_of_distances() -> None:
    """The same stage with its square multiplied out becomes the same state."""
    one = named("variance")
    last = one.stages[-1]
    expanded = Stage(last.name, last.monoid, sympy.expand(last.term))
    other = Cascade((one.stages[0], expanded), one.elements, one.invariants, one.results)
    other = Cascade(other.stages, one.elements, one.invariants, one.results, {}, None, one.length)
    assert derive(other).slots == derive(one).slots


def test_weighted_variance() -> None:
    x, weight = drawn(1, 1e4), np.abs(drawn(2, 0.0))
    one = partial(np.average, weights=weight.astype(float), axis=1, keepdims=True)
    mean = one(x.astype(float))
    for found in ways(named("weighted variance"), {"x": x, "weight": weight}):
        np.testing.assert_allclose(found["out"], one((x - mean) ** 2)[:, 0], rtol=5e-6)


def test_softmax_weighted_variance() -> None:
    x, v = drawn(3, 0.0), drawn(4, 1e4)
    weight = np.exp(x.astype(float))
    one = partial(np.average, weights=weight, axis=1, keepdims=True)
    due = one((v - one(v.astype(float))) ** 2)[:, 0]
    for found in ways(named("softmax-weighted variance"), {"x": x, "v": v}):
        np.testing.assert_allclose(found["out"], due, rtol=1e-5)


def test_covariance_and_correlation() -> None:
    x, y = drawn(5, 1e4), drawn(6, -1e4)
    y = (y + 0.5 * (x - 1e4)).astype(np.float32)
    for row, found in enumerate(ways(named("covariance"), {"x": x, "y": y})[:3]):
        due = np.cov(x[row].astype(float), y[row].astype(float), bias=True)[0, 1]
        np.testing.assert_allclose(found["out"][row], due, rtol=1e-3)
    for found in ways(named("Pearson correlation"), {"x": x, "y": y}):
        due = [
            np.corrcoef(a.astype(float), b.astype(float))[0, 1] for a, b in zip(x, y, strict=True)
        ]
        np.testing.assert_allclose(found["o"], due, rtol=1e-3)


@pytest.mark.parametrize(("name", "power"), [("skewness", 3), ("kurtosis", 4)])
def test_higher_moments(name: str, power: int) -> None:
    x = (1e3 + np.random.default_rng(7).exponential(size=(3, LENGTH))).astype(np.float32)
    wide = x.astype(float)
    centred = wide - wide.mean(axis=1, keepdims=True)
    due = (centred**power).mean(axis=1) / centred.std(axis=1) ** power
    for found in ways(named(name), {"x": x}):
        np.testing.assert_allclose(found["out"], due, rtol=2e-3)


@pytest.mark.parametrize("proved", [True, False])
def test_inertia_far_from_the_origin(proved: bool) -> None:
    """With masses of which nothing is known, distances are from the mean of all points."""
    one = named("moment of inertia")
    if not proved:
        known = {mass: sympy.Symbol("mass", real=True)}
        stages = tuple(Stage(e.name, e.monoid, e.term.xreplace(known)) for e in one.stages)
        elements = tuple(each.xreplace(known) for each in one.elements)
        one = Cascade(stages, elements, one.invariants, one.results)
    data = {each: drawn(n, 1e3) for n, each in enumerate(("px", "py", "pz"))}
    data["mass"] = np.abs(drawn(9, 2.0))
    weight = data["mass"].astype(float)
    centre = partial(np.average, weights=weight, axis=1, keepdims=True)
    places = [data[each].astype(float) for each in ("px", "py", "pz")]
    due = sum((weight * (each - centre(each)) ** 2).sum(axis=1) for each in places)
    for found in ways(one, data):
        np.testing.assert_allclose(found["o"], due, rtol=1e-4)


def test_weights_that_cancel_on_the_way() -> None:
    """Sums of weights that cross 0 are no divisors before the end."""
    weight = sympy.Symbol("weight", real=True)
    known = {sympy.Symbol("weight", positive=True): weight}
    one = named("weighted variance")
    stages = tuple(Stage(e.name, e.monoid, e.term.xreplace(known)) for e in one.stages)
    derivation = derive(Cascade(stages, (one.elements[0], weight), (), one.results))
    data = {"x": np.array([[1.0, 4.0, 2.0, 8.0]]), "weight": np.array([[1.0, -1.0, 2.0, 3.0]])}
    mean = (data["x"] * data["weight"]).sum() / 5
    due = (data["weight"] * (data["x"] - mean) ** 2).sum() / 5
    np.testing.assert_allclose(stream(derivation, data, 1)["out"], due, rtol=1e-12)
    np.testing.assert_allclose(merge_tree(derivation, data, [2, 2])["out"], due, rtol=1e-12)


@pytest.mark.parametrize("weight", [P * Q, 1 - P, (1 - P) * (1 - Q)])
def test_weights_are_not_multiplied_out(weight: sympy.Expr) -> None:
    """Else exponentials that are out of range are divided, or multiplied by 0."""
    parts = (total(weight, "q"), total(weight * X, "S"), total(weight * (X - S / q) ** 2, "M"))
    one = cascade(parts, {"out": M / q})
    data = {"x": drawn(10, 1e4), "y": drawn(11, 0.0), "v": drawn(12, 0.0)}
    data["y"][1, ::7], data["v"][1, ::7] = 200, -100
    with np.errstate(over="ignore"):
        wide = [data[each].astype(float) for each in ("y", "v")]
        weights = np.broadcast_to(sympy.lambdify((Y, V), weight, "numpy")(*wide), (3, LENGTH))
    mean = np.average(data["x"].astype(float), weights=weights, axis=1)[:, None]
    due = np.average((data["x"] - mean) ** 2, weights=weights, axis=1)
    for found in ways(one, data):
        np.testing.assert_allclose(found["out"], due, rtol=5e-5)


@pytest.mark.parametrize("other", [X - S / N, X])
def test_choices_among_polynomials_are_refused(other: sympy.Expr) -> None:
    square = (X - S / N) ** 2
    choice = sympy.Piecewise((square, Y > 0), (other, True))
    with pytest.raises(CascadeRefused, match="a choice among distances") as caught:
        derive(cascade((total(X, "S"), total(choice, "M"))))
    assert (caught.value.refusal.rule, caught.value.refusal.where) == ("cascade-form", "stage M")
    assert "sum each case in a stage of its own, with 0 elsewhere" in caught.value.refusal.instead
    apart = total(sympy.Piecewise((square, Y > 0), (0, True)), "M")
    assert derive(cascade((total(X, "S"), apart))).slots
