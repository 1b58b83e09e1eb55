"""Random cascades of narrow types, masks, weights of columns, residuals and several outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx

from cpu.fuzz.row_cascades import EPSILONS, OfArrays, OfTensors, Random, Stage, Term

DTYPES = ("float32", "float16", "bfloat16")
#: Elements of rows; g is one for each column, b one for each row.
OF_ROWS = ("x", "y", "w")
#: Where rows lie, and how far apart their elements.
PLACES = (
    *((0.0, 1.0), (1.0, 1e-3), (1e2, 1e-3), (1e2, 1.0), (1e4, 1e-3), (1e4, 1.0), (1e5, 1.0)),
    *((1e5, 1e3), (0.0, 1e3), (0.0, 1e-3)),
)
#: What else rows of x are.
SPECIAL = (
    *("constant", "zeros", "denormal", "one huge", "minus infinite", "infinite"),
    "all minus infinite",
)
#: Kinds of rows, and rows of each.
KINDS, ROWS = len(PLACES) + len(SPECIAL), 2
#: Elements of x that count: all, the first of each row, those that flags show, those up to a row's
#: own place.
MASKS = ("none", "length", "flags", "causal")


@dataclass(frozen=True)
class Typed:
    """A cascade, and how its tensors lie.

    Attributes
    ----------
    cascade : Random
        Its stages, and what is wanted of elements.
    dtype : str
        Of x, y, g, b and of the outputs over elements; w is float32.
    mask : str
        One of `MASKS`.
    rows : tuple[int, ...]
        One or two extents.
    length : int
        Of the axis that is reduced.
    axis : int
        Where the axis lies among those of x.
    residual : bool
        Whether x is a sum of two tensors.
    stored : str
        A stage that is stored too, or empty.
    """

    cascade: Random
    dtype: str
    mask: str
    rows: tuple[int, ...]
    length: int
    axis: int
    residual: bool
    stored: str

    @property
    def text(self) -> str:
        """What it is, for messages."""
        parts = (self.dtype, f"mask {self.mask}", f"rows {self.rows} x {self.length}")
        more = (f"axis {self.axis}", "residual" if self.residual else "", self.stored)
        return "; ".join([self.cascade.text, *parts, *filter(None, more)])


def _first(masked: bool) -> dict[str, tuple[str, Term]]:
    """Terms over elements; z is x where the mask shows it, and -oo elsewhere."""
    found: dict[str, tuple[str, Term]] = {
        "x": ("sum", lambda f, e, r: e["x"]),
        "max z": ("max", lambda f, e, r: e["z"]),
        "min x": ("min", lambda f, e, r: e["x"]),
        "max |x|": ("max", lambda f, e, r: f.abs(e["x"])),
        "x*x": ("sum", lambda f, e, r: e["x"] * e["x"]),
        "w*x": ("sum", lambda f, e, r: e["w"] * e["x"]),
        "x*g": ("sum", lambda f, e, r: e["x"] * e["g"]),
        "x + y": ("sum", lambda f, e, r: e["x"] + e["y"]),
        "(x + b)": ("sum", lambda f, e, r: e["x"] + e["b"]),
    }
    if masked:
        found["seen x"] = ("sum", lambda f, e, r: f.where(e["seen"], e["x"]))
    return found


def _later(rng: np.random.Generator, known: Mapping[str, str]) -> dict[str, tuple[str, Term]]:
    names = list(known)
    a, b = (str(rng.choice(names)) for _ in range(2))
    eps = float(rng.choice(EPSILONS))
    found: dict[str, tuple[str, Term]] = {
        f"(x - {a})": ("sum", lambda f, e, r: e["x"] - r[a]),
        f"(x - {a})^2": ("sum", lambda f, e, r: (e["x"] - r[a]) * (e["x"] - r[a])),
        f"(x - {a})*(x - {b})*w": (
            "sum",
            lambda f, e, r: (e["x"] - r[a]) * (e["x"] - r[b]) * e["w"],
        ),
        f"(x - {a})*(y - {b})": ("sum", lambda f, e, r: (e["x"] - r[a]) * (e["y"] - r[b])),
        f"((x - {a})*g)": ("sum", lambda f, e, r: (e["x"] - r[a]) * e["g"]),
        f"(x - {a})/sqrt(|{b}| + {eps})": (
            "sum",
            lambda f, e, r: (e["x"] - r[a]) / f.sqrt(f.abs(r[b]) + f.number(eps)),
        ),
        f"max (x - {a})/(|{b}| + {eps})": (
            "max",
            lambda f, e, r: (e["x"] - r[a]) / (f.abs(r[b]) + f.number(eps)),
        ),
        f"min (x - {a})": ("min", lambda f, e, r: e["x"] - r[a]),
        f"w*(x/(|{a}| + {eps}))^2": (
            "sum",
            lambda f, e, r: (
                e["w"]
                * (e["x"] / (f.abs(r[a]) + f.number(eps)))
                * (e["x"] / (f.abs(r[a]) + f.number(eps)))
            ),
        ),
        f"seen (x - {a})^2": (
            "sum",
            lambda f, e, r: f.where(e["seen"], (e["x"] - r[a]) * (e["x"] - r[a])),
        ),
    }
    tops = [each for each in names if known[each] == "max z"]
    if tops:
        top = str(rng.choice(tops))
        found |= {
            f"exp(z - {top})": ("sum", lambda f, e, r: f.exp(e["z"] - r[top])),
            f"exp(z - {top})*y": ("sum", lambda f, e, r: f.exp(e["z"] - r[top]) * e["y"]),
            f"exp(z - {top})*w": ("sum", lambda f, e, r: f.exp(e["z"] - r[top]) * e["w"]),
            f"exp(z - {top})*(x - {a})": (
                "sum",
                lambda f, e, r: f.exp(e["z"] - r[top]) * (e["x"] - r[a]),
            ),
        }
        found[f"again exp(z - {top})"] = found[f"exp(z - {top})"]
    return found


def _output(rng: np.random.Generator, known: Mapping[str, str]) -> tuple[Term, str]:
    a, b, c = (str(rng.choice(list(known))) for _ in range(3))
    # What is subtracted from itself is 0 to the algebra, also where it is infinite.
    c = next((each for each in known if each != b), c) if c == b else c
    eps = float(rng.choice(EPSILONS))
    choices: dict[str, Term] = {
        f"(x - {a})/sqrt(|{b}| + {eps})*g + y": lambda f, e, r: (
            (e["x"] - r[a]) / f.sqrt(f.abs(r[b]) + f.number(eps)) * e["g"] + e["y"]
        ),
        f"(x - {a})/(({b} - {c}) + {eps})": lambda f, e, r: (
            (e["x"] - r[a]) / ((r[b] - r[c]) + f.number(eps))
        ),
        f"w*x/(|{a}| + {eps}) + b": lambda f, e, r: (
            e["w"] * e["x"] / (f.abs(r[a]) + f.number(eps)) + e["b"]
        ),
        f"(x - {a}) - {b}": lambda f, e, r: (e["x"] - r[a]) - r[b],
    }
    tops = [each for each in known if known[each] == "max z"]
    if tops:
        top = str(rng.choice(tops))
        choices[f"exp(z - {top})/{a}"] = lambda f, e, r: f.exp(e["z"] - r[top]) / r[a]
        choices[f"exp(z - {top})/(|{a}| + {eps}) + y"] = lambda f, e, r: (
            f.exp(e["z"] - r[top]) / (f.abs(r[a]) + f.number(eps)) + e["y"]
        )
    label = str(rng.choice(list(choices)))
    return choices[label], label


def _mean_of(name: str) -> Term:
    return lambda f, e, r: r[name] / f.number(float(e["n"]))


def _stages(rng: np.random.Generator, masked: bool) -> tuple[list[Stage], dict[str, str]]:
    """Two to four reductions, some divided by the number of elements, and what each is."""
    known: dict[str, str] = {}
    stages: list[Stage] = []
    for number in range(int(rng.integers(2, 5))):
        terms = _first(masked)
        if known and rng.random() < 0.8:
            terms = _later(rng, known)
        label = str(rng.choice(list(terms)))
        by, term = terms[label]
        stages.append(Stage(f"r{number}", by, term))
        known[f"r{number}"] = label
        if by == "sum" and rng.random() < 0.6:
            stages.append(Stage(f"m{number}", "", _mean_of(f"r{number}")))
            known[f"m{number}"] = f"mean of {label}"
    return stages, known


def draw(rng: np.random.Generator) -> Typed:
    """A cascade of rows of one or two axes, in one of the types."""
    mask = str(rng.choice(MASKS, p=[0.4, 0.2, 0.2, 0.2]))
    stages, known = _stages(rng, mask != "none")
    output, label = _output(rng, known) if rng.random() < 0.7 else (None, "")
    text = "; ".join([*(f"{name} = {what}" for name, what in known.items()), label])
    length = int(rng.choice([1, 7, 33, 65, 96, 128, 251]))
    flat = rng.random() < 0.6
    rows = (KINDS * ROWS,) if flat else (KINDS, ROWS)
    sums = [each.name for each in stages if each.by]
    return Typed(
        Random(tuple(stages), output, text),
        dtype=str(rng.choice(DTYPES)),
        mask=mask,
        rows=rows,
        length=length,
        axis=int(rng.integers(0, len(rows) + 1)) if rng.random() < 0.3 else len(rows),
        residual=bool(rng.random() < 0.25),
        stored=str(rng.choice(sums)) if output is not None and rng.random() < 0.3 else "",
    )


def function(typed: Typed) -> Any:
    """The cascade as blocks of s_tir: outputs are ``out``, and ``also`` where a stage is stored."""
    length = typed.length
    shape = (*typed.rows[: typed.axis], length, *typed.rows[typed.axis :])
    wide = "float32"
    given = {
        name: te.placeholder(shape, wide if name == "w" else typed.dtype, name) for name in OF_ROWS
    }
    given["g"] = te.placeholder((length,), typed.dtype, "g")
    given["b"] = te.placeholder(typed.rows, typed.dtype, "b")
    if typed.residual:
        given["x2"] = te.placeholder(shape, typed.dtype, "x2")
    if typed.mask == "length":
        given["lengths"] = te.placeholder(typed.rows, "int32", "lengths")
    if typed.mask == "flags":
        given["flags"] = te.placeholder(shape, "bool", "flags")
    made: dict[str, Any] = {}

    def seen(i: tuple[Any, ...], j: Any) -> Any:
        if typed.mask == "length":
            return j < given["lengths"][i]
        if typed.mask == "flags":
            return given["flags"][(*i[: typed.axis], j, *i[typed.axis :])]
        if typed.mask == "causal":
            return j <= i[0]
        return tirx.const(True, "bool")

    def elements(i: tuple[Any, ...], j: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"n": length, "i": i[0], "b": given["b"][i].astype(wide)}
        if j is None:
            return found
        at = (*i[: typed.axis], j, *i[typed.axis :])
        found |= {name: given[name][at].astype(wide) for name in OF_ROWS}
        if typed.residual:
            found["x"] = found["x"] + given["x2"][at].astype(wide)
        found |= {"g": given["g"][j].astype(wide), "seen": seen(i, j), "z": found["x"]}
        if typed.mask != "none":
            found["z"] = tirx.if_then_else(found["seen"], found["x"], tirx.const(-np.inf, wide))
        return found

    by = {"sum": te.sum, "max": te.max, "min": te.min}

    def block(stage: Stage) -> Callable[..., Any]:
        axis = te.reduce_axis((0, length), f"k_{stage.name}")

        def body(*i: Any) -> Any:
            results = {name: each[i] for name, each in made.items()}
            term = stage.term(OfTensors, elements(i, axis if stage.by else None), results)
            return by[stage.by](term, axis=axis) if stage.by else term

        return body

    for stage in typed.cascade.stages:
        made[stage.name] = te.compute(typed.rows, block(stage), name=stage.name)
    last, wanted = made[typed.cascade.stages[-1].name], typed.cascade.output
    outputs = []
    if wanted is None:
        outputs.append(
            te.compute(typed.rows, lambda *i: last[i] * tirx.const(1.0, wide), name="out")
        )
    else:
        term = wanted

        def element(*at: Any) -> Any:
            i, j = (*at[: typed.axis], *at[typed.axis + 1 :]), at[typed.axis]
            results = {name: each[i] for name, each in made.items()}
            return term(OfTensors, elements(i, j), results).astype(typed.dtype)

        outputs.append(te.compute(shape, element, name="out"))
    if typed.stored:
        stored = made[typed.stored]
        outputs.append(
            te.compute(typed.rows, lambda *i: stored[i] * tirx.const(1.0, wide), name="also")
        )
    return te.create_prim_func([*given.values(), *outputs])


def separate(
    typed: Typed,
    arrays: Mapping[str, np.ndarray],
    dtype: Any,
    order: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """A pass for each stage, in a type; sums are taken in an order of the elements.

    Parameters
    ----------
    typed : Typed
        The cascade.
    arrays : Mapping[str, numpy.ndarray]
        Inputs, rows as in `typed.rows`.
    dtype : Any
        What is computed in.
    order : numpy.ndarray | None
        Of the elements of a row.

    Returns
    -------
    dict[str, numpy.ndarray]
        ``out`` as (rows, length) or (rows,), and ``also``; in `dtype`, not rounded. ``lost``: rows
        in which a sum is no number, an extreme is of NaN, which kernels drop, or of nothing but
        infinities: exponentials are 0 there for separate passes' NaN (docs/cascades.md). Or a sum
        is infinite by an element that a mask hides from others: distances from its mean are NaN.
    """
    f, length = OfArrays(dtype), typed.length
    order = np.arange(length) if order is None else order
    count = int(np.prod(typed.rows))
    e: dict[str, Any] = {
        name: rows_of(typed, arrays[name])[:, order].astype(dtype) for name in OF_ROWS
    }
    if typed.residual:
        e["x"] = e["x"] + rows_of(typed, arrays["x2"])[:, order].astype(dtype)
    e |= {"g": arrays["g"][order].astype(dtype)[None, :], "n": length}
    e["b"] = arrays["b"].reshape(count, 1).astype(dtype)
    shown = seen(typed, arrays)[:, order]
    e |= {"seen": shown, "z": np.where(shown, e["x"], np.array(-np.inf, dtype))}
    made: dict[str, Any] = {}
    lost = np.zeros(count, bool)
    by = {"sum": np.sum, "max": np.max, "min": np.min}
    with np.errstate(all="ignore"):
        for stage in typed.cascade.stages:
            found = stage.term(f, e, made)
            if stage.by:
                whole = np.broadcast_to(found, (count, length))
                found = by[stage.by](whole, axis=1, keepdims=True)
                nothing = {"sum": np.nan, "max": -np.inf, "min": np.inf}[stage.by]
                bad = np.isnan(found) | (found == nothing)
                if stage.by == "sum":
                    bad |= np.isinf(found) & (np.isinf(e["x"]) & ~shown).any(1, keepdims=True)
                lost |= bad[:, 0]
            made[stage.name] = found
        last, wanted = made[typed.cascade.stages[-1].name], typed.cascade.output
        if wanted is None:
            found = {"out": last[:, 0]}
        else:
            back = np.argsort(order)
            found = {"out": np.broadcast_to(wanted(f, e, made), (count, length))[:, back]}
        if typed.stored:
            found["also"] = made[typed.stored][:, 0]
    return {**found, "lost": lost}


def seen(typed: Typed, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which elements of each row the mask shows."""
    count = int(np.prod(typed.rows))
    place = np.arange(typed.length)[None, :]
    if typed.mask == "length":
        return place < arrays["lengths"].reshape(count, 1)
    if typed.mask == "flags":
        return rows_of(typed, arrays["flags"])
    if typed.mask == "causal":
        return place <= np.repeat(np.arange(typed.rows[0]), count // typed.rows[0])[:, None]
    return np.ones((count, typed.length), bool)


def rows_of(typed: Typed, array: np.ndarray) -> np.ndarray:
    """A tensor over elements as (rows, length)."""
    return np.moveaxis(array, typed.axis, -1).reshape(-1, typed.length)


def drawn(typed: Typed, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs: rows of every kind, y about the same place, weights, masks of every length."""
    of_rows: dict[str, list[np.ndarray]] = {name: [] for name in (*OF_ROWS, "x2")}
    of_one: list[np.ndarray] = []
    shape = (ROWS, typed.length)
    for place, spread in PLACES:
        about = min(place, 3e4) if typed.dtype == "float16" else place
        for name in "xy":
            of_rows[name].append(about + spread * rng.standard_normal(shape))
        of_rows["x2"].append(spread * rng.standard_normal(shape))
        of_one.append(about + spread * rng.standard_normal(ROWS))
    for kind in SPECIAL:
        of_rows["x"].append(_special(kind, rng.standard_normal(shape), typed.dtype))
        of_rows["y"].append(rng.standard_normal(shape))
        alike = kind in ("constant", "zeros", "denormal")
        of_rows["x2"].append(np.zeros(shape) if alike else rng.standard_normal(shape))
        of_one.append(rng.standard_normal(ROWS))
    of_rows["w"] = [rng.uniform(0.1, 2.0, shape) for _ in range(KINDS)]
    dtype = np_dtype(typed.dtype)
    found = {
        name: _laid(typed, np.concatenate(of_rows[name])).astype(
            np.float32 if name == "w" else dtype
        )
        for name in (*OF_ROWS, *(["x2"] if typed.residual else []))
    }
    found["g"] = (1 + 0.5 * rng.standard_normal(typed.length)).astype(dtype)
    found["b"] = np.concatenate(of_one).reshape(typed.rows).astype(dtype)
    if typed.mask == "length":
        lengths = rng.integers(0, typed.length + 1, KINDS * ROWS)
        lengths[[0, 2, 5, 7]] = typed.length, 0, 1, typed.length
        found["lengths"] = lengths.reshape(typed.rows).astype(np.int32)
    if typed.mask == "flags":
        flags = rng.random((KINDS * ROWS, typed.length)) < 0.6
        flags[0], flags[3] = True, False
        found["flags"] = _laid(typed, flags)
    return found


def np_dtype(dtype: str) -> Any:
    """Numpy's name of a type."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _special(kind: str, x: np.ndarray, dtype: str) -> np.ndarray:
    half = dtype == "float16"
    if kind in ("constant", "zeros", "all minus infinite"):
        return np.full_like(x, {"constant": 100.1, "zeros": 0.0}.get(kind, -np.inf))
    if kind == "denormal":
        return x * (1e-6 if half else 1e-41)
    one = {"one huge": 6e4 if half else 1e37, "infinite": np.inf, "minus infinite": -np.inf}
    x[:, x.shape[1] // 2] = one[kind]
    return x


def _laid(typed: Typed, rows: np.ndarray) -> np.ndarray:
    """Rows as the tensor over elements."""
    whole = rows.reshape(*typed.rows, typed.length)
    return np.ascontiguousarray(np.moveaxis(whole, -1, typed.axis))
