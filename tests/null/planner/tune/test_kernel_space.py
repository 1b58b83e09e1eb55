"""The points of a chain, and the steps between them."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.plan import plan
from crossfuse.workload import resolve
from null.planner.tune.planted import space

SPECS = ("G4", "S3:M=128", "gemm:M=256,K=768,N=3072", "G1")


@pytest.mark.parametrize("text", SPECS)
def test_points_are_found_by_their_tiles(text: str) -> None:
    found = space(text)
    for point in np.random.default_rng(0).integers(len(found), size=20):
        assert found.find(*found.tiles(int(point))) == point


@pytest.mark.parametrize("text", SPECS)
def test_the_first_point_is_the_plan(text: str) -> None:
    found = space(text)
    chosen = plan(resolve(text), only=[each.family for each in found.groups])
    first = int(found.order[0])
    assert found.prior[first] == pytest.approx(chosen.microseconds)
    assert found.tiles(first) == (chosen.family, chosen.tiles)


@pytest.mark.parametrize("text", SPECS)
def test_a_step_changes_the_field_that_it_names(text: str) -> None:
    found = space(text)
    for point in map(int, np.random.default_rng(1).integers(len(found), size=10)):
        steps = found.moves(point)
        assert steps
        for move, to in steps.items():
            group = found.group(to)
            assert to != point
            assert 0 <= to < len(found)
            if move.axis == "family":
                assert group.family == move.way
                continue
            row = group.values[group.axes.index(move.axis)] - 0.0
            before, after = row[point - group.first], row[to - group.first]
            assert (after > before) == (move.way == "up")
            between = row[(row > min(before, after)) & (row < max(before, after))]
            assert not between.size


def test_clusters_follow_where_parts_lead() -> None:
    found = space("G1", ("registers",))
    both = 0
    for point in range(0, len(found), max(1, len(found) // 50)):
        _, tiles = found.tiles(point)
        for move, to in found.moves(point).items():
            _, reached = found.tiles(to)
            assert reached["cluster"] in (1, reached["parts"])
            both += move.axis == "parts" and reached["cluster"] not in (1, tiles["cluster"])
    assert both


def test_children_have_a_phase_of_each_parent() -> None:
    found = space("S3:M=128", ("l2",))
    rng = np.random.default_rng(2)
    exact = 0
    for one, other in rng.integers(len(found), size=(200, 2)):
        _, child = found.tiles(found.cross(int(one), int(other)))
        first, second = found.tiles(int(one))[1], found.tiles(int(other))[1]
        exact += child["first"] == first["first"] and (
            child["second"]["columns"] == second["second"]["columns"]
        )
    assert exact > 50


def test_no_tiles_are_no_point() -> None:
    assert space("G4").find("l2", {"first": {}}) is None
    assert space("G4").find("nowhere", {}) is None


def test_a_chain_without_kernels_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"no tiles of registers that fit"):
        space("S3:M=128", ("registers",))
