"""One axis in several shapes: loops that are joined, split, reshaped, single or missing."""

from __future__ import annotations

import pytest
from tvm import te, tirx

from cpu.cascade.detect.evaluate import assert_same, names
from cpu.cascade.detect.writing import (
    drawn,
    each,
    fold,
    function,
    most,
    softmax_of,
    square,
    tensor,
)
from crossfuse.cascade.detect import detect

pytestmark = pytest.mark.cpu


def test_two_axes_in_one_block_are_one() -> None:
    x = tensor("x", 3, 4, 5)
    k = [te.reduce_axis((0, extent), f"k{extent}") for extent in (4, 5, 4, 5)]
    total = te.compute((3,), lambda i: te.sum(x(i, k[0], k[1]), axis=[k[0], k[1]]), "total")
    squares = te.compute(
        (3,),
        lambda i: te.sum(square(x(i, k[2], k[3]) - total(i) / 20.0), axis=[k[3], k[2]]),
        "squares",
    )
    y = each(
        "y",
        (3, 4, 5),
        lambda i, a, b: (x(i, a, b) - total(i) / 20.0) * tirx.rsqrt(squares(i) / 20.0),
    )
    (site,) = detect(function(x, y))
    assert names(site) == ["total", "squares"]
    assert site.extents[site.axis] == 20
    assert str(site.cascade.stage("squares").term) == "(x - total/N)**2"
    assert_same(site, drawn(x))


def test_masks_over_two_axes() -> None:
    x = tensor("x", 3, 4, 5)
    k = [te.reduce_axis((0, extent), f"k{extent}") for extent in (4, 5, 4, 5)]

    def term(i, a, b):
        return tirx.Select(a <= b, x(i, a, b), tirx.const(float("-inf"), "float32"))

    m = te.compute((3,), lambda i: te.max(term(i, k[0], k[1]), axis=[k[0], k[1]]), "m")
    s = te.compute(
        (3,), lambda i: te.sum(tirx.exp(term(i, k[2], k[3]) - m(i)), axis=[k[2], k[3]]), "s"
    )
    (site,) = detect(function(x, m, s))
    assert site.cascade.index is not None
    assert_same(site, drawn(x))


def test_reshaped_elements() -> None:
    """A maximum over a flat axis, and a sum over the same one in two indices."""
    x = tensor("x", 3, 4, 5)
    m = most("m", (3,), 20, lambda i, j: x(i, j // 5, j % 5))
    s = fold("s", (3,), 20, lambda i, j: tirx.exp(x(i, j // 5, j % 5) - m(i)))
    (site,) = detect(function(x, m, s))
    assert names(site) == ["m", "s"]
    assert_same(site, drawn(x))


def test_single_rows_and_single_elements() -> None:
    x = tensor("x", 1, 6)
    s, power = softmax_of(lambda *at: x(*at), (1,), 6)
    (site,) = detect(function(x, each("y", (1, 6), lambda i, j: power(i, j) / s(i))))
    assert names(site) == ["m", "s"]
    assert len(site.rows) == 1
    assert_same(site, drawn(x))
    x = tensor("x", 6, 1)
    s, power = softmax_of(lambda *at: x(*at), (6,), 1)
    (site,) = detect(function(x, each("y", (6, 1), lambda i, j: power(i, j) / s(i))))
    assert names(site) == ["m", "s"]
    assert site.extents[site.axis] == 1


def test_whole_tensors() -> None:
    """No row at all."""
    x = tensor("x", 9)
    a = most("a", (1,), 9, lambda _, j: tirx.abs(x(j)))
    q = fold("q", (1,), 9, lambda _, j: (x(j) / a(0)) * (x(j) / a(0)))
    (site,) = detect(function(x, each("norm", (1,), lambda i: a(i) * tirx.sqrt(q(i)))))
    assert names(site) == ["a", "q"]
    assert_same(site, drawn(x))


def test_channels_that_are_groups_and_places() -> None:
    """A group norm: outputs have channels, whose groups are rows and whose rest is reduced."""
    x = tensor("x", 2, 6, 5)
    k = [te.reduce_axis((0, extent), f"k{extent}") for extent in (3, 5)]
    total = te.compute((2, 2), lambda n, g: te.sum(x(n, g * 3 + k[0], k[1]), axis=k), "total")
    y = each("y", (2, 6, 5), lambda n, c, p: x(n, c, p) - total(n, c // 3) / 15.0)
    (site,) = detect(function(x, y))
    assert list(site.cascade.rows) == ["y"]
    assert str(site.cascade.rows["y"]) == "x - total/N"
    assert site.extents[site.axis] == 15
    assert_same(site, drawn(x))


def test_rows_that_are_joined_and_split() -> None:
    """Batch and heads as one loop inside, and as two outside."""
    x = tensor("x", 2, 3, 5)
    joined = each("joined", (6, 5), lambda r, j: x(r // 3, r % 3, j))
    s, power = softmax_of(lambda *at: joined(*at), (6,), 5)
    y = each("y", (5, 3, 2), lambda j, h, b: power(b * 3 + h, j) / s(b * 3 + h))
    (site,) = detect(function(x, y))
    assert [site.extents[row] for row in site.rows] == [6]
    (output,) = site.outputs
    assert [str(index) for index in output.indices] == ["v_r", "i0 % 3", "i0 // 3"]
    assert_same(site, drawn(x))


def test_dimensions_that_are_kept() -> None:
    x = tensor("x", 4, 9)
    r, q = te.reduce_axis((0, 9), "r"), te.reduce_axis((0, 9), "q")
    total = te.compute((4, 1), lambda i, _: te.sum(x(i, r), axis=r), "total")
    squares = te.compute(
        (4,), lambda i: te.sum(square(x(i, q) - total(i, 0) / 9.0), axis=q), "squares"
    )
    (site,) = detect(function(x, squares))
    assert not any(stage.columns for stage in site.stages.values())
    assert set(site.extents) == {*site.rows, site.axis}
    assert_same(site, drawn(x))


def test_loops_of_64_bits() -> None:
    """As Relax writes them."""
    from tvm import topi

    shape = [tirx.const(extent, "int64") for extent in (4, 9)]
    x = te.placeholder(shape, "float32", "x")
    gamma = te.placeholder([shape[1]], "float32", "gamma")
    (site,) = detect(function(x, gamma, topi.nn.layer_norm(x, gamma, gamma, [1])))
    assert list(site.cascade.rows) == ["T_layer_norm"]
    assert len(site.cascade.stages) == 2
    assert_same(site, drawn(x, gamma))


@pytest.mark.parametrize("flat", [0, 1], ids=["flat first", "flat last"])
def test_one_axis_as_one_loop_and_as_two(flat: int) -> None:
    x = tensor("x", 3, 4, 5)
    k = [te.reduce_axis((0, extent), f"k{extent}") for extent in (4, 5)]

    def whole(name, element, by=te.sum):
        return fold(name, (3,), 20, lambda i, j: element(i, x(i, j // 5, j % 5)), by)

    def parts(name, element, by=te.sum):
        return te.compute((3,), lambda i: by(element(i, x(i, k[0], k[1])), axis=k), name)

    first, last = (whole, parts)[:: -1 if flat else 1]
    m = first("m", lambda i, value: value, te.max)
    s = last("s", lambda i, value: tirx.exp(value - m(i)))
    (site,) = detect(function(x, m, s))
    assert names(site) == ["m", "s"]
    assert site.extents[site.axis] == 20
    assert_same(site, drawn(x))
