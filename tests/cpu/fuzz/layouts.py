"""Parts that generated schedules are made of: threads over a tile, staged operands, registers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Threads:
    """Threads of a CTA and how they lie over a tile.

    Attributes
    ----------
    y, x : int
        Extents; with y = 1 only threadIdx.x is bound.
    flat : bool
        Over the fused tile, or over its rows and columns.
    strided : bool
        Whether the elements of one thread lie apart, or next to each other.
    """

    y: int
    x: int
    flat: bool
    strided: bool


def rarely(draw: st.DrawFn, n: int) -> bool:
    """One time in `n`; shrinks to False."""
    # Neither end of the range: Hypothesis tries those more often than chance would.
    return draw(st.integers(0, 2 * n - 1)) in (n // 2 + 1, n + 1)


@st.composite
def extents(draw: st.DrawFn, largest: int, smallest: int = 1) -> int:
    """Extents: often powers of two and multiples of eight, often odd or prime."""
    round_numbers = [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96) if n >= smallest]
    round_numbers = [n for n in round_numbers if n <= largest]
    if draw(st.booleans()):
        return draw(st.sampled_from(round_numbers))
    return draw(st.integers(smallest, largest))


@st.composite
def threads(draw: st.DrawFn, rows: int, columns: int, share: int) -> Threads:
    """Threads that mostly divide a tile and a CTA's share of it; sometimes some are left over."""
    flat = draw(st.booleans())
    if flat:
        total = draw(near_divisors(share, 96))
        y = draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if total % d == 0]))
        return Threads(y, total // y, True, draw(st.booleans()))
    y = draw(near_divisors(gcd(rows, share), 8))
    x = draw(near_divisors(gcd(columns, max(1, share // y)), 16))
    return Threads(y, x, False, draw(st.booleans()))


def divisors(number: int, limit: int) -> list[int]:
    """Divisors of a number up to a limit."""
    return [d for d in range(1, min(number, limit) + 1) if number % d == 0]


@st.composite
def near_divisors(draw: st.DrawFn, number: int, limit: int) -> int:
    """A divisor, or one time in eight any number up to a little more."""
    if rarely(draw, 8):
        return draw(st.integers(1, min(number + 3, limit)))
    return draw(st.sampled_from(divisors(number, limit)))


def lay(sch: Any, row: Any, column: Any, layout: Threads) -> tuple[Any, list[Any]]:
    """Bind a tile to threads; the innermost thread loop, and the loops of a thread's elements."""
    if layout.flat:
        x, element = _spread(sch, sch.fuse(row, column), layout)
        return x, [element]
    if layout.strided:
        i, y = sch.split(row, [None, layout.y])
        j, x = sch.split(column, [None, layout.x])
        sch.reorder(i, j, y, x)
    else:
        y, i = sch.split(row, [layout.y, None])
        x, j = sch.split(column, [layout.x, None])
        sch.reorder(y, x, i, j)
    _bind(sch, y, x, layout)
    return x, [i, j]


def spread(sch: Any, loop: Any, layout: Threads) -> Any:
    """Bind a flat loop to threads; the innermost thread loop."""
    return _spread(sch, loop, layout)[0]


def _spread(sch: Any, loop: Any, layout: Threads) -> tuple[Any, Any]:
    if layout.strided:
        element, y, x = sch.split(loop, [None, layout.y, layout.x])
    else:
        y, x, element = sch.split(loop, [layout.y, layout.x, None])
    _bind(sch, y, x, layout)
    return x, element


def _bind(sch: Any, y: Any, x: Any, layout: Threads) -> None:
    if layout.y > 1:
        sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")


def stage(sch: Any, block: Any, index: int, at: Any, layout: Threads, how: Staging) -> Any:
    """Stage an operand in shared memory, copied by the threads of the CTA."""
    copy = sch.cache_read(block, index, how.scope, consumer_blocks=[block])
    sch.compute_at(copy, at, preserve_unit_loops=True)
    copy_by_threads(sch, copy, 2, layout, how)
    return copy


def copy_by_threads(sch: Any, copy: Any, dims: int, layout: Threads, how: Staging) -> None:
    """Spread the innermost loops of a copying block over the threads."""
    if not how.spread:
        return
    fused = sch.fuse(*list(sch.get_loops(copy))[-dims:])
    _, y, x, lanes = sch.split(fused, [None, layout.y, layout.x, how.vector])
    _bind(sch, y, x, layout)
    if how.vector > 1:
        sch.vectorize(lanes)


@dataclass(frozen=True)
class Staging:
    """How operands are staged.

    Attributes
    ----------
    operands : tuple[int, ...]
        Which reads of the product.
    scope : str
        "shared" or "shared.dyn".
    depth : int
        Elements of the reduction at a time.
    vector : int
        Elements that go together.
    spread : bool
        Whether the copy is spread over threads, or done by each thread in full.
    """

    operands: tuple[int, ...]
    scope: str
    depth: int
    vector: int
    spread: bool


@st.composite
def stagings(draw: st.DrawFn, extent: int) -> Staging:
    """Ways to stage the operands of a reduction of some extent; mostly all threads copy."""
    operands = draw(st.sampled_from([(), (0,), (1,), (0, 1), (1, 0)]))
    depth = draw(near_divisors(extent, 32))
    vector = draw(st.sampled_from([1, 1, 1, 2, 4, 8]))
    scope = draw(st.sampled_from(["shared", "shared.dyn"]))
    return Staging(operands, scope, depth, vector, not rarely(draw, 16))
