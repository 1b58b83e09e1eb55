"""Separates terms into sums of products ``G(x) * H(d)`` by identities, or refuses them.

Every rule is an identity of real numbers, so that the products are proved to equal the term:

* ``exp(u + v) = exp(u) * exp(v)``, ``b**(u + v)`` likewise;
* ``(u * v)**p = u**p * v**p`` for integer ``p``, or where ``v`` is proved not to be negative;
* ``|u * v| = |u| * |v|``, ``log(u * v) = log(u) + log(v)`` for positive factors;
* ``max(u * v, w * v) = v * max(u, w)`` for ``v`` proved not to be negative;
* products and powers of sums of one sign are multiplied out;
* choices by conditions over elements are taken apart side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

import sympy

from crossfuse.cascade.algebra.exponents import has_one_sign, nonnegative
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.expressions.functions import Fence, unopened
from crossfuse.cascade.spec import Stage
from crossfuse.errors import CascadeRefused, RefusedError, refuse

#: One ``G(x) * H(d)``.
Product = tuple[sympy.Expr, sympy.Expr]

#: Largest power of a sum that is multiplied out, and most products that are tried.
_LARGEST_POWER, _MOST_PRODUCTS = 8, 512


class Coupled(Exception):
    """A part of a term that couples elements and results: the smallest that no rule takes apart."""

    def __init__(self, part: sympy.Basic) -> None:
        super().__init__(str(part))
        self.part = part


class Cancels(Coupled):
    """A sum that is not multiplied out: its parts may be far larger than it is."""


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
        whole = sympy.Add(*(g * h for g, h in right))
        if len(left) * len(right) > _MOST_PRODUCTS:
            raise Coupled(whole)
        if min(len(left), len(right)) > 1 and self.cancels(left + right):
            raise Cancels(whole)
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
        return [(term.func(g), term.func(h))]

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
    # Not divided by: a mask has no reciprocal.
    rest = [[each for each in sympy.Mul.make_args(one) if each not in common] for one in values]
    return sympy.Mul(*common), [sympy.Mul(*each) for each in rest]


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


def refused(rule: str, stage: str, *, found: object, limit: str, instead: str) -> RefusedError:
    """The refusal of a stage, to raise.

    Rules are ``"cascade-separable"``, ``"cascade-sign"`` and ``"cascade-form"``; for the texts see
    `crossfuse.errors.Refusal`.
    """
    where = f"stage {stage}"
    return refuse(CascadeRefused, rule, where, found=found, limit=limit, instead=instead)


# The rank of a term on a random sample: a filter before proofs, and a hint in refusals.

#: Samples of elements, and of results.
SIZE = 24
#: Singular values below this part of the largest are rounding.
_SMALL = 1e-9


def sample_rank(
    term: sympy.Expr, elements: Sequence[sympy.Symbol], results: Sequence[sympy.Symbol]
) -> int | None:
    """The rank of a term's values, with elements in rows of the matrix and results in its columns.

    It is at most `SIZE`; None where a value is no finite number. Other symbols are drawn once.
    """
    import numpy as np

    from crossfuse.cascade.expressions.functions import function

    rng = np.random.default_rng(20)
    rest = sorted(term.free_symbols - set(elements) - set(results), key=lambda each: str(each.name))
    symbols = [*elements, *results, *rest]
    shapes = [(SIZE, 1)] * len(elements) + [(1, SIZE)] * len(results) + [(1, 1)] * len(rest)
    values = [_draw(rng, each, shape) for each, shape in zip(symbols, shapes, strict=True)]
    with np.errstate(all="ignore"):
        matrix = np.broadcast_to(function(symbols, term)(*values), (SIZE, SIZE))
    if not np.isfinite(matrix).all():
        return None
    scale = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return int((scale > _SMALL * scale[0]).sum()) if scale[0] > 0 else 0


def _draw(rng: object, symbol: sympy.Symbol, shape: tuple[int, int]) -> object:
    import numpy as np

    assert isinstance(rng, np.random.Generator)
    if symbol.is_integer:
        return rng.integers(1, 9, shape).astype(np.float64)
    if symbol.is_nonnegative:
        return rng.uniform(0.5, 2.0, shape)
    return rng.normal(0.0, 1.0, shape)


#: Most products that a sum is split into.
MOST_PRODUCTS = 16


def verified(
    stage: Stage,
    term: sympy.Expr,
    found: Sequence[Product],
    elements: Iterable[sympy.Symbol],
    results: Sequence[sympy.Symbol],
) -> int | None:
    """Check a separation against a sample of the term, whose rank it returns.

    The products are equal to the term by identities; a rank above their number would mean that one
    of these was applied where it does not hold. Such a stage is refused, as is one of more than
    `MOST_PRODUCTS` products.
    """
    used = sorted(term.free_symbols & set(elements), key=lambda each: str(each.name))
    rank = sample_rank(term, used, results)
    limit = MOST_PRODUCTS if rank is None else max(rank, 1)
    if len(found) > MOST_PRODUCTS or (rank is not None and rank > len(found)):
        raise refused(
            "cascade-separable",
            stage.name,
            found=f"{len(found)} products for a term of rank {rank} on a {SIZE} x {SIZE} sample",
            limit=f"at most {MOST_PRODUCTS} products, and at least {limit}",
            instead="split the stage's term, or cut the cascade before this stage",
        )
    return rank


def words(rank: int | None, count: int) -> str:
    """The proof of a separation in words, for `Step`."""
    sampled = "not sampled" if rank is None else f"rank {rank} on a {SIZE} x {SIZE} sample"
    products = "one product" if count == 1 else f"{count} products"
    return f"taken apart by identities into {products}; {sampled}"


def coupled(
    stage: Stage,
    term: sympy.Expr,
    part: sympy.Basic,
    elements: Sequence[sympy.Symbol],
    results: Sequence[sympy.Symbol],
    spelt: Callable[[sympy.Basic], sympy.Basic],
) -> RefusedError:
    """The refusal of a term whose elements and results cannot be separated.

    `part` is the smallest part that couples them; `spelt` writes expressions over slots for
    messages.
    """
    try:
        rank = sample_rank(term, elements, results)
    except (NotImplementedError, TypeError, ValueError, NameError):
        rank = None
    ours = ", ".join(str(spelt(each)) for each in elements if each in part.free_symbols)
    theirs = ", ".join(str(spelt(each)) for each in results if each in part.free_symbols)
    sampled = "no rank was sampled" if rank is None else f"rank {rank} on a {SIZE} x {SIZE} sample"
    return refused(
        "cascade-separable",
        stage.name,
        found=f"{written(spelt(part))}, which couples {ours or 'elements'} with "
        f"{theirs or 'results'} ({sampled})",
        limit="a finite sum of products of elements and of results",
        instead=_instead(stage, part),
    )


def cancelling(stage: Stage, part: sympy.Basic) -> RefusedError:
    """The refusal of a term with a sum, `part`, that would cancel if it were multiplied out."""
    return refused(
        "cascade-cancels",
        stage.name,
        found=f"a product of {written(part)}: multiplied out, its parts may be far larger than it "
        "is, and cancel",
        limit="sums of one sign, and distances from a mean or an extreme of the same elements",
        instead="divide a sum by the number of its elements where its mean is meant, or cut the "
        "cascade before this stage: the finished results need a second pass",
    )


def _instead(stage: Stage, part: sympy.Basic) -> str:
    magnitude = isinstance(part, sympy.Abs)
    if stage.monoid.name == "max" and magnitude:
        return (
            "reduce the maximum and the minimum of the elements; max|x - c| is "
            "max(maximum - c, c - minimum)"
        )
    name = type(part).__name__
    if name in ("floor", "ceiling", "rint", "trunc", "round_away", "Mod"):
        return "round by the stage's cast, whose error is accepted as approximate"
    return "cut the cascade before this stage: the finished results need a second pass"


# Takes factors that addends share out of sums.
#
# ``exp(x - m)/s * (d - r/s)``, never ``d*exp(x - m)/s - r*exp(x - m)/s**2``: the two addends may be
# nearly equal, and each factor that both are rounded by is an error of their size.


def shared_out(
    expression: sympy.Expr, elements: Set[sympy.Basic], invariants: Set[sympy.Basic] = frozenset()
) -> sympy.Expr:
    """Take powers of what depends on results out of addends that share them.

    With them come all other powers that these addends share. Numbers stay where they are, and so do
    factors of a product that are the same for all elements.
    """
    if isinstance(expression, Fence):
        return Fence(shared_out(expression.args[0], elements, invariants))
    if isinstance(expression, sympy.Mul) and expression.free_symbols & elements:
        return unopened(*(shared_out(each, elements, invariants) for each in expression.args))
    if isinstance(expression, sympy.exp):
        # The largest element has the exponent 0, whatever scales the distances.
        return sympy.exp(shared_out(expression.args[0], elements, invariants))
    if not isinstance(expression, sympy.Add):
        return expression
    # A fenced sum that becomes a product needs no fence, and is an addend like others.
    expression = sympy.Add(*(shared_out(each, elements, invariants) for each in expression.args))
    powers = {each: _powers(each) for each in expression.args}
    count = Counter(
        (base, bool(power > 0))
        for each in powers.values()
        for base, power in each.items()
        if base.free_symbols - elements - invariants
    )
    found = [key for key, number in count.items() if number > 1]
    if not found:
        return expression
    base, above = max(found, key=lambda key: (count[key], str(key)))
    members = [each for each, of in powers.items() if base in of and (of[base] > 0) == above]
    shared = _common([powers[each] for each in members])
    factor = sympy.Mul(*(base**power for base, power in shared.items()))
    inner = sympy.Add(*(Fence(_without(each, shared)) for each in members))
    rest = [each for each in expression.args if each not in members]
    return sympy.Add(factor * shared_out(inner, elements, invariants), *rest)


#: Exponents by base.
_Powers = dict[sympy.Expr, sympy.Expr]


def _powers(product: sympy.Expr) -> _Powers:
    found: _Powers = {}
    for each in sympy.Mul.make_args(product):
        base, power = _power(each)
        if not base.is_number and power.is_Rational:
            found[base] = power
    return found


def _power(factor: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Base and exponent; an exponential is a base of its own."""
    if isinstance(factor, sympy.exp):
        return factor, sympy.S.One
    base, power = factor.as_base_exp()
    return base, power


def _without(product: sympy.Expr, shared: _Powers) -> sympy.Expr:
    """A product without the powers that are taken out of it."""
    left = []
    for each in sympy.Mul.make_args(product):
        base, power = _power(each)
        left.append(base ** (power - shared[base]) if base in shared else each)
    return unopened(*left)


def _common(several: list[_Powers]) -> _Powers:
    """The powers that all of several have, of each the one nearest to 0."""
    first, *others = several
    found = {}
    for base, power in first.items():
        every = [power, *(each.get(base, sympy.S.Zero) for each in others)]
        if all(each > 0 for each in every) or all(each < 0 for each in every):
            found[base] = min(every, key=abs)
    return found
