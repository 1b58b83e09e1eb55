"""Random cascades, emulated CUDA and LLVM: as exact as separate passes, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cpu.fuzz import typed_cascades
from cpu.fuzz.typed_cascades import PLACES, ROWS, SPECIAL, Typed, drawn, separate
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.tiles import RESIDENCES, StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CascadeRefused, LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.planner.cascade.plan import ranked_cascade
from crossfuse.planner.cascade.shape import cascade_shape
from crossfuse.schedule.planned import schedule_cascade

pytestmark = pytest.mark.cpu

EPSILON = float(np.finfo(np.float32).eps)
#: Permutations of a row, whose sums separate passes make in other orders.
ORDERS = 4
_FIRST = (len(PLACES) + SPECIAL.index("denormal")) * ROWS
DENORMAL = slice(_FIRST, _FIRST + ROWS)


def tiles_of(site: Any, derivation: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Tiles of a plan, or ones that no plan has: few threads, ragged clusters, every residence."""
    if rng.random() < 0.4:
        shape = cascade_shape(site, derivation, "random")
        plans = ranked_cascade(shape, fused=True, only=("stream",))
        return dict(plans[int(rng.integers(min(40, len(plans))))].tiles)
    cluster = int(rng.choice([1, 1, 2, 3, 4]))
    return vars(
        StreamTiles(
            threads=int(rng.choice([1, 4, 16, 32, 64])),
            vector=int(rng.choice([0, 0, 1, 2])),
            unroll=int(rng.choice([1, 2])),
            cluster=cluster,
            rows=1 if cluster > 1 else int(rng.choice([1, 1, 2])),
            resident=str(rng.choice(RESIDENCES)),
        )
    )


def norms(typed: Typed, array: np.ndarray) -> np.ndarray:
    """Of each row."""
    return np.sqrt((array.reshape(int(np.prod(typed.rows)), -1) ** 2).sum(axis=1))


def kinds(array: np.ndarray) -> np.ndarray:
    """Of each row whether a number is finite, no number, or which infinity."""
    return np.where(np.isfinite(array), 0, np.where(np.isnan(array), 1, np.where(array > 0, 2, 3)))


def ratios(
    typed: Typed, name: str, got: np.ndarray, exact: Mapping[str, np.ndarray], apart: list[Any]
) -> np.ndarray:
    """Of each row the error over what is allowed; infinite where another kind of number stands.

    Allowed is twice the error of separate passes; twice more for the luck of a few rows, in which
    sums are made in another order. What cancels is off by orders of magnitude. Rows in which a sum
    is no number hold to nothing (`separate`), nor do those in which separate passes have no digit.
    """
    due, dtype = exact[name], str(got.dtype)
    found = got if due.ndim == 1 else typed_cascades.rows_of(typed, got)
    found = found.reshape(due.shape).astype(np.float64)
    with np.errstate(all="ignore"):
        others = [each[name].astype(got.dtype).astype(np.float64) for each in apart]
        agreed = np.all([kinds(each) == kinds(due) for each in others], axis=0)
        wrong = (agreed & (kinds(found) != kinds(due))).reshape(len(due), -1).any(axis=1)
        finite = np.isfinite(due) & np.all([np.isfinite(each) for each in others], axis=0)
        unfused = np.max([norms(typed, np.where(finite, e - due, 0)) for e in others], axis=0)
        fused = norms(typed, np.where(finite, found - due, 0))
        size = norms(typed, np.where(finite, due, 0))
        known = unfused <= 0.3 * size
        unit = float(ml_dtypes.finfo(got.dtype).eps) if dtype != "float32" else 0.0
        of_kind = np.repeat(unfused.reshape(-1, ROWS).max(axis=1), ROWS)
        allowed = 4 * of_kind + (8 * EPSILON + 0.01 * unit) * size + 1e-37
        # Products of denormal numbers have few bits, whatever they are multiplied by later.
        allowed[DENORMAL] += 1e-2 * size[DENORMAL]
        ratio = np.where(known, np.nan_to_num(fused / allowed, nan=np.inf), 0)
    lost = exact["lost"] | np.any([each["lost"] for each in apart], axis=0)
    return np.where(lost, 0, np.where(wrong, np.inf, ratio))


def tried(seed: int) -> tuple[Typed, float | str]:
    """A random cascade, and its error over what is allowed, or why it is refused."""
    rng = np.random.default_rng(seed)
    typed = typed_cascades.draw(rng)
    arrays = drawn(typed, rng)
    try:
        sites = detect(typed_cascades.function(typed))
        if len(sites) > 1:
            return typed, "several cascades"
        derivation = derive(sites[0].cascade)
        tiles = tiles_of(sites[0], derivation, rng)
        schedule = schedule_cascade(sites[0], derivation, "stream", tiles)
        image = lower(schedule).image
    except (CascadeRefused, LoweringRefused) as refusal:
        return typed, refusal.refusal.rule
    given = {each.name: arrays[each.name] for each in image.buffers if not each.output}
    report = emulate(image, given, seed=seed)
    assert report.ok, f"{typed.text}, {tiles}: {report}"
    exact = separate(typed, arrays, np.float64)
    orders = [np.random.default_rng(each).permutation(typed.length) for each in range(ORDERS)]
    apart = [separate(typed, arrays, np.float32, each) for each in (None, *orders)]
    runs = (report.outputs, run_sequential(schedule, given).outputs)
    worst = [ratios(typed, name, run[name], exact, apart).max() for run in runs for name in run]
    return typed, float(max(worst))


@pytest.mark.parametrize("seed", range(24))
def test_as_exact_as_separate_passes(seed: int) -> None:
    typed, found = tried(seed)
    right = isinstance(found, str) or found <= 1
    assert right, f"{typed.text}: {found} times what is allowed"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24, 600))
def test_many_more(seed: int) -> None:
    test_as_exact_as_separate_passes(seed)


def test_every_type_and_mask_is_drawn() -> None:
    drawn_of = [typed_cascades.draw(np.random.default_rng(seed)) for seed in range(24)]
    assert {each.dtype for each in drawn_of} == set(typed_cascades.DTYPES)
    assert {each.mask for each in drawn_of} == set(typed_cascades.MASKS)
    assert {len(each.rows) for each in drawn_of} == {1, 2}
