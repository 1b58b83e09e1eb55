"""Functions whose reductions are no cascade are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx
from tvm.script import tirx as T

from cpu.cascade.detect.writing import (
    ZERO,
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
from crossfuse.errors import ArgumentRefused, CascadeRefused

pytestmark = pytest.mark.cpu


def refusal(*parameters: Any) -> str:
    with pytest.raises(CascadeRefused) as caught:
        detect(function(*parameters))
    return str(caught.value)


def test_a_result_of_another_row() -> None:
    x = tensor("x", 6, 8)
    m = most("m", (6,), 8, lambda i, j: x(i, j))
    s = fold("s", (6,), 8, lambda i, j: tirx.exp(x(i, j) - m((i + 1) % 6)))
    assert refusal(x, s) == (
        "cascade-detect: block 's', buffer 'm': found a result read at another row:"
        " m[(i0 + 1) % 6]; limit: the result of its own row: [i0] of block 'm'."
        " Instead: split the function there, and fuse each part by itself."
    )


def test_rows_that_differ() -> None:
    """Results of a matrix of rows, read as those of its transpose."""
    x = tensor("x", 5, 5, 8)
    m = most("m", (5, 5), 8, lambda a, b, j: x(a, b, j))
    s = fold("s", (5, 5), 8, lambda a, b, j: tirx.exp(x(a, b, j) - m(b, a)))
    assert "block 's', buffer 'm': found a reduction over 8 that needs" in refusal(x, s)


def test_coarser_rows() -> None:
    """Groups of rows that share a maximum."""
    x = tensor("x", 6, 8)
    m = most("m", (3,), 8, lambda g, j: x(2 * g, j))
    s = fold("s", (6,), 8, lambda i, j: tirx.exp(x(i, j) - m(i // 2)))
    assert "found a result read at another row: m[i0 // 2]" in refusal(x, s)


def test_other_positions() -> None:
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: y(i, j) * a(i))
    assert refusal(x, y, b) == (
        "cascade-detect: block 'b', buffer 'a': found a reduction over 8 that needs a result over 8"
        " of other positions (block 'a'); limit: reductions over the same positions, of the same"
        " row. Instead: split the function there, and fuse each part by itself."
    )


def test_shifted_positions() -> None:
    x = tensor("x", 5, 9)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: x(i, j + 1) * a(i))
    assert "block 'b', buffer 'a': found a reduction over 8 that needs a result" in refusal(x, b)


def test_another_length() -> None:
    x = tensor("x", 5, 9)
    a = fold("a", (5,), 9, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: x(i, j) * a(i))
    assert "a reduction over 8 that needs a result over 9 of other positions" in refusal(x, b)


def test_a_reduction_after_the_cascade() -> None:
    """A norm of what attention gives."""
    q, k, v, out = attention(lambda x, h, i, j: x)
    norm = fold("norm", (2, 5), 3, lambda h, i, d: square(out(h, i, d)))
    message = refusal(q, k, v, norm)
    assert "block 'norm', buffer 'o': found elements that block 'o' makes of results of" in message


def test_two_cascades_in_a_row() -> None:
    x, w = tensor("x", 5, 8), tensor("w", 7, 8)
    squares = fold("squares", (5,), 8, lambda i, j: square(x(i, j)))
    y = fold("y", (5, 7), 8, lambda i, n, j: x(i, j) * tirx.rsqrt(squares(i)) * w(n, j))
    s, power = softmax_of(lambda *at: y(*at), (5,), 7)
    out = each("out", (5, 7), lambda i, n: power(i, n) / s(i))
    assert "found elements that block 'y' makes of results of block 'squares'" in refusal(x, w, out)


def test_a_result_that_is_an_element_too() -> None:
    x = tensor("x", 8, 8)
    m = most("m", (8,), 8, lambda i, j: x(i, j))
    s = fold("s", (8,), 8, lambda i, j: tirx.exp(x(i, j) - m(i)) * m(j))
    assert "a result that block 's' reads along its axis and this one does not" in refusal(x, s)


def test_an_output_of_two_positions() -> None:
    x = tensor("x", 5, 8)
    s, power = softmax_of(lambda *at: x(*at), (5,), 8)
    p = each("p", (5, 8, 8), lambda i, a, b: power(i, a) * power(i, b) / s(i))
    message = refusal(x, p)
    assert "block 'p', buffer 'p': found an output that needs two positions of the axis" in message


def test_differences_of_neighbours() -> None:
    x = tensor("x", 5, 8)
    s, power = softmax_of(lambda *at: x(*at), (5,), 8)
    d = each("d", (5, 7), lambda i, j: (power(i, j + 1) - power(i, j)) / s(i))
    assert "found an output that needs two positions" in refusal(x, d)


def test_a_result_of_another_column() -> None:
    x, w = tensor("x", 5, 8), tensor("w", 8, 6)
    m = most("m", (5,), 8, lambda i, j: x(i, j))
    y = fold("y", (5, 6), 8, lambda i, n, j: (x(i, j) - m(i)) * w(j, n))
    turned = each("turned", (5, 6), lambda i, n: y(i, n) - y(i, 5 - n))
    assert "found a result read at another row: y[i0, 5 - i1]" in refusal(x, w, turned)


def test_one_element_of_a_producer() -> None:
    q, k, label = tensor("q", 5, 3), tensor("k", 7, 3), tensor("label", 5, dtype="int32")
    logits = fold("logits", (5, 7), 3, lambda i, j, d: q(i, d) * k(j, d))
    s, _ = softmax_of(lambda *at: logits(*at), (5,), 7)
    loss = each("loss", (5,), lambda i: tirx.log(s(i)) - logits(i, label(i)))
    message = refusal(q, k, label, loss)
    assert "found one element of what block 'logits' makes: logits[i0, label[i0]]" in message
    assert "Instead: take it by a sum, such as of where(l == label[i], x[i, l], 0)" in message


def above(start: int) -> Any:
    """A maximum that is no less than a number."""
    return te.comm_reducer(
        lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(start, dtype), name="above"
    )


def test_an_initial_value() -> None:
    by = te.comm_reducer(
        lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(-5, dtype), name="above"
    )
    x = tensor("x", 5, 8)
    assert refusal(x, fold("m", (5,), 8, lambda i, j: x(i, j), by)) == (
        "cascade-detect: block 'm', buffer 'm': found an initial value -5 of a max; limit: -oo,"
        " which changes nothing. Instead: start at -oo, and combine the result with -5 afterwards."
    )


def test_an_initial_value_that_changes_nothing() -> None:
    by = te.comm_reducer(
        lambda a, b: tirx.max(a, b), lambda dtype: tirx.const(0, dtype), name="above"
    )
    x = tensor("x", 5, 8)
    (site,) = detect(function(x, fold("m", (5,), 8, lambda i, j: tirx.abs(x(i, j)), by)))
    assert [each.monoid.name for each in site.cascade.stages] == ["max"]


def test_scans() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32")):
        for i, r in T.grid(4, 6):
            with T.sblock("sums"):
                a, b = T.axis.remap("SS", [i, r])
                Y[a, b] = T.if_then_else(b > 0, Y[a, b - 1], T.float32(0)) + X[a, b]

    with pytest.raises(CascadeRefused) as caught:
        detect(func)
    assert "block 'sums', buffer 'Y': found a scan: Y[a, b] from Y[a, b - 1]" in str(caught.value)
    assert "limit: reductions, whose elements may come in any order" in str(caught.value)


def test_other_updates() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4,), "float32")):
        for i, r in T.grid(4, 6):
            with T.sblock("decayed"):
                a, b = T.axis.remap("SR", [i, r])
                with T.init():
                    Y[a] = 0.0
                Y[a] = Y[a] * T.float32(0.5) + X[a, b]

    with pytest.raises(CascadeRefused, match=r"cascade-detect: block 'decayed', buffer 'Y': found"):
        detect(func)


def test_functions_without_reductions() -> None:
    x = tensor("x", 4)
    assert "function: found no reduction; limit: at least one" in refusal(
        x, each("y", (4,), lambda i: x(i) + 1.0)
    )
    with pytest.raises(ArgumentRefused, match="func of detect: found 3; limit: a PrimFunc"):
        detect(3)


def test_results_that_nothing_needs() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32")):
        s = T.sblock_alloc_buffer((4,), "float32")
        for i, r in T.grid(4, 6):
            with T.sblock("s"):
                a, b = T.axis.remap("SR", [i, r])
                with T.init():
                    s[a] = 0.0
                s[a] = s[a] + X[a, b]
        for i, r in T.grid(4, 6):
            with T.sblock("y"):
                a, b = T.axis.remap("SS", [i, r])
                Y[a, b] = X[a, b]

    (site,) = detect(func)
    assert list(site.cascade.rows) == ["Y"]

    @T.prim_func(s_tir=True)
    def other(
        X: T.Buffer((4, 6), "float32"), Z: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")
    ):
        s = T.sblock_alloc_buffer((4,), "float32")
        for i, r in T.grid(4, 6):
            with T.sblock("s"):
                a, b = T.axis.remap("SR", [i, r])
                with T.init():
                    s[a] = 0.0
                s[a] = s[a] + X[a, b]
        for i in range(4):
            with T.sblock("y"):
                a = T.axis.spatial(4, i)
                Y[a] = Z[a]

    with pytest.raises(CascadeRefused, match="found nothing that a reduction needs or makes"):
        detect(other)


def test_reductions_that_no_output_needs() -> None:
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32"), B: T.Buffer((4,))):
        a = T.sblock_alloc_buffer((4,), "float32")
        for i, r in T.grid(4, 6):
            with T.sblock("idle"):
                p, q = T.axis.remap("SR", [i, r])
                with T.init():
                    a[p] = 0.0
                a[p] = a[p] + X[p, q]
        for i, r in T.grid(4, 6):
            with T.sblock("b"):
                p, q = T.axis.remap("SR", [i, r])
                with T.init():
                    B[p] = 0.0
                B[p] = B[p] + Y[p, q]

    with pytest.raises(CascadeRefused, match="block 'idle': found results that no output needs"):
        detect(func)


def test_outputs_of_two_sets() -> None:
    x, y = tensor("x", 5, 8), tensor("y", 5, 8)
    a = fold("a", (5,), 8, lambda i, j: x(i, j))
    b = fold("b", (5,), 8, lambda i, j: y(i, j))
    both = each("both", (5,), lambda i: a(i) + b(i))
    assert "block 'both', buffer 'both': found results of 2 sets of reductions" in refusal(
        x, y, both
    )


def test_unknown_operators() -> None:
    x = tensor("x", 5, 8)
    s = fold("s", (5,), 8, lambda i, j: tirx.Select(tirx.isnan(x(i, j)), ZERO, x(i, j)))
    message = refusal(x, s)
    assert "cascade-expression: operator tirx.isnan" in message
    assert "compute it in a block of its own before the cascade" in message


def test_open_extents() -> None:
    n = te.var("n")
    x = te.placeholder((n, 8), "float32", "x")
    assert "found extent n; limit: constant extents" in refusal(
        x, fold("s", (n,), 8, lambda i, j: x(i, j))
    )


def test_promises_about_unknown_inputs() -> None:
    x = tensor("x", 5, 8)
    func = function(x, fold("s", (5,), 8, lambda i, j: x(i, j)))
    with pytest.raises(CascadeRefused) as caught:
        detect(func.with_attr("crossfuse.nonnegative", ["y"]))
    assert "attribute crossfuse.nonnegative: found 'y'; limit: names of inputs: x" in str(
        caught.value
    )


def test_inputs_are_as_drawn() -> None:
    """Random inputs of these tests repeat."""
    x = tensor("x", 3)
    assert (drawn(x)["x"] == drawn(x)["x"]).all()


def test_integers_that_float32_does_not_hold() -> None:
    x = tensor("x", 5, 8, dtype="int32")
    m = most("m", (5,), 8, lambda i, j: x(i, j))
    s = fold("s", (5,), 8, lambda i, j: m(i) - x(i, j))
    assert refusal(x, m, s) == (
        "cascade-integers: block 'm', buffer 'm': found a max in int32 of numbers up to 2147483648;"
        " limit: 16777216, up to which float32 has all, and what int32 holds. Instead: leave it to "
        "a kernel that reduces integers, or convert them before."
    )
    count = fold("count", (5,), 8, lambda i, j: (x(i, j) > 3).astype("int32"))
    mean = fold("mean", (5,), 8, lambda i, j: x(i, j).astype("float32") / count(i))
    assert len(detect(function(x, mean))) == 1  # counts are small


def test_arithmetic_that_wraps_around() -> None:
    x = tensor("x", 5, 8, dtype="uint8")
    s = fold("s", (5,), 8, lambda i, j: (x(i, j) * x(i, j)).astype("float32"))
    t = fold("t", (5,), 8, lambda i, j: x(i, j).astype("float32") / s(i))
    text = refusal(x, t)
    assert text.startswith("cascade-expression: arithmetic in uint8: found x[i0, ")
    assert "limit: numbers that do not wrap around" in text
