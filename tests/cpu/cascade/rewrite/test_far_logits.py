"""Logits that are large and lie close together: what is made of them by differences is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.llvm import run_sequential

ROWS, LENGTH = 5, 77


def log_softmax(d: Any, log_sum: Any, exp: Any) -> Any:
    return d - log_sum


def cubes(d: Any, log_sum: Any, exp: Any) -> Any:
    return exp(d - log_sum) * exp(d - log_sum) * exp(d - log_sum)


def entropy(d: Any, log_sum: Any, exp: Any) -> Any:
    return exp(d - log_sum) * (d - log_sum)


def function_of(term: Any, whole: bool) -> Any:
    """Of logits: a sum of terms for each row, or all terms.

    A term is of an element less the largest of its row, and the logarithm of the sum of
    exponentials of these.
    """
    x = te.placeholder((ROWS, LENGTH), "float32", name="X")
    k, n, p = (te.reduce_axis((0, LENGTH), name) for name in "knp")
    m = te.compute((ROWS,), lambda i: te.max(x[i, k], axis=k), name="m")
    s = te.compute((ROWS,), lambda i: te.sum(te.exp(x[i, n] - m[i]), axis=n), name="s")

    def at(i: Any, j: Any) -> Any:
        return term(x[i, j] - m[i], te.log(s[i]), te.exp)

    if whole:
        y = te.compute((ROWS, LENGTH), at, name="Y")
    else:
        y = te.compute((ROWS,), lambda i: te.sum(at(i, p), axis=p), name="Y")
    return te.create_prim_func([x, y])


@pytest.mark.parametrize(("term", "whole"), [(log_softmax, True), (cubes, False), (entropy, False)])
def test_far_from_zero(term: Any, whole: bool) -> None:
    (site,) = detect(function_of(term, whole))
    function = streaming(site, derive(site.cascade), StreamTiles(threads=8, unroll=1, cluster=2))
    x = np.random.default_rng(0).normal(0, 1, (ROWS, LENGTH)) * 2
    x += np.array([[0], [1000], [-30000], [1e6], [3]])
    # As some mask: most threads of the row see nothing else.
    x[4, :70] = np.finfo("float32").min
    arrays = {"X": x.astype("float32")}
    exact = arrays["X"].astype("float64")
    d = exact - exact.max(axis=1, keepdims=True)
    due = term(d, np.log(np.exp(d).sum(axis=1, keepdims=True)), np.exp)
    found = run_sequential(function, arrays).outputs["Y"]
    np.testing.assert_allclose(found, due if whole else due.sum(axis=1), rtol=2e-6)
