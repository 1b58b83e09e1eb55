"""Norms, largest magnitudes, quantisation and decays."""

from __future__ import annotations

import sympy

from cascade_patterns.pattern import Pattern
from cascade_patterns.stages import cascade, mean_stages, softmax, total
from cascade_patterns.symbols import (
    EPS,
    MEAN,
    Abs,
    M,
    N,
    P,
    a,
    a_,
    b_,
    exp,
    g,
    gamma,
    k,
    l,
    m,
    o,
    p,
    q,
    real,
    sqrt,
    ss,
    v,
    w,
    x,
    y_,
)
from crossfuse.cascade.spec import MAX, MIN, Stage


def scales() -> list[Pattern]:
    """The patterns of this family."""
    rho = 1 / sqrt(ss / N + EPS)
    square = total(x**2, "ss")
    largest = Stage("a", MAX, Abs(x))
    lo, hi = real("lo"), real("hi")
    ends = (Stage("hi", MAX, x), Stage("lo", MIN, x))
    silu = a_ / (1 + exp(-a_)) * b_
    scaled = Stage("a", MAX, Abs(x * g) * rho)
    return [
        Pattern(34, "RMS norm and GEMM", cascade((square, total(x * g * w * rho))), "S"),
        Pattern(35, "L2 norm and dot", cascade((square, total(x * w / sqrt(ss)))), "S"),
        Pattern(
            36,
            "cosine similarity",
            cascade((square, total(y_**2, "q"), total(x * y_)), {"out": o / sqrt(ss * q)}),
            "V",
        ),
        Pattern(
            37,
            "safe 2-norm",
            cascade((largest, total((x / a) ** 2)), {"out": a * sqrt(o)}),
            "S",
            rows="plain zero tiny large",
        ),
        Pattern(
            37,
            "safe p-norm",
            cascade((largest, total((Abs(x) / a) ** p)), {"out": a * o ** (1 / p)}),
            "S",
        ),
        Pattern(
            38,
            "absmax quantisation and GEMM",
            cascade((largest, total(448 * x / a * w, cast="float8_e4m3fn")), {"out": o * a / 448}),
            "S",
        ),
        Pattern(
            38,
            "clamped absmax quantisation",
            cascade(
                (largest, total(448 * x / sympy.Max(a, EPS) * w, cast="float8_e4m3fn")),
                {"out": o * sympy.Max(a, EPS) / 448},
            ),
            "S",
        ),
        Pattern(
            39,
            "rounded quantisation",
            cascade((largest, total(sympy.floor(127 * x / a + sympy.Rational(1, 2)) * w))),
            "N",
            refusal=("cascade-separable", "stage o", "floor(", "couples x with a", "cast"),
        ),
        Pattern(
            40,
            "min-max normalise and dot",
            cascade((*ends, total((x - lo) / (hi - lo) * w))),
            "R",
            ("o", 2),
        ),
        Pattern(41, "RMS norm and absmax", cascade((square, scaled)), "S*"),
        Pattern(
            42,
            "RMS norm, absmax, GEMM",
            cascade((square, scaled, total(x * g * w * rho / a))),
            "S*",
        ),
        Pattern(
            43,
            "layer norm and absmax",
            cascade((*mean_stages(), Stage("a", MAX, Abs(x - MEAN) / sqrt(M / N + EPS)))),
            "N",
            refusal=(
                "cascade-separable",
                "stage a",
                "couples x with",
                "max(maximum - c, c - minimum)",
            ),
        ),
        Pattern(
            44,
            "SwiGLU and absmax",
            cascade((Stage("a", MAX, Abs(silu)), total(silu * w / a))),
            "S",
        ),
        Pattern(
            45,
            "linear attention of constant decay",
            cascade((total(gamma ** (N - 1 - l) * k * v),)),
            "V",
            given={"gamma": 0.97},
        ),
        Pattern(46, "data-dependent decay", None, "outside"),
        Pattern(
            47,
            "sparsemax threshold",
            cascade((Stage("m", MAX, x), total(sympy.Max(x - m + 1, 0)))),
            "N",
            refusal=("cascade-separable", "stage o", "max(0", "couples x with m"),
        ),
        Pattern(47, "top-p and median", None, "outside"),
        Pattern(48, "centred maximum", cascade((total(x, "S"), Stage("o", MAX, x - MEAN))), "S"),
        Pattern(
            49,
            "softmax of softmax",
            cascade((*softmax(), Stage("a", MAX, P), total(exp(P - a)))),
            "N",
            refusal=("cascade-separable", "stage o", "couples x with"),
        ),
        Pattern(
            49,
            "sigmoids about the mean",
            cascade((total(x, "S"), total(1 / (1 + exp(MEAN - x))))),
            "N",
            refusal=("cascade-separable", "stage o", "couples x with S"),
        ),
    ]
