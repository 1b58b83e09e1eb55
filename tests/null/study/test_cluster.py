"""How the CTAs of a cluster divide the products of a chain."""

from __future__ import annotations

from itertools import pairwise
from itertools import product as combinations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import matrix_chain
from null.study.chains import random_case, random_chain, random_cluster
from null.study.exchange_simulator import columns_of
from study.dataflow.cluster import (
    Lanes,
    check_cluster,
    cluster_lanes,
    legal_cluster,
    row_lanes,
)
from study.dataflow.tiling import Grain, grains

FFN = matrix_chain(128, [768, 3072, 768])


def test_the_published_examples() -> None:
    names = ("m", "n", "k", "l")
    one = cluster_lanes(FFN, dict(zip(names, (2, 4, 2, 4), strict=True)))
    assert one == (Lanes(4, 2, 1), Lanes(4, 2, 2))  # shuffle 2, reduce 2
    other = cluster_lanes(FFN, dict(zip(names, (2, 4, 2, 8), strict=True)))
    assert other == (Lanes(4, 2, 1), Lanes(8, 1, 4))  # shuffle 4, reduce 1


def test_the_picture_of_a_cluster() -> None:
    before, after = cluster_lanes(FFN, {"n": 4, "k": 2, "l": 4})
    places = columns_of(8, before, after)
    rows = [[cta for cta, each in places.items() if each[3] == share] for share in range(2)]
    by_column = [sorted(row, key=lambda cta: places[cta][2]) for row in rows]
    assert by_column == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ctas_divide_each_product_alike() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        chain = random_chain(rng)
        cluster = random_cluster(rng, chain)
        lanes = cluster_lanes(chain, cluster)
        row = lanes[0].columns * lanes[0].split
        assert all(each.columns * each.split == row for each in lanes)
        for before, after in pairwise(lanes):
            assert after.shuffle * before.split == after.columns
            assert after.shuffle * after.split == before.columns
            places = columns_of(row, before, after)
            assert len({each[:2] for each in places.values()}) == row
            assert {each[2:] for each in places.values()} == {
                (column, share)
                for column in range(int(after.columns))
                for share in range(int(after.split))
            }


def iterations(grain: Grain, lane: int, step: int) -> set[int]:
    start = (step * grain.lanes + lane) * grain.tile
    return set(range(start, min(start + grain.tile, grain.extent)))


def test_a_shuffle_group_has_what_the_next_product_reads() -> None:
    """What a share of the next sum covers in a step is what its columns made in that step."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        case = random_case(rng)
        views = grains(case.chain, case.schedule, case.tiling)["cta"]
        lanes = cluster_lanes(case.chain, case.tiling.cluster)
        for index in range(1, len(case.chain.products)):
            dim = case.chain.products[index].reduction
            made, read = views[index - 1][dim], views[index][dim]
            if dim in case.schedule.spatial:
                assert read.tile == made.tile * lanes[index].shuffle
                continue
            assert made.steps == read.steps
            group = int(lanes[index].shuffle)
            for step, share in combinations(range(made.steps), range(read.lanes)):
                columns = range(share * group, (share + 1) * group)
                covered = set().union(*(iterations(made, each, step) for each in columns))
                assert covered == iterations(read, share, step)


def test_units_divide_every_dim_without_overlap() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        case = random_case(rng)
        for views in grains(case.chain, case.schedule, case.tiling).values():
            for view in views:
                for grain in view.values():
                    parts = [
                        iterations(grain, lane, step)
                        for lane in range(grain.lanes)
                        for step in range(grain.steps)
                    ]
                    assert sorted(each for part in parts for each in part) == [*range(grain.extent)]


def test_legal_clusters_are_those_that_are_not_refused() -> None:
    sizes = (1, 2, 3, 4, 6, 8, 16)
    tuples = np.array(list(combinations(sizes, repeat=4)))
    many = dict(zip("mnkl", tuples.T, strict=True))
    legal = legal_cluster(FFN, many)
    for each, flag in zip(tuples, legal, strict=True):
        cluster = dict(zip("mnkl", (int(extent) for extent in each), strict=True))
        assert legal_cluster(FFN, cluster) == flag
        if flag:
            check_cluster(FFN, cluster)
            lanes = cluster_lanes(FFN, cluster)
            assert lanes[1].shuffle == cluster["l"] / cluster["k"]
            assert lanes[1].split == cluster["n"] * cluster["k"] / cluster["l"]
            assert row_lanes(FFN, cluster) * lanes[0].columns * lanes[0].split <= 16
        else:
            with pytest.raises(PlanRefused):
                check_cluster(FFN, cluster)
    assert 0 < legal.sum() < len(tuples)


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ({"m": 4, "n": 4, "k": 2}, "32 CTAs, cls_m * cls_n * cls_k; limit: 16 CTAs"),
        ({"n": 4, "k": 2, "l": 3}, "cls_l: found 3, which 2 CTAs that share a tile do not divide"),
        ({"n": 4, "k": 2, "l": 6}, "cls_l: found 6, which does not divide the 8 CTAs of a row"),
        ({"n": 2, "l": 4}, "cls_l: found 4, which does not divide the 2 CTAs of a row"),
        ({"terms": 2}, "terms: found 2; limit: divisors of 1, the weights of the first product"),
        ({"x": 2}, "cls_x: found 2; limit: positive integers along m, k, n, l"),
        ({"m": 0}, "cls_m: found 0"),
        ({"m": 1.5}, "cls_m: found 1.5"),
    ],
)
def test_clusters_that_cannot_be_are_refused(cluster: dict[str, int], text: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        check_cluster(FFN, cluster)
    assert text in str(caught.value)
