"""Inverses of quasi-affine maps against all iterations of small boxes."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from crossfuse.autodiff.inverse import Inverse, invert, solutions
from crossfuse.autodiff.quasi_affine import (
    Sum,
    Symbol,
    constant,
    quotient,
    remainder,
    variable,
)


def box(*extents: int) -> tuple[list[Symbol], list[Sum]]:
    symbols = [Symbol("abcdefgh"[at], extent) for at, extent in enumerate(extents)]
    return symbols, [variable(each) for each in symbols]


def points(symbols: list[Symbol]) -> list[dict[str, int]]:
    every = product(*(range(each.extent) for each in symbols))
    return [dict(zip([each.name for each in symbols], each, strict=True)) for each in every]


def inverted(indices: list[Sum], domain: list[Symbol], shape: tuple[int, ...]) -> Inverse:
    """The inverse, after comparing the iterations that it gives with all there are."""
    places = [Symbol(f"y{at}", extent) for at, extent in enumerate(shape)]
    found = invert(indices, domain, places)
    reach: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for each in points(domain):
        element = tuple(index.value(each) for index in indices)
        reach.setdefault(element, []).append(tuple(each.values()))
    for element in points(places):
        got = []
        for free in points(list(found.axes)):
            known = {**element, **free}
            if all(each.holds(known) for each in found.conditions):
                got.append(tuple(found.values[each.name].value(known) for each in domain))
        assert sorted(got) == sorted(reach.get(tuple(element.values()), []))
    return found


def cost(found: Inverse) -> int:
    return prod(each.extent for each in found.axes)


def texts(found: Inverse) -> list[str]:
    return [str(each) for each in found.conditions]


def test_a_permutation_needs_no_axis_and_no_condition() -> None:
    domain, (a, b) = box(3, 5)
    found = inverted([b, a], domain, (5, 3))
    assert (found.axes, found.conditions) == ((), ())


def test_what_an_element_does_not_name_is_an_axis() -> None:
    domain, (a, *_) = box(3, 5)
    found = inverted([a], domain, (3,))
    assert [each.extent for each in found.axes] == [5]


def test_a_stride_is_a_divisibility() -> None:
    domain, (a,) = box(4)
    found = inverted([a * 3 + constant(1)], domain, (12,))
    assert found.axes == ()
    assert texts(found) == ["(y0 + 2)%3 == 0", "(y0 + 2)//3 - 1 >= 0"]


def test_strides_and_dilation_share_a_lattice() -> None:
    """Of ``2*a + 3*b`` every third a belongs to an element, and no other is looked at."""
    domain, (a, b) = box(6, 5)
    found = inverted([a * 2 + b * 3], domain, (23,))
    assert [each.extent for each in found.axes] == [2]
    assert not any("%3 ==" in each for each in texts(found))


def test_digits_are_read_off() -> None:
    """Depth to space: the indices of blocks and channels follow from the element."""
    domain, (n, c, h, w) = box(2, 3, 4, 6)
    channel = (remainder(h, 2) * 2 + remainder(w, 2)) * 3 + c
    found = inverted([n, channel, quotient(h, 2), quotient(w, 2)], domain, (2, 12, 2, 3))
    assert (found.axes, found.conditions) == ((), ())


def test_a_reshape_is_a_bijection() -> None:
    domain, (a, b, c) = box(3, 4, 5)
    flat = (a * 4 + b) * 5 + c
    found = inverted([quotient(flat, 6), remainder(flat, 6)], domain, (10, 6))
    assert cost(found) <= 6


def test_a_flat_index_is_read_off() -> None:
    domain, (a, b, c) = box(3, 4, 5)
    found = inverted([(a * 4 + b) * 5 + c], domain, (60,))
    assert (found.axes, found.conditions) == ((), ())


def test_halves_are_pairs() -> None:
    """The running example of NeoFlow: ``q//2`` leaves its remainder free."""
    domain, (p, q, r, s) = box(4, 6, 3, 2)
    found = inverted([p * 2 + r * 3, quotient(q, 2) + s], domain, (13, 4))
    assert sorted(each.extent for each in found.axes) == [2, 2, 2]


def test_windows_of_images_enumerate_the_window_alone() -> None:
    """Pixels of windows as a matrix: the same rows divided in three ways."""
    height, width, k, channels = 4, 3, 3, 2
    domain, (p, q) = box(2 * height * width, channels * k * k)
    y = remainder(quotient(p, width), height) + quotient(q, channels * k) - constant(1)
    x = remainder(p, width) + remainder(quotient(q, channels), k) - constant(1)
    batch, channel = quotient(p, height * width), remainder(q, channels)
    found = inverted([batch, y, x, channel], domain, (2, height, width, channels))
    assert cost(found) == k * k


def test_a_diagonal_is_a_condition() -> None:
    domain, (a,) = box(4)
    found = inverted([a, a], domain, (4, 4))
    assert texts(found) == ["-1*y0 + y1 == 0"] or texts(found) == ["y0 - y1 == 0"]


def test_sum_and_difference_are_solved() -> None:
    domain, (a, b) = box(4, 5)
    found = inverted([a + b, a - b + constant(4)], domain, (8, 8))
    assert found.axes == ()


def test_an_element_that_nothing_reaches_has_a_false_condition() -> None:
    domain, (a,) = box(4)
    found = inverted([a * 0 + constant(2)], domain, (2,))
    assert not any(each.holds({"y0": y}) for y in range(2) for each in found.conditions)


def test_solutions_of_a_system() -> None:
    known = [constant(7), constant(3)]
    lattice = solutions([[2, 3, 0], [0, 1, 5]], known)
    origin = [each.constant for each in lattice.origin]
    (vector,) = lattice.basis
    for times in range(-3, 4):
        x = [a + times * b for a, b in zip(origin, vector, strict=True)]
        assert (2 * x[0] + 3 * x[1], x[1] + 5 * x[2]) == (7, 3)
    assert sorted(map(abs, vector)) == [2, 10, 15]


# Random maps.


@st.composite
def sums(draw: st.DrawFn, domain: list[Symbol]) -> Sum:
    """Sums with strides, quotients and remainders, two deep."""

    def linear(atoms: list[Sum]) -> Sum:
        found = constant(draw(st.integers(-3, 3)))
        for each in atoms:
            if draw(st.booleans()):
                found += each * draw(st.sampled_from([1, 1, 1, 2, 3, 4, 6, -1, -2]))
        return found

    atoms = [variable(each) for each in domain]
    for _ in range(draw(st.integers(0, 2))):
        made = draw(st.sampled_from([quotient, remainder]))
        atoms.append(made(linear(atoms), draw(st.integers(2, 5))))
    return linear(atoms)


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[Sum], list[Symbol], tuple[int, ...]]:
    domain, _ = box(*draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    indices = [draw(sums(domain)) for _ in range(draw(st.integers(1, 3)))]
    return indices, domain, tuple(draw(st.integers(1, 7)) for _ in indices)


@settings(max_examples=settings.default.max_examples * 4)
@given(maps())
def test_any_map(drawn: tuple[list[Sum], list[Symbol], tuple[int, ...]]) -> None:
    inverted(*drawn)


@given(st.data(), st.integers(1, 12))
def test_simplest_forms_keep_values(data: st.DataObject, divisor: int) -> None:
    domain, _ = box(*data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    number = data.draw(sums(domain))
    over, left = quotient(number, divisor), remainder(number, divisor)
    for each in points(domain):
        value = number.value(each)
        assert (over.value(each), left.value(each)) == divmod(value, divisor)
        for any_sum in (number, over, left):
            least, most = any_sum.bounds
            assert least <= any_sum.value(each) <= most
        assert left != constant(0) or value % divisor == 0
