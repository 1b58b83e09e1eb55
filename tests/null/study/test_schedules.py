"""Loop schedules: how many, each once, and as text."""

from __future__ import annotations

from math import comb, factorial

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import matrix_chain
from null.study.chains import random_chain
from study.dataflow.published import loop_schedules
from study.dataflow.schedules import read_schedule

FFN = matrix_chain(128, [768, 3072, 768])


def test_two_products_have_41_schedules() -> None:
    schedules = list(loop_schedules(list(FFN.extents)))
    assert len(schedules) == len(set(schedules)) == 41
    by_spatial = [sum(len(each.spatial) == count for each in schedules) for count in range(5)]
    assert by_spatial == [0, 24, 12, 4, 1]


@pytest.mark.parametrize(("dims", "count"), [(1, 1), (2, 3), (3, 10), (4, 41), (5, 206), (6, 1237)])
def test_longer_chains_have_schedules_by_the_same_rule(dims: int, count: int) -> None:
    schedules = list(loop_schedules([f"d{each}" for each in range(dims)]))
    by_rule = sum(comb(dims, s) * factorial(dims - s) for s in range(1, dims + 1))
    assert len(schedules) == len(set(schedules)) == by_rule == count


def test_every_dim_is_spatial_or_temporal() -> None:
    chain = random_chain(np.random.default_rng(0), 3)
    for each in loop_schedules(list(chain.extents)):
        assert sorted((*each.spatial, *each.order)) == sorted(chain.extents)
        assert all(each.position(dim) == -1 for dim in each.spatial)
        assert [each.order[each.position(dim)] for dim in each.order] == list(each.order)


def test_the_text_of_a_schedule_reads_back_to_it() -> None:
    for each in loop_schedules(list(FFN.extents)):
        assert read_schedule(str(each), FFN) == each


@pytest.mark.parametrize("text", ["m n l k", "m | l k", "m m | n l k", "m | n l x", "| m n l k"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        read_schedule(text, FFN)
    assert repr(text) in str(caught.value)
    assert "each of m, k, n, l once, and at least one of them before the bar" in str(caught.value)
    assert "write 'm | k n l', say" in str(caught.value)
