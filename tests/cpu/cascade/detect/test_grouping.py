"""What shares an axis, and what does not though it looks alike."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from cpu.cascade.detect.evaluate import assert_same, names
from cpu.cascade.detect.writing import (
    drawn,
    each,
    fold,
    function,
    most,
    softmax_of,
    tensor,
)
from crossfuse.cascade.detect import detect
from crossfuse.cascade.detect.loads import same, simplified
from crossfuse.errors import CascadeRefused

pytestmark = pytest.mark.cpu


def test_scores_are_elements_though_all_extents_are_equal() -> None:
    """Head dimension, queries and keys: all 4."""
    q, k, v = tensor("q", 4, 4), tensor("k", 4, 4), tensor("v", 4, 4)
    scores = fold("scores", (4, 4), 4, lambda i, j, d: q(i, d) * k(j, d))
    s, power = softmax_of(lambda *at: scores(*at), (4,), 4)
    o = fold("o", (4, 4), 4, lambda i, d, j: power(i, j) * v(j, d))
    out = each("out", (4, 4), lambda i, d: o(i, d) / s(i))
    (site,) = detect(function(q, k, v, out))
    assert sorted(names(site)) == ["m", "o", "s"]
    assert {str(symbol): block for symbol, block in site.producers.items()} == {"scores": "scores"}
    assert len(site.rows) == 1
    assert_same(site, drawn(q, k, v))


def test_loops_of_one_iteration_stay_but_beside_others() -> None:
    """What a reshape divides by sequence and head has no part of a row's loop."""
    b, h, one = (tirx.Var(name, "int32") for name in ("b", "h", "one"))
    domain = {b: 3, h: 8, one: 1}
    (row,) = simplified([one], domain)
    assert row.same_as(one)
    apart, beside = simplified([(b * 8 + h + one) % 24, h + one], domain)
    assert same([apart, beside], [b * 8 + h, h])


def test_one_tensor_for_queries_keys_and_values() -> None:
    x = tensor("x", 6, 6)
    scores = fold("scores", (6, 6), 6, lambda i, j, d: x(i, d) * x(j, d))
    s, power = softmax_of(lambda *at: scores(*at), (6,), 6)
    o = fold("o", (6, 6), 6, lambda i, d, j: power(i, j) * x(j, d))
    out = each("out", (6, 6), lambda i, d: o(i, d) / s(i))
    (site,) = detect(function(x, out))
    assert sorted(names(site)) == ["m", "o", "s"]
    assert_same(site, drawn(x))


def test_an_output_says_which_positions_belong_together() -> None:
    """A sum over y that is divided by one over x: the output reads both at one position."""
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: y(i, j) / a(i))
    out = each("out", (5, 8), lambda i, j: x(i, j) * b(i) + y(i, j))
    (site,) = detect(function(x, y, out))
    assert names(site) == ["a", "b"]
    assert_same(site, drawn(x, y))
    turned = each("turned", (5, 8), lambda i, j: x(i, 7 - j) * b(i) + y(i, j))
    with pytest.raises(CascadeRefused, match="needs a result over 8 of other positions"):
        detect(function(x, y, turned))


def test_without_an_output_that_reads_both_they_are_refused() -> None:
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: y(i, j) / a(i))
    with pytest.raises(CascadeRefused, match="needs a result over 8 of other positions"):
        detect(function(x, y, each("out", (5,), lambda i: b(i))))


def test_unrelated_reductions_of_equal_extent_are_apart() -> None:
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = most("b", (5,), 8, lambda i, j: y(i, j))
    sites = detect(function(x, y, a, b))
    assert [names(site) for site in sites] == [["a"], ["b"]]
    assert [[each.name for each in site.outputs] for site in sites] == [["a"], ["b"]]
    for site in sites:
        assert_outputs(site, drawn(x, y))


def assert_outputs(site, inputs) -> None:
    """One of several sites makes its own outputs."""
    from cpu.cascade.detect.evaluate import outputs_of, run

    due = run(site.function, inputs)
    for name, array in outputs_of(site, inputs).items():
        np.testing.assert_allclose(array, due[name], rtol=1e-5)


def test_rows_and_columns_of_a_square_are_apart() -> None:
    x = tensor("x", 7, 7)
    rows = fold("rows", (7,), 7, lambda i, j: x(i, j))
    columns = fold("columns", (7,), 7, lambda i, j: x(j, i))
    sites = detect(function(x, rows, columns))
    assert [names(site) for site in sites] == [["rows"], ["columns"]]


def test_independent_reductions_of_one_tensor_are_together() -> None:
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    xy = fold("xy", (5,), 8, lambda i, j: x(i, j) * y(i, j))
    xx = fold("xx", (5,), 8, lambda i, j: x(i, j) * x(i, j))
    yy = fold("yy", (5,), 8, lambda i, j: y(i, j) * y(i, j))
    out = each("out", (5,), lambda i: xy(i) * tirx.rsqrt(xx(i) * yy(i)))
    (site,) = detect(function(x, y, out))
    assert sorted(names(site)) == ["xx", "xy", "yy"]
    assert_same(site, drawn(x, y))


def test_elements_of_several_tensors() -> None:
    """Stages that share no tensor are joined by one that reads both."""
    x, w, y = tensor("x", 5, 8), tensor("w", 8), tensor("y", 5, 8)
    a = most("a", (5,), 8, lambda i, j: tirx.abs(x(i, j)))
    b = fold("b", (5,), 8, lambda i, j: y(i, j) * y(i, j))
    c = fold("c", (5,), 8, lambda i, j: x(i, j) / a(i) * y(i, j) / b(i) * w(j))
    (site,) = detect(function(x, w, y, c))
    assert sorted(names(site)) == ["a", "b", "c"]
    assert_same(site, drawn(x, w, y))


def test_blocks_in_another_order() -> None:
    """A later stage's blocks stand among those of an earlier one."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((6, 4), "float32"),
        W: T.Buffer((6, 3), "float32"),
        Out: T.Buffer((3, 4), "float32"),
    ):
        y = T.sblock_alloc_buffer((3, 4), "float32")
        ss = T.sblock_alloc_buffer((4,), "float32")
        for n, r, i in T.grid(3, 6, 4):
            with T.sblock("product"):
                a, b, c = T.axis.remap("SRS", [n, r, i])
                with T.init():
                    y[a, c] = 0.0
                y[a, c] = y[a, c] + X[b, c] * W[b, a]
        for r, i in T.grid(6, 4):
            with T.sblock("squares"):
                b, c = T.axis.remap("RS", [r, i])
                with T.init():
                    ss[c] = 0.0
                ss[c] = X[b, c] * X[b, c] + ss[c]
        for i, n in T.grid(4, 3):
            with T.sblock("scaled"):
                c, a = T.axis.remap("SS", [i, n])
                Out[a, c] = y[a, c] * T.rsqrt(ss[c])

    (site,) = detect(func)
    assert names(site) == ["y", "ss"]
    assert [site.extents[each] for each in site.rows] == [4]
    assert [site.extents[each] for each in site.stages["y"].columns] == [3]
    rng = np.random.default_rng(0)
    shapes = {"X": (6, 4), "W": (6, 3)}
    inputs = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    assert_same(site, inputs)


def test_products_and_minima() -> None:
    by = te.comm_reducer(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype), name="prod")
    x = tensor("x", 4, 6)
    low = fold("low", (4,), 6, lambda i, j: x(i, j), te.min)
    p = fold("p", (4,), 6, lambda i, j: x(i, j) - low(i) + 1.0, by)
    (site,) = detect(function(x, p))
    assert [each.monoid.name for each in site.cascade.stages] == ["min", "prod"]
    assert_same(site, drawn(x))


def test_scores_from_two_products() -> None:
    """As of latent attention: a score is a sum of two products over other axes."""
    q, k = tensor("q", 3, 4), tensor("k", 6, 4)
    p, r = tensor("p", 3, 2), tensor("r", 6, 2)
    one = fold("one", (3, 6), 4, lambda i, j, d: q(i, d) * k(j, d))
    other = fold("other", (3, 6), 2, lambda i, j, d: p(i, d) * r(j, d))
    s, power = softmax_of(lambda i, j: one(i, j) + other(i, j), (3,), 6)
    o = fold("o", (3, 4), 6, lambda i, d, j: power(i, j) * k(j, d))
    out = each("out", (3, 4), lambda i, d: o(i, d) / s(i))
    (site,) = detect(function(q, k, p, r, out))
    assert sorted(site.producers.values()) == ["one", "other"]
    assert_same(site, drawn(q, k, p, r))
