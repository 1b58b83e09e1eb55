"""Separates terms into sums of products ``G(x) * H(d)`` by identities.

Every rule is an identity of real numbers, so that the products are proved to equal the term:

* ``exp(u + v) = exp(u) * exp(v)``, ``b**(u + v)`` likewise;
* ``(u * v)**p = u**p * v**p`` for integer ``p``, or where ``v`` is proved not to be negative;
* ``|u * v| = |u| * |v|``, ``log(u * v) = log(u) + log(v)`` for positive factors;
* ``max(u * v, w * v) = v * max(u, w)`` for ``v`` proved not to be negative;
* products and powers of sums of one sign are multiplied out;
* choices by conditions over elements are taken apart side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from crossfuse.cascade.algebra.exponents import has_one_sign, nonnegative
from crossfuse.cascade.expressions.functions import Fence, unopened

#: One ``G(x) * H(d)``.
Product = tuple[sympy.Expr, sympy.Expr]

#: Largest power of a sum that is multiplied out, and most products that are tried.
_LARGEST_POWER, _MOST_PRODUCTS = 8, 512


class Coupled(Exception):
    """A part of a term that couples elements and results: the smallest that no rule takes apart."""

    def __init__(self, part: sympy.Basic) -> None:
        super().__init__(str(part))
        self.part = part


def products(
    term: sympy.Expr,
    elements: Iterable[sympy.Symbol],
    results: Iterable[sympy.Symbol],
    *,
    near: Iterable[sympy.Symbol] | None = None,
) -> list[Product]:
    """Separate a term into as few products as grouping gives.

    Each is one of `elements` and one of `results` of earlier stages; other symbols are invariant
    and may stand in both. `near` holds elements that are distances, and results that are moments of
    them. If given, sums that may be of either sign are multiplied by each other only if they are of
    distances: of others large numbers may cancel, of which the sums were small. A part that no rule
    separates raises `Coupled`.
    """
    parts = _Parts(
        frozenset(elements), frozenset(results), None if near is None else frozenset(near)
    )
    return parts.grouped(parts.take(term))


def grouped(
    parts: Sequence[Product], elements: Iterable[sympy.Symbol], results: Iterable[sympy.Symbol]
) -> list[Product]:
    """Join products of equal factors, until none are left.

    Factors over invariants only stand on the side where they let more be joined: first with H, so
    that equal G meet, then with G, so that equal H do.
    """
    along, before = tuple(elements), tuple(results)
    found = list(parts)
    while True:
        factors: dict[sympy.Expr, sympy.Expr] = {}
        for g, h in found:
            still, moving = g.as_independent(*along, as_Add=False)
            factors[moving] = factors.get(moving, sympy.S.Zero) + unopened(still, h)
        contexts: dict[sympy.Expr, sympy.Expr] = {}
        for g, h in factors.items():
            still, moving = h.as_independent(*before, as_Add=False)
            contexts[moving] = contexts.get(moving, sympy.S.Zero) + unopened(still, g)
        joined = [(g, h) for h, g in contexts.items() if g != 0 and h != 0]
        if len(joined) >= len(found) or len(joined) <= 1:
            return joined
        found = joined


class _Parts:
    def __init__(
        self,
        elements: frozenset[sympy.Symbol],
        results: frozenset[sympy.Symbol],
        near: frozenset[sympy.Symbol] | None,
    ) -> None:
        self.elements = elements
        self.results = results
        self.near = near

    def grouped(self, parts: Sequence[Product]) -> list[Product]:
        return grouped(parts, self.elements, self.results)

    def take(self, term: sympy.Expr) -> list[Product]:
        free = term.free_symbols
        if not free & self.results:
            return [(term, sympy.S.One)]
        if not free & self.elements:
            return [(sympy.S.One, term)]
        for kind, rule in _RULES:
            if isinstance(term, kind):
                found: list[Product] = rule(self, term)
                if len(found) > _MOST_PRODUCTS:
                    raise Coupled(term)
                return found
        raise Coupled(term)

    def single(self, part: sympy.Expr, whole: sympy.Expr) -> Product:
        found = self.grouped(self.take(part))
        if len(found) != 1:
            raise Coupled(whole)
        return found[0]

    def total(self, term: sympy.Expr) -> list[Product]:
        return self.grouped([part for each in term.args for part in self.take(each)])

    def inner(self, term: Fence) -> list[Product]:
        return self.take(term.args[0])

    def product(self, term: sympy.Expr) -> list[Product]:
        found: list[Product] = [(sympy.S.One, sympy.S.One)]
        for each in term.args:
            found = self.times(found, self.take(each))
        return found

    def times(self, left: list[Product], right: list[Product]) -> list[Product]:
        sums = min(len(left), len(right)) > 1
        if len(left) * len(right) > _MOST_PRODUCTS or (sums and self.cancels(left + right)):
            raise Coupled(sympy.Add(*(g * h for g, h in right)))
        return self.grouped([(g * k, h * m) for g, h in left for k, m in right])

    def cancels(self, parts: list[Product]) -> bool:
        """Whether the sum of these parts may be small beside the parts.

        Distances do not cancel so, nor do moments of them.
        """
        if self.near is None or has_one_sign(g * h for g, h in parts):
            return False
        moving = [g.free_symbols & self.elements for g, _ in parts]
        fixed = [h for (_, h), each in zip(parts, moving, strict=True) if not each]
        return any(each - self.near for each in moving) or any(
            h.free_symbols & self.results and not h.free_symbols & self.near for h in fixed
        )

    def power(self, term: sympy.Expr) -> list[Product]:
        base, exponent = term.args
        if exponent.free_symbols & (self.elements | self.results):
            return self.exponential(term, base, exponent)
        found = self.grouped(self.take(base))
        if len(found) > 1:
            if not (exponent.is_Integer and 0 < exponent <= _LARGEST_POWER):
                raise Coupled(term)
            raised = found
            for _ in range(int(exponent) - 1):
                raised = self.times(raised, found)
            return raised
        g, h = found[0]
        if not (exponent.is_integer or nonnegative(h) or nonnegative(g)):
            raise Coupled(term)
        return [(g**exponent, h**exponent)]

    def exponential(
        self, term: sympy.Expr, base: sympy.Expr, exponent: sympy.Expr
    ) -> list[Product]:
        if base.free_symbols & (self.elements | self.results):
            raise Coupled(term)
        g, h = self.addends(exponent)
        return [(base**g, base**h)]

    def exp(self, term: sympy.Expr) -> list[Product]:
        g, h = self.addends(term.args[0])
        return [(sympy.exp(g), sympy.exp(h))]

    def addends(self, term: sympy.Expr) -> Product:
        """A sum as one over elements and one over results; products of both are coupled."""
        ours, theirs = sympy.S.Zero, sympy.S.Zero
        for g, h in self.grouped(self.take(term)):
            if not h.free_symbols & self.results:
                ours += g * h
            elif not g.free_symbols & self.elements:
                theirs += g * h
            else:
                raise Coupled(g * h)
        return ours, theirs

    def magnitude(self, term: sympy.Expr) -> list[Product]:
        g, h = self.single(term.args[0], term)
        return [(sympy.Abs(g), sympy.Abs(h))]

    def logarithm(self, term: sympy.Expr) -> list[Product]:
        g, h = self.single(term.args[0], term)
        if not (nonnegative(g) and nonnegative(h)):
            raise Coupled(term)
        return [(sympy.log(g), sympy.S.One), (sympy.S.One, sympy.log(h))]

    def extreme(self, term: sympy.Expr) -> list[Product]:
        found = [self.single(each, term) for each in term.args]
        contexts = {h for g, h in found if g != 0}
        if len(contexts) != 1 or not nonnegative(next(iter(contexts))):
            raise Coupled(term)
        return [(term.func(*(g for g, _ in found)), contexts.pop())]

    def choice(self, term: sympy.Piecewise) -> list[Product]:
        free = set().union(*(each.free_symbols for _, each in term.args))
        if free & self.elements and free & self.results:
            raise Coupled(term)
        chosen = 1 if free & self.results else 0
        sides: list[dict[sympy.Expr, sympy.Expr]] = []
        for value, _ in term.args:
            parts = self.grouped(self.take(value)) if value != 0 else []
            sides.append({each[1 - chosen]: each[chosen] for each in parts})
        found: list[Product] = []
        for kept in {key: None for side in sides for key in side}:
            conditions = [each for _, each in term.args]
            values = [side.get(kept, sympy.S.Zero) for side in sides]
            shared, values = _shared(values)
            made = shared * sympy.Piecewise(*zip(values, conditions, strict=True))
            found.append((kept, made) if chosen else (made, kept))
        return found


def _shared(values: Sequence[sympy.Expr]) -> tuple[sympy.Expr, list[sympy.Expr]]:
    """Factors that all values but 0 have, and the values without them.

    An exponential of a maximum that stands in all sides of a choice keeps sums in range as one that
    stands in none.
    """
    factors = [sympy.Mul.make_args(each) for each in values if each != 0]
    common = [each for each in factors[0] if all(each in other for other in factors[1:])]
    shared = sympy.Mul(*common)
    return shared, [each / shared if each != 0 else each for each in values]


_RULES = (
    (sympy.Add, _Parts.total),
    (Fence, _Parts.inner),
    (sympy.Mul, _Parts.product),
    (sympy.exp, _Parts.exp),
    (sympy.Pow, _Parts.power),
    (sympy.Abs, _Parts.magnitude),
    (sympy.log, _Parts.logarithm),
    (sympy.Max | sympy.Min, _Parts.extreme),
    (sympy.Piecewise, _Parts.choice),
)
