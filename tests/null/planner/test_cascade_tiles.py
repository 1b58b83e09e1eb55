"""Estimates of streams of tiles, held against what was measured on H100s."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.cascade.rewrite.work import TileWork
from crossfuse.hardware import device
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.cascade.tile_cost import shared_bytes, steps_of, tile_bytes, tile_estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.cost.terms import CASCADE_TERMS
from crossfuse.planner.families.tiles import Tiles
from null.planner.cascades import TILED

H100 = device("nvidia-h100")
RATES = rates_of(H100)
#: Microseconds by rows, elements and CTAs of a cluster: medians of 15 in CUDA graphs, L2 cold.
#: benchmarks/results/cascade-candidates-h100.jsonl, and attention-variants-h100.txt for those that
#: are named after a comma.
MEASURED = {
    "R1": {
        (128, 128, 1): 489.4,
        (128, 96, 1): 529.6,
        (128, 160, 1): 543.6,
        (192, 64, 1): 595.2,
        (128, 64, 1): 604.9,
        (64, 128, 1): 686.1,
        (128, 32, 1): 760.1,
        (192, 32, 1): 763.8,
    },
    "R1, all keys": {(128, 128, 1): 932.1},
    "R1, 8 heads of keys": {(128, 128, 1): 449.9},
    "R1, window of 512": {(128, 128, 1): 322.6},
    "R1, ALiBi": {(128, 128, 1): 587.3},
    "R1, soft cap": {(128, 128, 1): 758.3},
    "R1, 64 columns": {(128, 128, 1): 351.2},
    "R2": {
        (128, 128, 1): 34.3,
        (192, 128, 1): 35.6,
        (128, 192, 1): 38.7,
        (128, 96, 1): 41.1,
        (192, 64, 1): 41.3,
        (192, 96, 1): 42.4,
        (128, 64, 1): 42.9,
        (128, 160, 1): 43.0,
        (64, 128, 1): 45.5,
        (64, 192, 1): 51.8,
        (192, 32, 1): 53.6,
        (128, 32, 1): 53.7,
    },
    "R3": {
        (64, 128, 1): 176.4,
        (64, 96, 1): 177.5,
        (64, 64, 1): 177.7,
        (64, 32, 1): 180.9,
    },
    "R3, batch 1": {
        (64, 128, 8): 15.0,
        (64, 96, 8): 15.7,
        (64, 64, 8): 16.1,
        (64, 32, 8): 18.8,
        (64, 128, 16): 20.5,
        (64, 128, 4): 20.7,
        (64, 64, 16): 21.4,
        (64, 96, 4): 22.6,
        (64, 64, 4): 23.2,
        (64, 32, 4): 30.6,
        (64, 128, 2): 36.5,
        (64, 64, 2): 42.3,
        (64, 32, 2): 55.5,
        (64, 128, 1): 72.0,
        (64, 96, 1): 76.6,
        (64, 64, 1): 84.6,
        (64, 32, 1): 114.5,
    },
    "R3, batch 2": {
        (64, 128, 4): 26.6,
        (64, 128, 6): 27.3,
        (64, 96, 4): 27.6,
        (64, 64, 4): 27.9,
        (64, 128, 5): 29.1,
        (64, 128, 8): 31.4,
    },
}
#: How far off estimates are at most, where it is more than 8 %: tiles of 192 of the 512 rows of R2
#: leave a part of the last one empty, and clusters of 5 lose what nothing here explains.
FAR = {"R1, 8 heads of keys": 0.13, "R2": 0.15, "R3, batch 2": 0.1}
#: How well their order is met where several were measured.
ORDER = {"R1": 0.9, "R2": 0.8, "R3": 0.95, "R3, batch 1": 0.95}


def tiles(key: tuple[int, int, int]) -> CascadeTiles:
    rows, elements, cluster = key
    return CascadeTiles(rows=rows, elements=elements, cluster=cluster)


def time_of(work: TileWork, each: CascadeTiles) -> float:
    return float(tile_estimate(work, each, H100, RATES).microseconds)


@pytest.mark.parametrize("name", MEASURED)
def test_estimates_are_near_what_was_measured(name: str) -> None:
    for key, measured in MEASURED[name].items():
        assert time_of(TILED[name], tiles(key)) == pytest.approx(measured, rel=FAR.get(name, 0.08))


@pytest.mark.parametrize("name", ORDER)
def test_estimates_are_in_the_order_of_what_was_measured(name: str) -> None:
    from scipy.stats import spearmanr

    table = MEASURED[name]
    estimated = [time_of(TILED[name], tiles(key)) for key in table]
    assert spearmanr(list(table.values()), estimated).statistic >= ORDER[name]


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_chosen_first_was_the_fastest(name: str) -> None:
    """Of all tiles that fit, not of those in the table alone."""
    _, order = Tiles(CascadeShape(name, TILED[name])).in_order(H100, RATES)
    table = {tiles(key): time for key, time in MEASURED[name].items()}
    known = [each for each in order if each in table]
    assert table[known[0]] <= 1.01 * min(table.values())
    assert known[0] == order[0]


def test_variants_of_attention_are_in_order() -> None:
    """From the window to all keys; times that differ by less than repeats do may change places."""
    names = [each for each in MEASURED if each.startswith("R1,")]
    one = {name: MEASURED[name][128, 128, 1] for name in names}
    for first in names:
        for second in names:
            if one[first] * 1.15 < one[second]:
                times = [time_of(TILED[e], tiles((128, 128, 1))) for e in (first, second)]
                assert times[0] < times[1], (first, second)


def test_clusters_pay_where_heads_are_few() -> None:
    """8 heads of 8192 keys: one CTA a head is much slower, and 16 have no room all at once."""
    times = {n: time_of(TILED["R3, batch 1"], tiles((64, 64, n))) for n in (1, 2, 4, 8, 16)}
    assert min(times, key=times.__getitem__) == 8
    assert times[1] > 3 * times[8]
    assert times[16] > times[8]


def test_terms_are_named_and_add_up() -> None:
    found = tile_estimate(TILED["R3, batch 1"], tiles((64, 64, 8)), H100, RATES)
    assert set(found.terms) <= set(CASCADE_TERMS)
    assert {"start", "hbm", "fill", "drain", "merge", "barrier", "store"} <= set(found.terms)
    assert found.bound == "hbm"
    assert tile_estimate(TILED["R1"], tiles((128, 128, 1)), H100, RATES).bound == "tensor"


def test_bytes_of_levels() -> None:
    moved = tile_bytes(TILED["R3, batch 1"], tiles((64, 64, 8)))
    # 4 rows of queries a head, 130 numbers of each; 8 CTAs send all but a share of 1/8.
    assert moved["dsm"] == 8 * 8 * 4 * 4 * 130 * 7 // 8
    assert moved["hbm"] == 32 * 2**20 + 32 * 256
    again = tile_bytes(TILED["R1"], tiles((128, 128, 1)))
    assert again["l2"] > 4 * again["hbm"]
    assert tile_bytes(TILED["R1"], tiles((128, 128, 1)))["dsm"] == 0


@given(
    st.integers(1, 600),
    st.integers(1, 2000),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([32, 96, 128]),
    st.integers(0, 700),
)
def test_steps_are_those_that_rows_need(
    rows: int, length: int, tall: int, wide: int, window: int
) -> None:
    """Against a walk over all rows, of a causal mask with a window (0: none)."""

    def span(row: int) -> tuple[int, int]:
        return max(0, row + 1 - window) if window else 0, min(length, row + 1)

    seen = [(row, *span(row)) for row in range(rows) if span(row)[0] < span(row)[1]]
    if len(seen) < rows:
        return
    work = TileWork(1, rows, length, depth=64, columns=64, masks=1, spans=tuple(seen))
    found = steps_of(work, CascadeTiles(rows=tall, elements=wide))
    total = masked = 0
    for top in range(0, rows, tall):
        ends = [span(row) for row in range(top, min(rows, top + tall))]
        first, stop = min(e[0] for e in ends) // wide, (max(e[1] for e in ends) - 1) // wide
        total += stop - first + 1
        for step in range(first, stop + 1):
            whole = all(e[0] <= step * wide and (step + 1) * wide <= e[1] for e in ends)
            masked += not whole
    assert (found.total, found.masked) == (total, masked)


@given(st.integers(1, 300), st.integers(1, 3000), st.sampled_from([64, 128]), st.integers(1, 40))
def test_all_tiles_are_legal(rows: int, length: int, depth: int, groups: int) -> None:
    work = TileWork(groups, rows, length, depth=depth, columns=depth, result=2 * depth)
    steps, found = Tiles(CascadeShape("any", work)).in_order(H100, RATES)
    assert len(found) == steps[-1].candidates >= 1
    for each in found:
        assert isinstance(each, CascadeTiles)
        sizes = steps_of(work, each).sizes
        assert shared_bytes(work, sizes, H100) is not None
        assert each.cluster == 1 or groups * each.cluster <= H100.sms
        assert sizes.rows == 64 or sizes.rows <= rows


def test_wide_sums_stay_in_one_cta() -> None:
    """Two warpgroups hold columns apart from rows, so that a cluster has nothing to merge."""
    wide = TileWork(2, 128, 8192, depth=576, columns=512, inputs=2**28, result=1024, same=True)
    for work, shares in [
        (wide, {1, 2}),
        (replace(wide, masks=1, spans=((0, 0, 8192), (127, 0, 8192))), {1, 2}),
        # Rows that need other elements are in tiles of their own.
        (replace(wide, masks=1, spans=((0, 0, 8065), (127, 0, 8192))), {1}),
    ]:
        _, found = Tiles(CascadeShape("wide", work)).in_order(H100, RATES)
        tiled = [each for each in found if isinstance(each, CascadeTiles)]
        assert {each.cluster for each in tiled} == {1}
        assert {each.share for each in tiled} == shares
    narrow = replace(wide, rows=64, columns=256, depth=256)
    _, found = Tiles(CascadeShape("narrow", narrow)).in_order(H100, RATES)
    assert found[0].cluster > 1


def test_a_cache_that_is_key_and_value_is_read_once() -> None:
    work = TileWork(64, 128, 4096, depth=576, columns=512, inputs=2**28, result=1024, same=True)
    apart = replace(work, same=False)
    each = CascadeTiles(rows=64, elements=64)
    assert tile_bytes(work, each)["l2"] < 0.6 * tile_bytes(apart, each)["l2"]
