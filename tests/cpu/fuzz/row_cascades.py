"""Random cascades over rows, as tensor expressions and as separate passes of numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te, tirx

#: What a term is made of: functions, elements by name, results of earlier stages by name.
Term = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]
#: Elements of every cascade: numbers of a row, others, positive weights, the position.
ELEMENTS = ("x", "y", "w")
#: First elements of a row that a mask shows; it shows all of the first two rows.
SHOWN = 5
EPSILONS = (1e-6, 1e-3, 1e-12)


class OfTensors:
    """Functions on expressions of TVM."""

    exp, sqrt, abs = tirx.exp, tirx.sqrt, tirx.abs

    @staticmethod
    def number(value: float) -> Any:
        return tirx.const(value, "float32")

    @staticmethod
    def where(test: Any, value: Any) -> Any:
        return tirx.if_then_else(test, value, tirx.const(0.0, "float32"))

    @staticmethod
    def either(*tests: Any) -> Any:
        return tirx.any(*tests)


class OfArrays:
    """The same on arrays of a type."""

    exp, sqrt, abs = np.exp, np.sqrt, np.abs

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def number(self, value: float) -> Any:
        # The same number in all types: what a float32 has of it.
        return self.dtype.type(np.float32(value))

    @staticmethod
    def where(test: Any, value: Any) -> Any:
        return np.where(test, value, np.zeros((), value.dtype))

    @staticmethod
    def either(*tests: Any) -> Any:
        found = tests[0]
        for each in tests[1:]:
            found = found | each
        return found


@dataclass(frozen=True)
class Stage:
    """A reduction, or a number of the row that is made of others.

    Attributes
    ----------
    name : str
        Of its result.
    by : str
        ``"sum"``, ``"max"``, ``"min"``, or empty for no reduction.
    term : Term
        What is reduced, or the number.
    """

    name: str
    by: str
    term: Term


@dataclass(frozen=True)
class Random:
    """A cascade, and what is wanted of each element; `text` says what it is."""

    stages: tuple[Stage, ...]
    output: Term | None
    text: str


def _stage(rng: np.random.Generator, known: dict[str, str], number: int) -> tuple[Stage, str]:
    """A reduction that may use earlier results, and its text."""
    name = f"r{number}"
    terms = _first() if not known else {**_first(), **_later(rng, known)}
    labels = list(terms)
    later = [each for each in labels if each not in _first()]
    label = str(rng.choice(later if later and rng.random() < 0.75 else labels))
    by, term = terms[label]
    if rng.random() < 0.2 and by == "sum":
        inner, label = term, f"where(j < 5 or i < 2, {label})"

        def term(f: Any, e: Mapping[str, Any], r: Mapping[str, Any]) -> Any:
            return f.where(f.either(e["j"] < SHOWN, e["i"] < 2), inner(f, e, r))

    return Stage(name, by, term), f"{name} = {by} {label}"


def _first() -> dict[str, tuple[str, Term]]:
    return {
        "x": ("sum", lambda f, e, r: e["x"]),
        "max x": ("max", lambda f, e, r: e["x"]),
        "min x": ("min", lambda f, e, r: e["x"]),
        "|x|": ("sum", lambda f, e, r: f.abs(e["x"])),
        "max |x|": ("max", lambda f, e, r: f.abs(e["x"])),
        "x*x": ("sum", lambda f, e, r: e["x"] * e["x"]),
        "w": ("sum", lambda f, e, r: e["w"]),
        "w*x": ("sum", lambda f, e, r: e["w"] * e["x"]),
        "x + y": ("sum", lambda f, e, r: e["x"] + e["y"]),
        "max (x + y)": ("max", lambda f, e, r: e["x"] + e["y"]),
    }


def _later(rng: np.random.Generator, known: dict[str, str]) -> dict[str, tuple[str, Term]]:
    """Terms over results: differences, quotients, exponentials."""
    names = list(known)
    a, b, c = (str(rng.choice(names)) for _ in range(3))
    eps = float(rng.choice(EPSILONS))
    means = [each for each in names if known[each] == "mean"]
    tops = [each for each in names if known[each] == "max"]
    m = str(rng.choice(means)) if means else a
    top = str(rng.choice(tops)) if tops else a
    found: dict[str, tuple[str, Term]] = {
        f"x - {a}": ("sum", lambda f, e, r: e["x"] - r[a]),
        f"(x - {m})^2": ("sum", lambda f, e, r: (e["x"] - r[m]) * (e["x"] - r[m])),
        f"(x - {a})*(x - {b})": ("sum", lambda f, e, r: (e["x"] - r[a]) * (e["x"] - r[b])),
        f"(x - {a})*({b} - x)*w": (
            "sum",
            lambda f, e, r: (e["x"] - r[a]) * (r[b] - e["x"]) * e["w"],
        ),
        f"(x - {a})/(({b} - {a}) + {eps})": (
            "sum",
            lambda f, e, r: (e["x"] - r[a]) / ((r[b] - r[a]) + f.number(eps)),
        ),
        f"y*((x - {a})/(({b} - {c}) + {eps}))": (
            "sum",
            lambda f, e, r: e["y"] * ((e["x"] - r[a]) / ((r[b] - r[c]) + f.number(eps))),
        ),
        f"w*x/({a} + {eps})": (
            "sum",
            lambda f, e, r: e["w"] * e["x"] / (r[a] + f.number(eps)),
        ),
        f"max ((x - {a}) + {eps})": ("max", lambda f, e, r: (e["x"] - r[a]) + f.number(eps)),
        f"min ((x - {a}) - {b})": ("min", lambda f, e, r: (e["x"] - r[a]) - r[b]),
        f"((x - {a}) - {b})^2": (
            "sum",
            lambda f, e, r: ((e["x"] - r[a]) - r[b]) * ((e["x"] - r[a]) - r[b]),
        ),
    }
    if tops and known[top] == "max":
        found[f"exp(x - {top})"] = ("sum", lambda f, e, r: f.exp(e["x"] - r[top]))
        found[f"exp(x - {top})*(x - {a})"] = (
            "sum",
            lambda f, e, r: f.exp(e["x"] - r[top]) * (e["x"] - r[a]),
        )
        found[f"exp(x - {top})*y"] = ("sum", lambda f, e, r: f.exp(e["x"] - r[top]) * e["y"])
    return found


def _output(rng: np.random.Generator, known: dict[str, str]) -> tuple[Term, str]:
    names = list(known)
    a, b, c = (str(rng.choice(names)) for _ in range(3))
    eps = float(rng.choice(EPSILONS))
    choices: dict[str, Term] = {
        f"(x - {a})/(({b} - {a}) + {eps})": lambda f, e, r: (
            (e["x"] - r[a]) / ((r[b] - r[a]) + f.number(eps))
        ),
        f"(x - {a})/sqrt(|{b}| + {eps})": lambda f, e, r: (
            (e["x"] - r[a]) / f.sqrt(f.abs(r[b]) + f.number(eps))
        ),
        f"x/({a} + {eps})": lambda f, e, r: e["x"] / (r[a] + f.number(eps)),
        f"((x - {a}) + {eps})*w + y": lambda f, e, r: (
            ((e["x"] - r[a]) + f.number(eps)) * e["w"] + e["y"]
        ),
        f"((x - {a}) - {b}) - {c}": lambda f, e, r: ((e["x"] - r[a]) - r[b]) - r[c],
    }
    label = str(rng.choice(list(choices)))
    return choices[label], label


def draw(rng: np.random.Generator) -> Random:
    """A cascade of two to four reductions, some divided by the number of elements."""
    known: dict[str, str] = {}
    stages: list[Stage] = []
    texts: list[str] = []
    for number in range(int(rng.integers(2, 5))):
        stage, text = _stage(rng, known, number)
        stages.append(stage)
        texts.append(text)
        known[stage.name] = stage.by if text.endswith(" x") else "other"
        if stage.by == "sum" and rng.random() < 0.6:
            mean = f"m{number}"
            stages.append(Stage(mean, "", _mean_of(stage.name)))
            texts.append(f"{mean} = {stage.name}/n")
            known[mean] = "mean" if text.endswith("sum x") else "other"
    output, label = _output(rng, known) if rng.random() < 0.5 else (None, "")
    return Random(tuple(stages), output, "; ".join([*texts, *([label] if label else [])]))


def _mean_of(name: str) -> Term:
    return lambda f, e, r: r[name] / f.number(float(e["n"]))


def function(cascade: Random, rows: int, length: int) -> Any:
    """The cascade as blocks of s_tir; its results, or its elements, are what it stores."""
    inputs = {name: te.placeholder((rows, length), "float32", name) for name in ELEMENTS}
    made: dict[str, Any] = {}

    def term(stage: Term, i: Any, j: Any) -> Any:
        elements = {name: each[i, j] for name, each in inputs.items() if j is not None}
        elements |= {"i": i, "j": j, "n": length}
        return stage(OfTensors, elements, {name: each[i] for name, each in made.items()})

    by = {"sum": te.sum, "max": te.max, "min": te.min}

    def block(stage: Stage) -> Any:
        axis = te.reduce_axis((0, length), f"k_{stage.name}")
        if not stage.by:
            return lambda i: term(stage.term, i, None)
        return lambda i: by[stage.by](term(stage.term, i, axis), axis=axis)

    for stage in cascade.stages:
        made[stage.name] = te.compute((rows,), block(stage), name=stage.name)
    last = made[cascade.stages[-1].name]
    if cascade.output is None:
        out = te.compute((rows,), lambda i: last[i] * tirx.const(1.0, "float32"), name="out")
    else:
        wanted = cascade.output
        out = te.compute((rows, length), lambda i, j: term(wanted, i, j), name="out")
    return te.create_prim_func([*inputs.values(), out])


def separate(cascade: Random, arrays: Mapping[str, np.ndarray], dtype: Any) -> np.ndarray:
    """A pass for each stage, in a type."""
    f = OfArrays(dtype)
    elements: dict[str, Any] = {name: each.astype(dtype) for name, each in arrays.items()}
    rows, length = arrays["x"].shape
    elements |= {"i": np.arange(rows)[:, None], "j": np.arange(length)[None, :], "n": length}
    made: dict[str, Any] = {}
    by = {"sum": np.sum, "max": np.max, "min": np.min}
    with np.errstate(all="ignore"):
        for stage in cascade.stages:
            found = stage.term(f, elements, made)
            if stage.by:
                found = by[stage.by](np.broadcast_to(found, (rows, length)), axis=1, keepdims=True)
            made[stage.name] = found
        if cascade.output is None:
            return np.asarray(made[cascade.stages[-1].name])[:, 0]
        return np.broadcast_to(cascade.output(f, elements, made), (rows, length))
