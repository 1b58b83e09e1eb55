"""Counts of the published space, rule by rule, and of other readings of the rules."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import matrix_chain
from study.dataflow.published import (
    CLUSTER_EXTENTS,
    Room,
    count,
    ctas_of,
    live,
    loop_schedules,
    published,
)
from study.dataflow.readings import readings, tied_tiles, without_clusters
from study.dataflow.rules import PUBLISHED, R1, R5
from study.dataflow.rules import count as count_by

H100 = device("nvidia-h100")
#: The example that FlashFuser prints its counts for: GPT-6.7B at 256 rows.
EXAMPLE = matrix_chain(256, [4096, 16384, 4096])


def test_the_published_counts() -> None:
    steps = count(EXAMPLE, H100)
    assert [each.name for each in steps] == ["all", "R1", "R2", "R3", "R4", "R5"]
    assert [each.candidates for each in steps] == [
        41 * 5**4 * 16 * 1024 * 256 * 256,  # published: 2.75e13
        41 * 5**4 * 5 * 11 * 9 * 9,  # 1.14e8
        41 * 135 * 4455,  # 2.47e7
        24 * 135 * 4455,  # 1.44e7
        16 * 135 * 4455,  # 9.62e6
        1151870,  # 1.15e6
    ]
    rounded = ["2.75e+13", "1.14e+08", "2.47e+07", "1.44e+07", "9.62e+06", "1.15e+06"]
    assert [f"{each.candidates:.2e}" for each in steps] == rounded


def test_the_published_count_without_dsm() -> None:
    assert without_clusters(EXAMPLE, H100) == 10 * 1155 == 11550


def test_other_readings_give_other_counts() -> None:
    found = {(each.rule, each.text): each.candidates for each in readings(EXAMPLE, H100)}
    assert found["R1", "multiples of 16 that divide, up to 256"] == 41 * 625 * 625
    assert tied_tiles(EXAMPLE) == 41 * 15 * 45 * 35 * 35
    by_rule = {
        rule: [f"{value:.2e}" for (name, _), value in found.items() if name == rule]
        for rule in ("R2", "R3", "R4", "R5")
    }
    assert by_rule == {
        "R2": ["2.47e+07", "3.20e+07", "2.56e+07", "1.92e+07", "1.28e+07"],
        "R3": ["1.44e+07", "1.56e+07", "6.01e+06", "1.74e+07"],
        "R4": ["9.62e+06"],
        "R5": ["1.15e+06", "1.26e+06", "1.97e+06", "2.47e+06", "9.12e+05"],
    }


def by_hand(widths: list[int], rows: int) -> list[int]:
    """Walk all candidates of a chain in plain Python."""
    chain = matrix_chain(rows, widths)
    counts = [0] * 6
    names = list(chain.extents)
    later = [chain.column(index) for index in range(1, len(chain.products))]
    blocks = [range(16, extent + 1, 16) for extent in chain.extents.values()]
    sizes = list(product(CLUSTER_EXTENTS, repeat=len(names)))
    for schedule in loop_schedules(names):
        third = schedule.order[-1:] == ("k",) or "k" in schedule.spatial
        third = third and bool(set(schedule.order) - {"k"})
        fourth = not set(later) & set(schedule.spatial)
        for tile in product(*blocks):
            first = all(
                extent % each == 0
                for extent, each in zip(chain.extents.values(), tile, strict=True)
            )
            block = {name: np.array([each]) for name, each in zip(names, tile, strict=True)}
            room = {
                ctas: bool(Room()(chain, H100, schedule, block, np.array([ctas])))
                for ctas in (2, 4, 8, 16)
            }
            for size in sizes:
                cls = dict(zip(names, size, strict=True))
                ctas = cls["m"] * cls["n"] * cls["k"]
                second = 2 <= ctas <= 16 and all(cls[each] % cls["k"] == 0 for each in later)
                flags = [True, first, second, third, fourth, second and room[ctas]]
                for index in range(6):
                    counts[index] += all(flags[: index + 1])
    return counts


@pytest.mark.parametrize(("rows", "widths"), [(16, [32, 48, 32]), (32, [48, 32, 16])])
def test_counting_is_walking(rows: int, widths: list[int]) -> None:
    chain = matrix_chain(rows, widths)
    assert [each.candidates for each in count(chain, H100)] == by_hand(widths, rows)
    assert count_by(chain, H100) == count(chain, H100)


def test_room_binds_on_wide_chains() -> None:
    """A stripe of 64 x 16384 sums has room in 32 CTAs, not in 16."""
    blocks = {dim: np.array([16, 64]) for dim in EXAMPLE.extents}
    walked = next(each for each in loop_schedules(list("mknl")) if str(each) == "m | l n k")
    kept = Room()(EXAMPLE, H100, walked, blocks, np.array([16, 16]))
    assert kept.tolist() == [True, False]
    assert live(EXAMPLE, walked, EXAMPLE.tensor("C"), blocks, 1).tolist() == [
        16 * 16384,
        64 * 16384,
    ]
    narrow = next(each for each in loop_schedules(list("mknl")) if str(each) == "m | n l k")
    assert Room()(EXAMPLE, H100, narrow, blocks, np.array([2, 2])).tolist() == [True, False]


def test_room_of_many_sizes_is_that_of_each() -> None:
    blocks = {dim: np.array([16, 64, 256, 1024]) for dim in EXAMPLE.extents}
    sizes = np.array([1, 2, 4, 8, 16])
    for schedule in loop_schedules(list("mknl")):
        found = Room()(EXAMPLE, H100, schedule, blocks, sizes[:, None])
        each = [Room()(EXAMPLE, H100, schedule, blocks, np.full(4, size)) for size in sizes]
        assert np.array_equal(found, each)


def test_longer_chains_are_counted_by_the_same_rules() -> None:
    chain = matrix_chain(256, [1024, 4096, 1024, 1024])
    steps = count(chain, H100)
    assert steps[0].candidates == 206 * 5**5 * 16 * 64 * 256 * 64 * 64
    left = [each.candidates for each in steps]
    assert left == sorted(left, reverse=True) and left[-1] > 0
    domain = published(chain)
    assert len(ctas_of(chain, domain.clusters)) == 5**5


def test_a_count_needs_no_candidates() -> None:
    """8 dims of 4096: 1e29 candidates and more are counted at once."""
    chain = matrix_chain(4096, [4096] * 7)
    assert count_by(chain, H100, [])[0].candidates > 10**29


def test_rules_out_of_order_are_refused() -> None:
    with pytest.raises(PlanRefused) as caught:
        count_by(EXAMPLE, H100, (R5, R1))
    assert "rule R1: found on 'block' after a rule on 'room'" in str(caught.value)
    assert "on one of block, cluster, schedule, room, those on room last" in str(caught.value)


def test_extents_below_a_step_have_one_block() -> None:
    chain = matrix_chain(8, [64, 64, 64])
    assert published(chain).blocks["m"] == (16,)
    assert [each.name for each in PUBLISHED] == ["R1", "R2", "R3", "R4", "R5"]
