"""Derivations of the functions in `cascade_functions`, written by hand."""

from __future__ import annotations

from typing import Any

import sympy

from crossfuse.cascade.derivation import Derivation, Slot, guarded, left, new, right, value
from crossfuse.cascade.monoid import MAX, SUM
from crossfuse.cascade.spec import Cascade


def _where(symbol: sympy.Symbol, is_: Any, then: Any, otherwise: Any) -> sympy.Expr:
    # Not evaluated: sympy takes a real number not to be an infinity.
    test = sympy.Eq(symbol, is_, evaluate=False)
    return sympy.Piecewise((then, test), (otherwise, True), evaluate=False)


def maximum(name: str, element: sympy.Expr) -> Slot:
    """The largest element; 0 stands in for that of a row without any."""
    return Slot(
        name,
        MAX,
        element,
        value(name),
        sympy.Max(left(name), right(name)),
        -sympy.oo,
        _where(new(name), -sympy.oo, sympy.S.Zero, new(name)),
    )


def exponentials(name: str, of: str, element: sympy.Expr) -> Slot:
    """The sum of ``exp(element - of)``; 1 stands in for that of a row without any."""
    merged = left(name) * sympy.exp(left(of) - guarded(of))
    merged += right(name) * sympy.exp(right(of) - guarded(of))
    return Slot(
        name,
        SUM,
        sympy.exp(element - guarded(of)),
        value(name) * sympy.exp(value(of) - guarded(of)),
        merged,
        sympy.S.Zero,
        _where(new(name), 0, sympy.S.One, new(name)),
    )


def total(name: str, element: sympy.Expr, guard: bool = False) -> Slot:
    """A plain sum; with `guard` 1 stands in for 0."""
    stand_in = _where(new(name), 0, sympy.S.One, new(name)) if guard else None
    merged = left(name) + right(name)
    return Slot(name, SUM, element, value(name), merged, sympy.S.Zero, stand_in)


def mean(name: str, weight: sympy.Expr, mass: str, at: sympy.Expr) -> Slot:
    """The weighted mean, moved by each tile's distances from where it was."""
    share = right(mass) / guarded(mass)
    return Slot(
        name,
        SUM,
        weight * (at - value(name)) / guarded(mass),
        value(name),
        left(name) + (right(name) - left(name)) * share,
        sympy.S.Zero,
    )


def spread(name: str, weight: sympy.Expr, mass: str, pairs: dict[str, sympy.Expr]) -> Slot:
    """Squares of distances from means, after Chan: `pairs` are means and coordinates."""
    squares = sum((at - new(each)) ** 2 for each, at in pairs.items())
    moved = sum((value(each) - new(each)) ** 2 for each in pairs)
    apart = sum((left(each) - right(each)) ** 2 for each in pairs)
    merged = left(name) + right(name) + apart * left(mass) * right(mass) / guarded(mass)
    carry = value(name) + value(mass) * moved
    return Slot(name, SUM, weight * squares, carry, merged, sympy.S.Zero)


def derive_softmax(cascade: Cascade) -> Derivation:
    (x,) = cascade.elements
    slots = (maximum("m", x), exponentials("s", "m", x))
    rows = {"Y": sympy.exp(x - guarded("m")) / guarded("s")}
    return Derivation(cascade, slots, {}, rows=rows)


def derive_cross_entropy(cascade: Cascade) -> Derivation:
    x = cascade.elements[0]
    picked = cascade.stage("picked").term
    slots = (maximum("m", x), exponentials("s", "m", x), total("picked", picked))
    result = value("m") + sympy.log(value("s")) - value("picked")
    return Derivation(cascade, slots, {}, results={"L": result})


def moments(x: sympy.Expr) -> tuple[Slot, ...]:
    return (
        total("n", sympy.S.One, guard=True),
        mean("mean", sympy.S.One, "n", x),
        spread("m2", sympy.S.One, "n", {"mean": x}),
    )


def derive_variance(cascade: Cascade) -> Derivation:
    (x,) = cascade.elements
    result = value("m2") / (cascade.length or 1)
    return Derivation(cascade, moments(x), {}, results={"V": result})


def derive_layer_norm(cascade: Cascade) -> Derivation:
    x, gamma, beta = cascade.elements
    scale = 1 / sympy.sqrt(value("m2") / (cascade.length or 1) + sympy.Rational(1, 100000))
    row = (x - value("mean")) * scale * gamma + beta
    return Derivation(cascade, moments(x), {}, rows={"Y": row})


def derive_inertia(cascade: Cascade) -> Derivation:
    mass, *places = cascade.elements
    names = [f"centre{i}" for i in range(3)]
    slots = (
        total("mass", mass, guard=True),
        *(mean(name, mass, "mass", at) for name, at in zip(names, places, strict=True)),
        spread("I", mass, "mass", dict(zip(names, places, strict=True))),
    )
    return Derivation(cascade, slots, {}, results={"I": value("I")})
