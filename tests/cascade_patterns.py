"""Fifty-two patterns of reductions over one axis, as plain two-pass definitions.

Verdicts: ``S`` one product and the usual pairs; ``S*`` needs a maximum times what is not negative;
``V`` no stage uses another, or only results do; ``R`` a sum of products, with its exact rank;
``N`` cannot be streamed. ``outside`` is what no cascade states: its result is no function of
reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy

from crossfuse.cascade.monoid import ARGMAX, LOGADDEXP, MAX, MIN, SUM, topk
from crossfuse.cascade.spec import Cascade, Stage

exp, log, sqrt, Abs = sympy.exp, sympy.log, sympy.sqrt, sympy.Abs
x, v, w, g, k, u, a_, b_, y_, dp = sympy.symbols("x v w g k u gate up y dp", real=True)
x2 = sympy.Symbol("x2", real=True)
W_ = sympy.Symbol("weight", positive=True)
mass = sympy.Symbol("mass", positive=True)
px, py, pz = sympy.symbols("px py pz", real=True)
l = sympy.Symbol("l", integer=True, nonnegative=True)  # noqa: E741
N = sympy.Symbol("N", integer=True, positive=True)
i, t = sympy.symbols("i t", integer=True, nonnegative=True)
sink, lam = sympy.symbols("sink lam", real=True)
T, p, gamma = sympy.symbols("T p gamma", positive=True)
a11, a12, a22 = sympy.symbols("a11 a12 a22", real=True)
EPS = sympy.Rational(1, 10**6)


@dataclass(frozen=True)
class Pattern:
    """One of the patterns.

    Attributes
    ----------
    number : int
        As in the list of patterns; variants share it.
    name : str
        What people call it.
    cascade : Cascade | None
        The definition; None for what is outside.
    verdict : str
        See the module.
    rank : tuple[str, int] | None
        Of ``R``: a stage and its rank.
    refusal : tuple[str, ...]
        Of ``N``: parts of the message, the rule first.
    rows : str
        Kinds of rows that are drawn; see `draw`.
    least : int
        The fewest elements: k of a top-k.
    given : Mapping[str, float]
        Values of invariants; others are drawn.
    """

    number: int
    name: str
    cascade: Cascade | None
    verdict: str
    rank: tuple[str, int] | None = None
    refusal: tuple[str, ...] = ()
    rows: str = "plain zero tiny"
    least: int = 1
    given: Mapping[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """For test names."""
        return f"{self.number}-{self.name.replace(' ', '_')}"


def draw(pattern: Pattern, rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    """Draw inputs, a row for each kind, twice.

    Kinds: ``plain``, ``zero`` (the first element's tensor is 0), ``tiny`` (denormal), ``large``
    (logits up to a thousand), ``holes`` (some -inf), ``masked`` (all -inf).
    """
    cascade, kinds = pattern.cascade, pattern.rows.split() * 2
    data = {}
    for symbol in cascade.elements:
        if symbol == cascade.index:
            continue
        shape = (len(kinds), length)
        drawn = rng.uniform(0.5, 2, shape) if symbol.is_positive else rng.normal(0, 2, shape)
        if symbol in (x, x2):
            for row, kind in enumerate(kinds):
                drawn[row] = _row(kind, drawn[row], rng)
        data[symbol.name] = drawn
    for symbol in cascade.invariants:
        if symbol != cascade.length:
            drawn = rng.uniform(0.5, 2, len(kinds))
            drawn = rng.integers(0, length, len(kinds)) if symbol.is_integer else drawn
            data[symbol.name] = np.full(len(kinds), pattern.given.get(symbol.name, drawn))
    return data


def _row(kind: str, row: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    made = {
        "plain": row,
        "zero": np.zeros_like(row),
        "tiny": row * 1e-308,
        "large": row * 300,
        "holes": np.where(rng.random(row.shape) < 0.6, -np.inf, row),
        "masked": np.full_like(row, -np.inf),
    }
    return made[kind]


LOGITS = "plain zero tiny large holes masked"
FINITE = "plain zero tiny large"


def _r(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, real=True)


m, s, o, ss, a, S, M, mu, q = map(_r, ["m", "s", "o", "ss", "a", "S", "M", "mu", "q"])
P = exp(x - m) / s
MEAN = S / N


def softmax(of: sympy.Expr = x, tag: str = "") -> tuple[Stage, ...]:
    largest = _r(f"m{tag}")
    return (Stage(f"m{tag}", MAX, of), Stage(f"s{tag}", SUM, exp(of - largest)))


def total(term: sympy.Expr, name: str = "o", cast: str = "") -> Stage:
    return Stage(name, SUM, term, cast)


def cascade(
    stages: tuple[Stage, ...],
    results: dict[str, sympy.Expr] | None = None,
    rows: dict[str, sympy.Expr] | None = None,
) -> Cascade:
    """A cascade whose elements and invariants are those that its expressions use."""
    results = {"out": stages[-1].symbol} if results is None and rows is None else results or {}
    names = {each.symbol for each in stages} | {each.index_symbol for each in stages}
    parts = [each.term for each in stages] + list(results.values()) + list((rows or {}).values())
    free = set().union(*(sympy.sympify(each).free_symbols for each in parts)) - names
    along = [x, v, w, g, k, u, a_, b_, y_, dp, x2, W_, mass, px, py, pz, l]
    elements = tuple(each for each in along if each in free)
    invariants = tuple(sorted(free - set(elements), key=lambda each: each.name))
    index = l if l in free else None
    length = N if N in free else None
    return Cascade(stages, elements, invariants, results, rows or {}, index, length)


def _mean_stages() -> tuple[Stage, ...]:
    return (total(x, "S"), total((x - MEAN) ** 2, "M"))


def _mask(of: sympy.Expr, test: sympy.Basic) -> sympy.Expr:
    return sympy.Piecewise((of, test), (-sympy.oo, True))


def _seen(of: sympy.Expr) -> sympy.Expr:
    return sympy.Piecewise((of, l <= i), (0, True))


def _softmaxes() -> list[Pattern]:
    S1 = softmax()
    causal = _mask(x, l <= i)
    window = _mask(x, sympy.And(l <= i, l > i - 4))
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
                    Stage("m", MAX, _mask(x, l <= i)),
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


def _probabilities() -> list[Pattern]:
    S1 = softmax()
    other = softmax(y_, "q")
    mq, sq = _r("mq"), _r("sq")
    delta = _r("delta")
    p1, p2 = P, exp(x2 - _r("mb")) / _r("sb")
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
            cascade(_mean_stages(), {}, {"out": (x - MEAN) / sqrt(M / N + EPS) * g + u}),
            "R",
            ("M", 3),
        ),
    ]


def _moments() -> list[Pattern]:
    mean = _mean_stages()
    weighted = S / q
    Sy, My = _r("Sy"), _r("My")
    joint = (total(x, "S"), total(y_, "Sy"))
    c = [_r(f"c{n}") for n in range(3)]
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
                    total(_seen(sympy.S.One), "q"),
                    total(_seen(x), "S"),
                    total(_seen((x - weighted) ** 2), "M"),
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


def _scales() -> list[Pattern]:
    rho = 1 / sqrt(ss / N + EPS)
    square = total(x**2, "ss")
    largest = Stage("a", MAX, Abs(x))
    lo, hi = _r("lo"), _r("hi")
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
            cascade((*_mean_stages(), Stage("a", MAX, Abs(x - MEAN) / sqrt(M / N + EPS)))),
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


PATTERNS = (*_softmaxes(), *_probabilities(), *_moments(), *_scales())
