"""Variance and what else is about a mean."""

from __future__ import annotations

import sympy

from cascade_patterns.pattern import Pattern
from cascade_patterns.stages import cascade, mean_stages, seen, total
from cascade_patterns.symbols import (
    EPS,
    MEAN,
    W_,
    Abs,
    M,
    N,
    S,
    a11,
    a12,
    a22,
    mass,
    o,
    px,
    py,
    pz,
    q,
    real,
    sqrt,
    w,
    x,
    y_,
)


def moments() -> list[Pattern]:
    """The patterns of this family."""
    mean = mean_stages()
    weighted = S / q
    Sy, My = real("Sy"), real("My")
    joint = (total(x, "S"), total(y_, "Sy"))
    c = [real(f"c{n}") for n in range(3)]
    places = (px, py, pz)
    centre = tuple(total(mass * at, f"c{n}") for n, at in enumerate(places))
    apart = [at - each / q for at, each in zip(places, c, strict=True)]
    z1, z2 = x - MEAN, y_ - Sy / N
    mahalanobis = a11 * z1**2 + 2 * a12 * z1 * z2 + a22 * z2**2
    standard = (x - MEAN) / sqrt(M / N)
    return [
        Pattern(25, "variance", cascade(mean, {"out": M / N, "mean": MEAN}), "R", ("M", 3)),
        Pattern(
            26,
            "weighted variance",
            cascade(
                (total(W_, "q"), total(W_ * x, "S"), total(W_ * (x - weighted) ** 2, "M")),
                {"out": M / q},
            ),
            "R",
            ("M", 3),
        ),
        Pattern(
            26,
            "masked variance",
            cascade(
                (
                    total(seen(sympy.S.One), "q"),
                    total(seen(x), "S"),
                    total(seen((x - weighted) ** 2), "M"),
                ),
                {"out": M / q},
            ),
            "R",
            ("M", 3),
        ),
        Pattern(
            27, "skewness", cascade((*mean, total(standard**3)), {"out": o / N}), "R", ("o", 4)
        ),
        Pattern(
            27, "kurtosis", cascade((*mean, total(standard**4)), {"out": o / N}), "R", ("o", 5)
        ),
        Pattern(28, "covariance", cascade((*joint, total(z1 * z2)), {"out": o / N}), "R", ("o", 4)),
        Pattern(
            28,
            "Pearson correlation",
            cascade((*joint, total(z1**2, "M"), total(z2**2, "My"), total(z1 * z2 / sqrt(M * My)))),
            "R",
            ("o", 4),
        ),
        Pattern(
            29,
            "moment of inertia",
            cascade((*centre, total(mass, "q"), total(mass * sum(each**2 for each in apart)))),
            "R",
            ("o", 5),
        ),
        Pattern(
            29,
            "product of inertia",
            cascade((*centre[:2], total(mass, "q"), total(mass * apart[0] * apart[1]))),
            "R",
            ("o", 4),
        ),
        Pattern(30, "Mahalanobis", cascade((*joint, total(mahalanobis))), "R", ("o", 4)),
        Pattern(
            31,
            "mean absolute deviation",
            cascade((total(x, "S"), total(Abs(x - MEAN)))),
            "N",
            refusal=("cascade-separable", "stage o", "|x - S/N|", "couples x with S", "rank"),
        ),
        Pattern(
            31,
            "hinge about the mean",
            cascade((total(x, "S"), total(sympy.Max(x - MEAN, 0)))),
            "N",
            refusal=("cascade-separable", "stage o", "max(0", "couples x with S"),
        ),
        Pattern(
            32,
            "layer norm and GEMM",
            cascade((*mean, total((x - MEAN) * w / sqrt(M / N + EPS)))),
            "R",
            ("o", 2),
        ),
        Pattern(
            33, "centred product", cascade((total(x, "S"), total((x - MEAN) * w))), "R", ("o", 2)
        ),
    ]
