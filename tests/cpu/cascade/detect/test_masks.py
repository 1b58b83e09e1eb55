"""Masks, biases and caps of scores become parts of terms."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
from tvm import tirx
from tvm.script import tirx as T

from cpu.cascade.detect.evaluate import assert_same
from cpu.cascade.detect.writing import (
    NOTHING,
    ZERO,
    attention,
    drawn,
    each,
    fold,
    function,
    most,
    tensor,
)
from crossfuse.cascade.detect import detect

pytestmark = pytest.mark.cpu


def masked(term: sympy.Expr) -> str:
    """The condition under which a term is not -oo."""
    (piece,) = term.atoms(sympy.Piecewise)
    assert piece.args[1] == (-sympy.oo, True)
    return str(piece.args[0][1])


def test_causal() -> None:
    q, k, v, out = attention(lambda x, h, i, j: tirx.Select(j <= i + 2, x, NOTHING))
    (site,) = detect(function(q, k, v, out))
    assert masked(site.cascade.stage("m").term) == "v_r <= i1 + 2"
    row = next(each for each in site.cascade.invariants if site.reads[each].same_as(site.rows[1]))
    assert row.is_integer
    assert_same(site, drawn(q, k, v))


def test_sliding_window() -> None:
    def window(x, h, i, j):
        return tirx.if_then_else(tirx.all(j <= i, i - j < 3), x, NOTHING)

    q, k, v, out = attention(window)
    (site,) = detect(function(q, k, v, out))
    assert masked(site.cascade.stage("m").term) == "(i1 >= v_r) & (i1 - v_r < 3)"
    assert_same(site, drawn(q, k, v))


def test_alibi() -> None:
    slope = tensor("slope", 2)
    q, k, v, out = attention(lambda x, h, i, j: x + slope(h) * (j - i).astype("float32"))
    (site,) = detect(function(q, k, v, slope, out))
    assert str(site.cascade.stage("m").term) == "scores + slope*(-i1 + v_r)"
    assert "slope" in map(str, site.cascade.invariants)
    assert_same(site, drawn(q, k, v, slope))


def test_documents() -> None:
    ids, of = tensor("ids", 7, dtype="int32"), tensor("of", 5, dtype="int32")
    q, k, v, out = attention(lambda x, h, i, j: tirx.Select(ids(j) == of(i), x, NOTHING))
    (site,) = detect(function(q, k, v, ids, of, out))
    assert masked(site.cascade.stage("m").term) == "Eq(ids, of)"
    assert {"ids"} <= set(map(str, site.cascade.elements))
    assert "of" in map(str, site.cascade.invariants)
    inputs = drawn(q, k, v) | {
        "ids": np.array([0, 0, 1, 1, 1, 2, 2], np.int32),
        "of": np.array([0, 1, 1, 2, 2], np.int32),
    }
    assert_same(site, inputs)


def test_flags() -> None:
    flags = tensor("flags", 5, 7, dtype="bool")
    q, k, v, out = attention(lambda x, h, i, j: tirx.Select(flags(i, j), x, NOTHING))
    (site,) = detect(function(q, k, v, flags, out))
    assert masked(site.cascade.stage("m").term) == "Ne(flags, 0)"
    inputs = drawn(q, k, v, flags)
    inputs["flags"][:, 3] = True
    assert_same(site, inputs)


def test_added_biases_and_caps() -> None:
    bias = tensor("bias", 2, 5, 7)

    def capped(x, h, i, j):
        thirty = tirx.const(30, "float32")
        return thirty * tirx.tanh(x / thirty) + bias(h, i, j)

    q, k, v, out = attention(capped)
    (site,) = detect(function(q, k, v, bias, out))
    assert str(site.cascade.stage("m").term) == "bias + 30*tanh(scores/30)"
    assert_same(site, drawn(q, k, v, bias))


def test_lengths_of_rows() -> None:
    x, lengths = tensor("x", 4, 9), tensor("lengths", 4, dtype="int32")

    def inside(i, j):
        return tirx.Select(j < lengths(i), x(i, j), NOTHING)

    m = most("m", (4,), 9, inside)
    s = fold("s", (4,), 9, lambda i, j: tirx.exp(inside(i, j) - m(i)))
    out = each("out", (4,), lambda i: m(i) + tirx.log(s(i)))
    (site,) = detect(function(x, lengths, out))
    assert masked(site.cascade.stage("m").term) == "lengths > v_r"
    assert_same(site, drawn(x) | {"lengths": np.array([9, 1, 4, 6], np.int32)})


def test_sinks() -> None:
    x, sink = tensor("x", 4, 9), tensor("sink", 4)
    raw = most("raw", (4,), 9, lambda i, j: x(i, j))
    m = each("m", (4,), lambda i: tirx.max(raw(i), sink(i)))
    s = fold("s", (4,), 9, lambda i, j: tirx.exp(x(i, j) - m(i)))
    y = each("y", (4, 9), lambda i, j: tirx.exp(x(i, j) - m(i)) / (s(i) + tirx.exp(sink(i) - m(i))))
    (site,) = detect(function(x, sink, y))
    assert str(site.cascade.stage("s").term) == "exp(x - Max(raw, sink))"
    assert_same(site, drawn(x, sink))


def test_counted_elements() -> None:
    """A stage that reads no tensor belongs to the row whose elements it counts."""
    x, lengths = tensor("x", 4, 9), tensor("lengths", 4, dtype="int32")
    count = fold("count", (4,), 9, lambda i, j: (j < lengths(i)).astype("float32"))
    mean = fold("mean", (4,), 9, lambda i, j: tirx.Select(j < lengths(i), x(i, j), ZERO) / count(i))
    (site,) = detect(function(x, lengths, mean))
    assert [each.name for each in site.cascade.stages] == ["count", "mean"]
    assert_same(site, drawn(x) | {"lengths": np.array([9, 1, 4, 6], np.int32)})


def test_gathered_elements() -> None:
    """Rows of a table that another tensor names, along the axis and not."""
    x, table = tensor("x", 3, 9), tensor("table", 6, dtype="int32")
    m = most("m", (3,), 6, lambda i, j: x(i, table(j)))
    s = fold("s", (3,), 6, lambda i, j: tirx.exp(x(i, table(j)) - m(i)))
    out = each("out", (3,), lambda i: m(i) + tirx.log(s(i)) - x(i, table(i)))
    (site,) = detect(function(x, table, out))
    reads = {str(symbol): str(read) for symbol, read in site.reads.items()}
    assert reads == {"x": "x[i0, table[v_r]]", "x1": "x[i0, table[i0]]"}
    assert [str(each) for each in site.cascade.elements] == ["x"]
    assert_same(site, drawn(x) | {"table": np.array([8, 0, 3, 3, 5, 1], np.int32)})


def test_in_script() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32")):
        m = T.sblock_alloc_buffer((4,), "float32")
        s = T.sblock_alloc_buffer((4,), "float32")
        for i in range(4):
            for r in range(6):
                with T.sblock("highest"):
                    a, b = T.axis.remap("SR", [i, r])
                    with T.init():
                        m[a] = T.float32("-inf")
                    m[a] = T.max(m[a], T.if_then_else(b <= a, X[a, b], T.float32("-inf")))
            for r in range(6):
                with T.sblock("added"):
                    b, a = T.axis.remap("RS", [r, i])
                    with T.init():
                        s[a] = 0.0
                    s[a] = s[a] + T.if_then_else(b <= a, T.exp(X[a, b] - m[a]), T.float32(0))
            for r in range(6):
                with T.sblock("divided"):
                    a, b = T.axis.remap("SS", [i, r])
                    Y[a, b] = T.if_then_else(b <= a, T.exp(X[a, b] - m[a]) / s[a], T.float32(0))

    (site,) = detect(func)
    assert {name: each.block for name, each in site.stages.items()} == {
        "m": "highest",
        "s": "added",
    }
    assert list(site.cascade.rows) == ["Y"]
    assert_same(site, {"X": np.random.default_rng(0).standard_normal((4, 6)).astype("float32")})
