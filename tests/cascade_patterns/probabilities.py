"""Sums over probabilities and normalised rows."""

from __future__ import annotations

from cascade_patterns.pattern import FINITE, LOGITS, Pattern
from cascade_patterns.stages import cascade, mean_stages, softmax, total
from cascade_patterns.symbols import (
    EPS,
    MEAN,
    M,
    N,
    P,
    dp,
    exp,
    g,
    k,
    l,
    lam,
    log,
    m,
    mu,
    real,
    s,
    sqrt,
    u,
    v,
    x,
    x2,
    y_,
)


def probabilities() -> list[Pattern]:
    """The patterns of this family."""
    S1 = softmax()
    other = softmax(y_, "q")
    mq, sq = real("mq"), real("sq")
    delta = real("delta")
    p1, p2 = P, exp(x2 - real("mb")) / real("sb")
    weighted = (*S1, total(P * v, "mu"), total(P * (v - mu) ** 2, "M"))
    backward = (*S1, total(P * dp, "delta"), total(P * (dp - delta) * k))
    return [
        Pattern(
            17,
            "entropy",
            cascade((*S1, total(P * (x - m - log(s))))),
            "R",
            ("o", 2),
            rows=FINITE,
        ),
        Pattern(
            18,
            "KL divergence",
            cascade((*S1, *other, total(P * (x - m - log(s) - y_ + mq + log(sq))))),
            "R",
            ("o", 2),
            rows=FINITE,
        ),
        Pattern(19, "sum of squared p", cascade((*S1, total(P**2))), "S", rows=LOGITS),
        Pattern(20, "soft argmax", cascade((*S1, total(P * l))), "S", rows=LOGITS),
        Pattern(21, "softmax-weighted variance", cascade(weighted), "R", ("M", 3), rows=LOGITS),
        Pattern(22, "softmax backward", cascade((*S1, total(P * u))), "S", rows=LOGITS),
        Pattern(23, "attention backward", cascade(backward), "R", ("o", 2), rows=LOGITS),
        Pattern(
            24,
            "differential attention",
            cascade((*S1, *softmax(x2, "b"), total((p1 - lam * p2) * v))),
            "R",
            ("o", 2),
            rows=LOGITS,
        ),
        Pattern(
            50, "Gini impurity", cascade((*S1, total(P * (1 - P)))), "R", ("o", 2), rows=LOGITS
        ),
        Pattern(51, "split-KV decode", cascade((*S1, total(P * v * g))), "S", rows=LOGITS),
        Pattern(52, "softmax tensor", cascade(S1, {}, {"out": P}), "S", rows=LOGITS),
        Pattern(
            52,
            "layer norm tensor",
            cascade(mean_stages(), {}, {"out": (x - MEAN) / sqrt(M / N + EPS) * g + u}),
            "R",
            ("M", 3),
        ),
    ]
