"""Stages that several patterns have."""

from __future__ import annotations

import sympy

from cascade_patterns.symbols import (
    MEAN,
    W_,
    N,
    a_,
    b_,
    dp,
    exp,
    g,
    i,
    k,
    l,
    mass,
    px,
    py,
    pz,
    real,
    u,
    v,
    w,
    x,
    x2,
    y_,
)
from crossfuse.cascade.spec import MAX, SUM, Cascade, Stage


def softmax(of: sympy.Expr = x, tag: str = "") -> tuple[Stage, ...]:
    largest = real(f"m{tag}")
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


def mean_stages() -> tuple[Stage, ...]:
    return (total(x, "S"), total((x - MEAN) ** 2, "M"))


def masked(of: sympy.Expr, test: sympy.Basic) -> sympy.Expr:
    return sympy.Piecewise((of, test), (-sympy.oo, True))


def seen(of: sympy.Expr) -> sympy.Expr:
    return sympy.Piecewise((of, l <= i), (0, True))
