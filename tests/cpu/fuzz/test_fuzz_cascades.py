"""Random cascades on rows that nobody chose: as exact as separate passes, or refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cpu.fuzz import row_cascades
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CascadeRefused

pytestmark = pytest.mark.cpu

LENGTH = 96
#: Rows of each kind; errors are held against the largest of a kind.
ROWS = 3
#: Where rows lie, and how far apart their elements.
PLACES = tuple(
    (about, spread) for about in (0.0, 1.0, 1e2, 1e4, 1e5) for spread in (1e-3, 1.0, 1e3)
)
SPECIAL = (
    *("constant", "zeros", "denormal", "huge", "one huge", "outlier"),
    *("infinite", "minus infinite"),
)
DENORMAL = len(PLACES) + SPECIAL.index("denormal")
EPSILON = float(np.finfo(np.float32).eps)
#: Permutations of a row, whose sums separate passes make in other orders.
ORDERS = 4


def special(kind: str, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    if kind == "constant":
        x[:] = 100.0
    elif kind == "zeros":
        x[:] = 0.0
    elif kind == "denormal":
        x *= 1e-41
    elif kind == "huge":
        x *= 1e30
    else:
        one = {"one huge": 1e35, "outlier": 1e6, "infinite": np.inf, "minus infinite": -np.inf}
        x[:, 3] = one[kind]
    return x


def drawn(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Elements: rows of x of every kind, y about the same place, positive weights."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in row_cascades.ELEMENTS}
    for about, spread in PLACES:
        for name in "xy":
            found[name].append(about + spread * rng.standard_normal((ROWS, LENGTH)))
    for kind in SPECIAL:
        found["x"].append(special(kind, rng.standard_normal((ROWS, LENGTH))))
        found["y"].append(rng.standard_normal((ROWS, LENGTH)))
    count = len(found["x"])
    found["w"] = [rng.uniform(0.1, 2.0, (ROWS, LENGTH)) for _ in range(count)]
    return {name: np.concatenate(each).astype(np.float32) for name, each in found.items()}


def errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each kind the largest error; of elements by their norm."""
    with np.errstate(all="ignore"):
        apart = np.abs(found.astype(np.float64) - exact)
        rows = apart if apart.ndim == 1 else np.sqrt((apart**2).sum(axis=1))
    return rows.reshape(-1, ROWS).max(axis=1)


def worst(cascade: row_cascades.Random, arrays: Mapping[str, np.ndarray], got: np.ndarray) -> float:
    """The largest error over what is allowed, of kinds whose results are numbers.

    Allowed is twice the error of separate passes; twice more for the luck of a few rows, in which
    sums are made in another order. What cancels is off by orders of magnitude.
    """
    exact = row_cascades.separate(cascade, arrays, np.float64)
    apart = [row_cascades.separate(cascade, arrays, np.float32)]
    rng = np.random.default_rng(3)
    for _ in range(ORDERS):
        # Masks are of the first elements: these stay among themselves.
        shown = rng.permutation(row_cascades.SHOWN)
        order = np.concatenate([shown, rng.permutation(np.arange(len(shown), LENGTH))])
        mixed = {name: each[:, order] for name, each in arrays.items()}
        found = row_cascades.separate(cascade, mixed, np.float32)
        apart.append(found if found.ndim == 1 else found[:, np.argsort(order)])
    with np.errstate(all="ignore"):
        unfused = np.max([errors(each, exact) for each in apart], axis=0)
        size = errors(np.zeros_like(exact), exact)
    # Where separate passes have no digit, as where they overflow, there is nothing to hold to.
    known = np.isfinite(unfused) & np.isfinite(size) & (unfused <= 0.3 * size)
    allowed = 4 * unfused + 8 * EPSILON * size + 1e-37
    # Products of denormal numbers have few bits, whatever they are multiplied by later.
    allowed[DENORMAL] += 1e-2 * size[DENORMAL]
    with np.errstate(all="ignore"):
        ratio = errors(got, exact) / allowed
    return float(np.where(known, np.nan_to_num(ratio, nan=np.inf), 0).max())


def tried(seed: int) -> tuple[row_cascades.Random, float | str]:
    """A random cascade, and its error over what is allowed, or why it is refused."""
    rng = np.random.default_rng(seed)
    cascade = row_cascades.draw(rng)
    arrays = drawn(rng)
    function = row_cascades.function(cascade, len(arrays["x"]), LENGTH)
    try:
        sites = detect(function)
        if len(sites) > 1:
            return cascade, "several cascades"
        threads, cluster = int(rng.choice([4, 16])), int(rng.choice([1, 2]))
        tiles = StreamTiles(threads=threads, unroll=1, cluster=cluster)
        text = streaming(sites[0], derive(sites[0].cascade), tiles)
    except CascadeRefused as refusal:
        return cascade, refusal.refusal.rule
    got = run_sequential(text, arrays).outputs["out"]
    return cascade, worst(cascade, arrays, got)


@pytest.mark.parametrize("seed", range(60))
def test_as_exact_as_separate_passes(seed: int) -> None:
    cascade, found = tried(seed)
    right = isinstance(found, str) or found <= 1
    assert right, f"{cascade.text}: {found} times what is allowed"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(60, 5000))
def test_many_more(seed: int) -> None:
    test_as_exact_as_separate_passes(seed)
