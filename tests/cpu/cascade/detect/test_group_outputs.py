"""What a group of stages reads and makes: blocks seen through, columns, results and rows."""

from __future__ import annotations

import pytest
from tvm import tirx
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
