"""Means in float32 wherever numbers lie: at most twice the error that two passes make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy

from cascade_patterns import named
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.run import merge_tree, stream, two_pass
from crossfuse.cascade.spec import Cascade, left, right, value

NAMES = (
    "variance",
    "layer norm tensor",
    "weighted variance",
    "masked variance",
    "softmax-weighted variance",
    "moment of inertia",
)
#: What rows are averaged of; each kind has three rows.
KINDS = (
    "about 0",
    "about 1e4",
    "about 1e6",
    "constant",
    "a large constant",
    "some are large",
    "the first is large",
    "two levels",
    "a ramp",
)
#: Segments of a row, as threads have them, and elements that each takes in at a time.
SEGMENTS, TILE = 64, 32
EPSILON = float(np.finfo(np.float32).eps)


def row(kind: str, rng: np.random.Generator, length: int) -> np.ndarray:
    drawn, places = rng.standard_normal(length), np.arange(length)
    return {
        "about 0": drawn,
        "about 1e4": drawn + 1e4,
        "about 1e6": drawn + 1e6,
        "constant": np.full(length, 12345.678),
        "a large constant": np.full(length, 1234567.8),
        "some are large": np.where(rng.random(length) < 0.01, 1e6 * drawn, drawn),
        "the first is large": np.where(places == 0, 1e6, drawn),
        "two levels": np.where(2 * places < length, drawn, drawn + 1e4),
        "a ramp": np.linspace(0, 1e5, length) + drawn,
    }[kind]


def drawn(name: str, length: int) -> dict[str, np.ndarray]:
    """Elements of a pattern: what is averaged, weights, and others."""
    rng = np.random.default_rng(length)
    cascade = named(name).cascade
    averaged = ("v",) if name.startswith("softmax") else ("x", "px", "py", "pz")
    data = {}
    for each in (*cascade.elements, *cascade.invariants):
        if each.name in averaged:
            rows = [row(kind, rng, length) for kind in KINDS for _ in range(3)]
            data[each.name] = np.array(rows, np.float32)
        elif each in cascade.elements and each != cascade.index:
            shape = (3 * len(KINDS), length)
            found = rng.uniform(0.5, 2, shape) if each.is_positive else rng.normal(size=shape)
            data[each.name] = found.astype(np.float32)
        elif each.name == "i":
            data["i"] = np.full(3 * len(KINDS), length * 2 // 3, np.float32)
    return data


def segments(length: int) -> list[int]:
    each, more = divmod(length, SEGMENTS)
    return [each + (number < more) for number in range(SEGMENTS)]


def begun(cascade: Cascade) -> Cascade:
    """The same, whose means begin at the first element of a row."""
    elements = [each for each in cascade.elements if each != cascade.index]
    firsts = {each: sympy.Symbol(f"{each.name}_first", real=True) for each in elements}
    return replace(cascade, firsts=firsts)


@pytest.mark.parametrize("length", [1, 5, 1000])
@pytest.mark.parametrize("name", ["variance", "layer norm tensor"])
def test_means_that_begin_at_the_first_element(name: str, length: int) -> None:
    """As exact as others; and of equal elements no distance from the mean is anything but 0."""
    cascade, data = begun(named(name).cascade), drawn(name, length)
    exact = two_pass(cascade, {each: array.astype(np.float64) for each, array in data.items()})
    separate = two_pass(cascade, data)
    for found in (
        merge_tree(derive(cascade), data, segments(length), tile=TILE),
        stream(derive(cascade), data, TILE),
    ):
        for each in (*cascade.results, *cascade.rows):
            for number, kind in enumerate(KINDS):
                rows = slice(3 * number, 3 * number + 3)
                wanted = exact[each][rows]
                allowed = 2 * np.abs(separate[each][rows] - wanted).max()
                allowed += 8 * EPSILON * np.abs(wanted).max()
                assert np.abs(found[each][rows] - wanted).max() <= allowed, (each, kind)
    equal = np.outer([0.1, 1e4 + 0.1, 1e26, 3e38, 1e-41], np.ones(length)).astype(np.float32)
    given = {"x": equal} | {each: data[each][:5] for each in data if each != "x"}
    if name == "variance":
        assert (merge_tree(derive(cascade), given, segments(length), tile=3)["out"] == 0).all()


@pytest.mark.parametrize("length", [1, 5, 77, 1000, 8192])
@pytest.mark.parametrize("name", NAMES)
def test_twice_the_error_of_two_passes(name: str, length: int) -> None:
    cascade = named(name).cascade
    data = drawn(name, length)
    exact = two_pass(cascade, {each: array.astype(np.float64) for each, array in data.items()})
    separate = two_pass(cascade, data)
    found = merge_tree(derive(cascade), data, segments(length), tile=TILE)
    for each in (*cascade.results, *cascade.rows):
        assert found[each].dtype == np.float32
        for number, kind in enumerate(KINDS):
            rows = slice(3 * number, 3 * number + 3)
            wanted = exact[each][rows]
            allowed = 2 * np.abs(separate[each][rows] - wanted).max()
            allowed += 4 * EPSILON * np.abs(wanted).max()
            assert np.abs(found[each][rows] - wanted).max() <= allowed, (each, kind)


@pytest.mark.parametrize("name", [each for each in NAMES if each != "layer norm tensor"])
def test_sums_of_squares_are_never_negative(name: str) -> None:
    """Where all elements are equal rounding alone decides: in any order, and unmerged too."""
    cascade = named(name).cascade
    data, derivation = drawn(name, 1000), derive(cascade)
    result = next(iter(cascade.results))
    for found in (
        stream(derivation, data, 64),
        stream(derivation, data, 1000),
        merge_tree(derivation, data, segments(1000), tile=TILE),
        merge_tree(derivation, data, [0, 1, 999, 0], tile=100),
    ):
        assert (found[result] >= 0).all()


def test_long_rows() -> None:
    """A million elements of one row, in segments of 4096 and 16384."""
    cascade = named("variance").cascade
    x = np.random.default_rng(0).standard_normal((2, 2**20)) + np.array([[1e4], [1e6]])
    data = {"x": x.astype(np.float32)}
    wanted = data["x"].astype(np.float64)
    variance, mean = wanted.var(axis=1), wanted.mean(axis=1)
    separate = two_pass(cascade, data)
    for parts in (256, 64):
        found = merge_tree(derive(cascade), data, [2**20 // parts] * parts, tile=256)
        error = np.abs(found["out"] - variance)
        assert (error <= 2 * np.abs(separate["out"] - variance) + 4 * EPSILON).all()
        np.testing.assert_allclose(found["mean"], mean, rtol=EPSILON)


def test_without_what_rounding_leaves_the_rule_is_broken() -> None:
    """The twin: moments that forget their mean's rest."""
    cascade = named("variance").cascade
    derivation = derive(cascade)
    forgotten = {side("S_mean_rest"): sympy.S.Zero for side in (value, left, right)}
    slots = tuple(
        replace(each, carry=each.carry.xreplace(forgotten), merge=each.merge.xreplace(forgotten))
        for each in derivation.slots
    )
    data = drawn("variance", 1000)
    wanted = data["x"].astype(np.float64).var(axis=1)
    rows = slice(3, 6)
    errors = [
        np.abs(merge_tree(each, data, segments(1000), tile=TILE)["out"] - wanted)[rows].max()
        for each in (derivation, replace(derivation, slots=slots))
    ]
    assert errors[0] < 1e-6 and errors[1] > 2e-5


@pytest.mark.parametrize("spread, about", [(1e-2, 1e4), (1.0, 1e6), (1e-6, 1.0), (0.0, 12345.678)])
@pytest.mark.parametrize("length", [5, 77, 1000])
def test_what_rounding_takes_of_a_mean_is_missing_in_no_variance(
    length: int, spread: float, about: float
) -> None:
    """Its square is some percent of a variance that two passes find; ours has all digits."""
    cascade, rng = named("variance").cascade, np.random.default_rng(length)
    data = {"x": (about + spread * rng.standard_normal((16, length))).astype(np.float32)}
    wanted = data["x"].astype(np.float64).var(axis=1)
    for found in (
        stream(derive(cascade), data, 16),
        stream(derive(cascade), data, length),
        merge_tree(derive(cascade), data, segments(length), tile=4),
    ):
        assert np.abs(found["out"] - wanted).max() <= 4 * EPSILON * wanted.max()
    if length > 5:
        separate = np.abs(two_pass(cascade, data)["out"] - wanted).max()
        assert separate > 1e-3 * wanted.max()


@pytest.mark.parametrize("name", [each for each in NAMES if each != "layer norm tensor"])
@pytest.mark.parametrize("length", [3, 96, 1000])
def test_what_is_out_of_range_is_infinite_and_no_nan(name: str, length: int) -> None:
    """The distance of 1e30 from its rounded mean has an infinite square, and so do its moves."""
    cascade, rng = named(name).cascade, np.random.default_rng(0)
    data = drawn(name, length)
    drawn_row = rng.standard_normal(length)
    kinds = [np.full(length, each) for each in (1e26, -1e30, 3.7e34, -1e35)]
    kinds += [drawn_row * each for each in (1e18, 1e30, 1e35)]
    kinds += [np.where(np.arange(length) == at, 1e30, drawn_row) for at in (0, length - 1)]
    kinds += [np.where(np.arange(length) == 1, each, drawn_row) for each in (np.inf, np.nan)]
    for each in ("x", "v", "px", "py", "pz"):
        if each in data:
            data[each][: len(kinds)] = np.array(kinds, np.float32)
    ways = (
        stream(derive(cascade), data, 16),
        stream(derive(cascade), data, length),
        merge_tree(derive(cascade), data, segments(length), tile=4),
        merge_tree(derive(cascade), data, [0, 1, length - 1, 0], tile=TILE),
    )
    separate = two_pass(cascade, data)
    result = next(iter(cascade.results))
    for found in ways:
        none, wanted = np.isnan(found[result]), np.isnan(separate[result])
        assert not (none & ~wanted).any()
        # Of what is infinite, or no number, there is no variance.
        given = slice(len(kinds) - 2, len(kinds))
        assert (none[given] == wanted[given]).all()
