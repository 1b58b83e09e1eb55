"""What shares an axis, and what does not though it looks alike."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from cpu.cascade.detect.evaluate import assert_same
from cpu.cascade.detect.writing import (
    attention,
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


def names(site) -> list[str]:
    return [each.name for each in site.cascade.stages]


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


def test_one_tensor_for_queries_keys_and_values() -> None:
    x = tensor("x", 6, 6)
    scores = fold("scores", (6, 6), 6, lambda i, j, d: x(i, d) * x(j, d))
    s, power = softmax_of(lambda *at: scores(*at), (6,), 6)
    o = fold("o", (6, 6), 6, lambda i, d, j: power(i, j) * x(j, d))
    out = each("out", (6, 6), lambda i, d: o(i, d) / s(i))
    (site,) = detect(function(x, out))
    assert sorted(names(site)) == ["m", "o", "s"]
    assert_same(site, drawn(x))


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


def test_elementwise_blocks_are_seen_through() -> None:
    x, bias = tensor("x", 4, 6, dtype="float16"), tensor("bias", 6)
    wide = each("wide", (4, 6), lambda i, j: x(i, j).astype("float32"))
    turned = each("turned", (6, 4), lambda j, i: wide(i, j) + bias(j))
    active = each("active", (4, 6), lambda i, j: turned(j, i) * tirx.sigmoid(turned(j, i)))
    m = most("m", (4,), 6, lambda i, j: active(i, j))
    s = fold("s", (4,), 6, lambda i, j: tirx.exp(active(i, j) - m(i)))
    (site,) = detect(function(x, bias, m, s))
    assert str(site.cascade.stage("m").term) == "(bias + x)/(exp(-bias - x) + 1)"
    assert_same(site, drawn(x, bias), rtol=1e-3)


def test_several_results_and_rows() -> None:
    x, w = tensor("x", 4, 6), tensor("w", 3)
    total = fold("total", (4,), 6, lambda i, j: x(i, j))
    mean = each("mean", (4,), lambda i: total(i) / 6.0)
    squares = fold("squares", (4,), 6, lambda i, j: square(x(i, j) - mean(i)))
    spread = each("spread", (4,), lambda i: tirx.sqrt(squares(i) / 5.0))
    normal = each("normal", (6, 4), lambda j, i: (x(i, j) - mean(i)) / spread(i))
    wide = each("wide", (4, 3), lambda i, n: spread(i) * w(n))
    (site,) = detect(function(x, w, mean, total, spread, normal, wide))
    cascade = site.cascade
    assert {name: str(each) for name, each in cascade.results.items()} == {
        "mean": "total/N",
        "total": "total",
        "spread": "sqrt(5)*sqrt(squares)/5",
        "wide": "sqrt(5)*sqrt(squares)*w/5",
    }
    assert list(cascade.rows) == ["normal"]
    outputs = [each.name for each in site.outputs]
    assert outputs == ["mean", "total", "spread", "normal", "wide"]
    assert [site.extents[each] for each in site.outputs[4].columns] == [3]
    assert_same(site, drawn(x, w))


def test_rows_that_are_quantised() -> None:
    x = tensor("x", 4, 6)
    a = most("a", (4,), 6, lambda i, j: tirx.abs(x(i, j)))
    scale = each("scale", (4,), lambda i: tirx.max(a(i), tirx.const(1e-8, "float32")) / 127.0)
    q = each("q", (4, 6), lambda i, j: tirx.nearbyint(x(i, j) / scale(i)).astype("int8"))
    (site,) = detect(function(x, scale, q))
    assert list(site.cascade.results) == ["scale"]
    assert str(site.cascade.rows["q"]) == "rint(127*x/Max(1/100000000, a))"
    assert_same(site, drawn(x))


def test_a_stage_for_each_column() -> None:
    """All stages have the column: it is a row, like any other."""
    p, v = tensor("p", 4, 6), tensor("v", 6, 3)
    mean = fold("mean", (4, 3), 6, lambda i, d, j: p(i, j) * v(j, d))
    spread = fold("spread", (4, 3), 6, lambda i, d, j: p(i, j) * square(v(j, d) - mean(i, d)))
    (site,) = detect(function(p, v, spread))
    assert [site.extents[each] for each in site.rows] == [4, 3]
    assert not any(each.columns for each in site.stages.values())
    assert_same(site, drawn(p, v))


def test_a_column_that_two_stages_share() -> None:
    p, v = tensor("p", 4, 6), tensor("v", 6, 3)
    total = fold("total", (4,), 6, lambda i, j: p(i, j))
    mean = fold("mean", (4, 3), 6, lambda i, d, j: p(i, j) / total(i) * v(j, d))
    spread = fold(
        "spread", (4, 3), 6, lambda i, d, j: p(i, j) / total(i) * square(v(j, d) - mean(i, d))
    )
    (site,) = detect(function(p, v, mean, spread))
    assert len(site.rows) == 1
    assert site.stages["mean"].columns == site.stages["spread"].columns
    assert_same(site, drawn(p, v))


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


def test_rows_of_probabilities_beside_the_result() -> None:
    q, k, v, out = attention(lambda x, h, i, j: x)
    (site,) = detect(function(q, k, v, out))
    assert list(site.cascade.results) == ["out"]
    x, w = tensor("x", 4, 6), tensor("w", 6, 3)
    s, power = softmax_of(lambda *at: x(*at), (4,), 6)
    p = each("p", (4, 6), lambda i, j: power(i, j) / s(i))
    o = fold("o", (4, 3), 6, lambda i, d, j: p(i, j) * w(j, d))
    (site,) = detect(function(x, w, p, o))
    assert (list(site.cascade.results), list(site.cascade.rows)) == (["o"], ["p"])
    assert_same(site, drawn(x, w))


def test_elements_that_are_rounded_beforehand_stay_so() -> None:
    """Rounding to 8 bits that no result takes part in is a matter of reading."""
    x, w = tensor("x", 4, 6), tensor("w", 6)
    small = each("small", (4, 6), lambda i, j: (x(i, j) * 2.0).astype("float8_e4m3fn"))
    a = most("a", (4,), 6, lambda i, j: small(i, j).astype("float32"))
    y = fold("y", (4,), 6, lambda i, j: small(i, j).astype("float32") / a(i) * w(j))
    (site,) = detect(function(x, w, y))
    stage = site.cascade.stage("y")
    assert stage.cast == ""
    assert str(stage.term) == "w*x_rounded/a"
    (symbol,) = [each for each in site.reads if str(each) == "x_rounded"]
    assert str(site.reads[symbol].ty) == "float8_e4m3fn"


def test_numbers_as_parameters() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), scale: T.float32, S: T.Buffer((4,), "float32")):
        m = T.sblock_alloc_buffer((4,), "float32")
        for i, r in T.grid(4, 6):
            with T.sblock("m"):
                a, b = T.axis.remap("SR", [i, r])
                with T.init():
                    m[a] = T.float32("-inf")
                m[a] = T.max(m[a], X[a, b] * scale)
        for i, r in T.grid(4, 6):
            with T.sblock("s"):
                a, b = T.axis.remap("SR", [i, r])
                with T.init():
                    S[a] = 0.0
                S[a] = S[a] + T.exp(X[a, b] * scale - m[a])

    (site,) = detect(func)
    assert str(site.cascade.stage("S").term) == "exp(X*scale - m)"
    assert [str(each) for each in site.cascade.invariants] == ["scale"]


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


def test_elements_that_are_an_output_too() -> None:
    q, k, v = tensor("q", 5, 4), tensor("k", 7, 4), tensor("v", 7, 3)
    scores = fold("scores", (5, 7), 4, lambda i, j, d: q(i, d) * k(j, d))
    s, power = softmax_of(lambda *at: scores(*at), (5,), 7)
    o = fold("o", (5, 3), 7, lambda i, d, j: power(i, j) * v(j, d))
    out = each("out", (5, 3), lambda i, d: o(i, d) / s(i))
    (site,) = detect(function(q, k, v, scores, out))
    assert (list(site.cascade.results), list(site.cascade.rows)) == (["out"], ["scores"])
    assert [each.name for each in site.outputs] == ["scores", "out"]
    assert_same(site, drawn(q, k, v))


def test_outputs_of_one_name() -> None:
    @T.prim_func(s_tir=True)
    def func(x: T.handle, a: T.handle, b: T.handle):
        X = T.match_buffer(x, (4, 6), "float32")
        A = T.match_buffer(a, (4,), "float32")
        B = T.match_buffer(b, (4,), "float32")
        for i, r in T.grid(4, 6):
            with T.sblock("one"):
                p, q = T.axis.remap("SR", [i, r])
                with T.init():
                    A[p] = 0.0
                A[p] = A[p] + X[p, q]
        for i, r in T.grid(4, 6):
            with T.sblock("other"):
                p, q = T.axis.remap("SR", [i, r])
                with T.init():
                    B[p] = T.float32("-inf")
                B[p] = T.max(B[p], X[p, q])

    first, second = func.params[1:]
    from crossfuse import _tvm as ir

    renamed = ir.tirx.decl_buffer([4], "float32", str(first.name))
    body = ir.substitute(func.body, lambda var: renamed if var.same_as(second) else var)
    twins = ir.PrimFunc([*func.params[:2], renamed], body, func.ret_type, func.attrs)
    (site,) = detect(twins)
    assert sorted(site.cascade.results) == ["A", "A_"]
    assert [each.name for each in site.outputs] == ["A", "A_"]
    assert len({each.name for each in site.cascade.stages}) == 2
