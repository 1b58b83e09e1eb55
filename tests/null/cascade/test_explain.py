"""Explanations of derivations, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy

from cascade_patterns import PATTERNS, named
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.algebra.explain import explain
from crossfuse.cascade.algebra.writing import written

TEXTS = Path(__file__).parent / "explanations"
NAMES = {
    "softmax": "softmax tensor",
    "attention": "attention",
    "rmsnorm_absmax_gemm": "RMS norm, absmax, GEMM",
    "variance": "variance",
    "quantisation": "absmax quantisation and GEMM",
    "top_k": "top-k of probabilities",
}


def text_of(name: str) -> str:
    pattern = named(NAMES[name])
    return explain(derive(pattern.cascade)) + "\n"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_explanation(name: str) -> None:
    assert text_of(name) == (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda each: each.id)
def test_every_derivation_is_explained(pattern: object) -> None:
    if pattern.verdict in ("N", "outside"):
        return
    derivation = derive(pattern.cascade)
    text = explain(derivation)
    assert not any(line != line.rstrip() for line in text.splitlines())
    for slot in derivation.slots:
        assert f"  {slot.name} = " in text
    for word in ("Dummy", "Piecewise", "Eq(", "**", "_distance", "zoo", "nan"):
        assert word not in text


x, m, n = sympy.symbols("x m n", real=True)


@pytest.mark.parametrize(
    ("expression", "due"),
    [
        (-m + x, "x - m"),
        (-(m + x), "-m - x"),
        (-m * x / 2, "-m·x/2"),
        (sympy.exp(-m + x) / n, "exp(x - m)/n"),
        (x / (m * n), "x/(m·n)"),
        ((x - m) ** 2 / sympy.sqrt(n), "(x - m)^2/sqrt(n)"),
        (sympy.Abs(x) + sympy.Max(m, 0), "|x| + max(0, m)"),
        (sympy.Piecewise((x, x > m), (-sympy.oo, True)), "(x if m < x else -∞)"),
        (1 / (1 + x), "1/(1 + x)"),
        (m - 2 * x * (x + n), "m - 2·x·(n + x)"),
    ],
)
def test_expressions_are_written_as_people_do(expression: sympy.Expr, due: str) -> None:
    assert written(expression) == due
