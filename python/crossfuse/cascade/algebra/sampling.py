"""The rank of a term on a random sample: a filter before proofs, and a word in refusals."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

#: Samples of elements, and of results.
SIZE = 24
#: Singular values below this part of the largest are rounding.
_SMALL = 1e-9


def sample_rank(
    term: sympy.Expr, elements: Sequence[sympy.Symbol], results: Sequence[sympy.Symbol]
) -> int | None:
    """The rank of the matrix of a term's values, elements in its rows and results in its columns.

    Parameters
    ----------
    term : sympy.Expr
        A stage's term.
    elements, results : Sequence[sympy.Symbol]
        What is drawn for each row, and for each column. Other symbols are drawn once.

    Returns
    -------
    int | None
        At most `SIZE`; None where a value is no finite number.
    """
    import numpy as np

    from crossfuse.cascade.numeric import function

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
