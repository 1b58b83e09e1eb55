"""Checks of a separation, and refusals of terms that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import sympy

from crossfuse.cascade.algebra.separation import Product
from crossfuse.cascade.algebra.writing import written
from crossfuse.cascade.spec import Stage
from crossfuse.errors import CascadeRefused, RefusedError, refuse


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

    from crossfuse.cascade.expressions.to_numpy import function

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


def checked(
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
