"""Softmax, attention, cross entropy and choices of logits."""

from __future__ import annotations

import sympy

from cascade_patterns.pattern import FINITE, LOGITS, Pattern
from cascade_patterns.stages import cascade, masked, softmax, total
from cascade_patterns.symbols import (
    EPS,
    N,
    P,
    T,
    exp,
    g,
    i,
    l,
    log,
    m,
    o,
    s,
    sink,
    sqrt,
    ss,
    t,
    v,
    x,
)
from crossfuse.cascade.spec import ARGMAX, LOGADDEXP, MAX, Stage, topk


def softmaxes() -> list[Pattern]:
    """The patterns of this family."""
    S1 = softmax()
    causal = masked(x, l <= i)
    window = masked(x, sympy.And(l <= i, l > i - 4))
    cap = 30 * sympy.tanh(x / 30)
    top = sympy.Max(m, sink)
    attended = {"out": o / s}
    return [
        Pattern(1, "softmax stats", cascade(S1, {"m": m, "s": s}), "S", rows=LOGITS),
        Pattern(2, "attention", cascade((*S1, total(exp(x - m) * v)), attended), "S", rows=LOGITS),
        Pattern(2, "normalised attention", cascade((*S1, total(P * v))), "S", rows=LOGITS),
        Pattern(
            3,
            "causal attention",
            cascade((*softmax(causal), total(exp(causal - m) * v)), attended),
            "S",
            rows=LOGITS,
        ),
        Pattern(
            3,
            "sliding window",
            cascade((*softmax(window), total(exp(window - m) * v)), attended),
            "S",
            rows=LOGITS,
        ),
        Pattern(
            3,
            "mask outside of exp",
            cascade(
                (
                    Stage("m", MAX, masked(x, l <= i)),
                    total(sympy.Piecewise((exp(x - m), l <= i), (0, True)), "s"),
                    total(sympy.Piecewise((exp(x - m) * v, l <= i), (0, True))),
                ),
                attended,
            ),
            "S",
            rows=LOGITS,
        ),
        Pattern(
            4,
            "ALiBi",
            cascade(
                (*softmax(x + sink * (l - i)), total(exp(x + sink * (l - i) - m) * v)), attended
            ),
            "S",
            rows=LOGITS,
        ),
        Pattern(
            5,
            "softcap",
            cascade((*softmax(cap), total(exp(cap - m) * v)), attended),
            "S",
            rows="plain zero tiny large",
        ),
        Pattern(
            6,
            "attention sink",
            cascade(
                (Stage("m", MAX, x), total(exp(x - top), "s"), total(exp(x - top) * v)),
                {"out": o / (s + exp(sink - top))},
            ),
            "S",
            rows=LOGITS,
        ),
        Pattern(7, "sigmoid attention", cascade((total(v / (1 + exp(-x))),)), "V", rows=FINITE),
        Pattern(7, "squared ReLU attention", cascade((total(sympy.Max(x, 0) ** 2 * v),)), "V"),
        Pattern(8, "log-sum-exp", cascade(S1, {"out": m + log(s)}), "S", rows=LOGITS),
        Pattern(8, "logaddexp", cascade((Stage("o", LOGADDEXP, x),)), "S", rows=LOGITS),
        Pattern(
            9,
            "cross-entropy",
            cascade(
                (*S1, total(sympy.Piecewise((x, sympy.Eq(l, t)), (0, True)))),
                {"out": m + log(s) - o},
            ),
            "S",
            rows=FINITE,
        ),
        Pattern(
            10,
            "label smoothing",
            cascade((*S1, total(x)), {"out": m + log(s) - o / N}),
            "S",
            rows=FINITE,
        ),
        Pattern(
            11,
            "softmax and top-k of logits",
            cascade((*S1, Stage("o", topk(3), x)), {"out": exp(o - m) / s}),
            "S",
            rows=LOGITS,
            least=3,
        ),
        Pattern(
            12,
            "top-k of probabilities",
            cascade((*S1, Stage("o", topk(3), P))),
            "S*",
            rows=LOGITS,
            least=3,
        ),
        Pattern(
            13,
            "top-k gates",
            cascade(
                (*S1, Stage("o", topk(3), x)),
                {
                    "out": exp(o - m),
                    "where": sympy.Symbol("o_index", integer=True, nonnegative=True),
                },
            ),
            "V",
            rows="plain zero tiny large",
            least=3,
        ),
        Pattern(
            14,
            "argmax of probabilities",
            cascade(
                (*S1, Stage("o", ARGMAX, P)),
                {"out": o, "where": sympy.Symbol("o_index", integer=True, nonnegative=True)},
            ),
            "S*",
            # Not of tiny ones: their exponentials are equal, though they are not.
            rows="plain zero large holes",
        ),
        Pattern(14, "Gumbel maximum", cascade((Stage("o", ARGMAX, x + g),)), "V"),
        Pattern(15, "temperature", cascade(softmax(x / T)), "S", rows=LOGITS),
        Pattern(
            15,
            "temperature inside",
            cascade((Stage("m", MAX, x), total(exp((x - m) / T)))),
            "S",
            rows=LOGITS,
        ),
        Pattern(
            16,
            "softmax of normalised rows",
            cascade(
                (
                    total(x**2, "ss"),
                    Stage("m", MAX, x / sqrt(ss / N + EPS)),
                    total(exp(x / sqrt(ss / N + EPS) - m), "s"),
                )
            ),
            "N",
            refusal=("cascade-separable", "stage s", "couples x with ss", "rank"),
        ),
    ]
