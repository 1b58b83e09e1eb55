"""Plans of chains of three layers or more."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.cost.estimate import estimate
from crossfuse.planner.cost.rates import rates_of
from crossfuse.planner.families.phases import LAUNCHES, PHASES
from crossfuse.planner.families.registry import families, read_kernel
from crossfuse.planner.kernels.shape import (
    LayerShape,
    count,
    entries,
    select,
    shape_of,
    stack,
)
from crossfuse.planner.plan import Plan, plan, ranked
from crossfuse.planner.tune.kernel_space import space_of

H100 = device("nvidia-h100")
WIDTHS = {3: [256, 512, 384, 128], 4: [64, 128, 96, 128, 64], 6: [512] * 7}


def test_a_shape_has_all_layers() -> None:
    shape = shape_of(matrix_chain(32, [8, 16, 24, 40]), k_major=True)
    assert shape.layers == (LayerShape(16, 8), LayerShape(24, 16), LayerShape(40, 24))
    assert (shape.m, shape.k, shape.n, shape.l, shape.text) == (
        32,
        8,
        16,
        24,
        "32 x 8 x 16 x 24 x 40",
    )
    assert shape.weight_bytes == (2 * 16 * 8, 2 * 24 * 16, 2 * 40 * 24)
    assert shape.separate == 5
    assert [each.name for each in families(shape)] == ["phases", "launches"]
    pair = shape_of(matrix_chain(32, [8, 16, 24]), k_major=True)
    assert pair.chain == () and len(pair.layers) == 2
    assert shape.with_columns([7, 15, 23]).text == "32 x 7 x 15 x 23 x 40"
    assert pair.with_columns([7, 15]).text == "32 x 7 x 15 x 24"


@pytest.mark.parametrize("layers", WIDTHS)
def test_a_chain_of_any_length_is_planned_and_explained(layers: int) -> None:
    chain = matrix_chain(128, WIDTHS[layers])
    found = plan(chain)
    assert {found.family, *(each.family for each in found.runners)} == {
        "phases",
        "launches",
        "eager",
    }
    assert Plan.from_json(found.to_json()) == found
    assert sum(found.terms.values()) == pytest.approx(found.microseconds)
    for name in ("phases", "launches"):
        (one,) = ranked(chain, only=(name,))
        assert len(one.tiles["phases"]) == layers
        assert len(one.kernels) == (1 if name == "phases" else layers)
        assert read_kernel(name, one.tiles).tiles() == one.tiles
        text = one.explain().text()
        assert f"chain of {layers} products" in text and f"{name}: rows=" in text
        assert one.explain().svg().startswith("<svg")


def test_what_is_listed_is_legal_and_hardly_worse_than_all_tiles() -> None:
    """Against every combination of 64 rows, clusters of two and tiles of few widths."""
    shape = shape_of(matrix_chain(64, [512, 640, 256, 384]), k_major=True)
    rates = rates_of(H100)
    for family in (PHASES, LAUNCHES):
        listed = family.every(shape, H100)
        assert np.all(listed.legal(shape, H100)) and np.all(listed.fits(shape, H100))
        best = np.min(estimate(listed, shape, H100, rates).microseconds)
        options = [(c, a) for c in (16, 32, 64, 96, 128, 256) for a in (0, 1, 2)]
        grids = np.meshgrid(*(np.arange(len(options)) for _ in range(3)), indexing="ij")
        table = np.array(options, float)
        chosen = [table[each.ravel()] for each in grids]
        every = type(select(listed, 0))(
            np.full(len(chosen[0]), 64.0),
            np.full(len(chosen[0]), 2.0),
            tuple(each[:, 0] for each in chosen),
            tuple(each[:, 1] == 1 for each in chosen),
            tuple(each[:, 1] == 2 for each in chosen),
        )
        every = select(every, np.asarray(every.legal(shape, H100)))
        every = select(every, np.asarray(every.fits(shape, H100)))
        assert best <= np.min(estimate(every, shape, H100, rates).microseconds) * 1.02


def test_tiles_are_listed_quickly() -> None:
    shape = shape_of(matrix_chain(512, WIDTHS[6]), k_major=True)
    listed = [family.every(shape, H100) for family in (PHASES, LAUNCHES)]
    # Heights of tiles, sizes of clusters, and combinations of the phases' best few options.
    assert all(0 < count(each) <= 4 * 5 * 256 for each in listed)


def test_kernels_are_arrays_with_a_value_for_each_phase() -> None:
    shape = shape_of(matrix_chain(64, WIDTHS[3]), k_major=True)
    listed = PHASES.every(shape, H100)
    assert tuple(entries(listed))[:5] == ("rows", "size", "columns 1", "columns 2", "columns 3")
    few = [select(listed, number) for number in range(3)]
    assert all(isinstance(each.columns[0], int) for each in few)
    again = stack(few)
    assert [select(again, number) for number in range(3)] == few
    assert np.array_equal(entries(again)["columns 2"], [each.columns[1] for each in few])


def test_a_search_finds_its_points_again() -> None:
    shape = shape_of(matrix_chain(64, WIDTHS[3]), k_major=True)
    space = space_of(shape, H100, rates_of(H100))
    for point in (0, len(space) // 2, len(space) - 1):
        family, tiles = space.tiles(point)
        assert space.find(family, tiles) == point
        assert all(0 <= each < len(space) for each in space.moves(point).values())
        assert 0 <= space.cross(point, 0) < len(space)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"rows": 64}, "found no cluster"),
        ({"rows": 64, "cluster": 2}, "found no phases; limit: .*how the chain is divided"),
        ({"rows": 64, "cluster": 2, "phases": [{"along": "rows"}]}, "found no columns"),
    ],
)
def test_tiles_that_say_too_little_are_refused(tiles: dict[str, object], message: str) -> None:
    with pytest.raises(PlanRefused, match=message):
        read_kernel("phases", tiles)


def test_families_of_other_lengths_say_so() -> None:
    with pytest.raises(PlanRefused, match="l2 has no kernels of 3 layers"):
        plan(matrix_chain(64, WIDTHS[3]), only=("l2",))
    with pytest.raises(PlanRefused, match="phases has no kernels of two products"):
        plan(matrix_chain(64, [64, 64, 64]), only=("phases",))


def test_functions_of_each_layer_are_counted_in_its_phase() -> None:
    """Also those of the output: a chain of two layers stays one of two."""
    rates = rates_of(H100)
    for functions in ([31, 18], [31], [0, 18]):
        chain = matrix_chain(64, [512, 640, 256], functions=functions)
        shape = shape_of(chain)
        due = (*functions, 0)[:2]
        assert not shape.chain and tuple(each.functions for each in shape.layers) == due
        kernel = read_kernel("registers", {"rows": 64, "columns": 64, "parts": 5, "cluster": 5})
        assert tuple(each.functions for each in kernel.phases(shape)) == due
        plain = shape_of(matrix_chain(64, [512, 640, 256]))
        times = [float(estimate(kernel, each, H100, rates).microseconds) for each in (plain, shape)]
        # A column is half a warp for each scheduler of the SM.
        phases = kernel.phases(shape)
        cycles = sum(each.functions * each.columns / 2 / each.split for each in phases)
        assert times[1] - times[0] == pytest.approx(cycles / H100.clock_mhz, rel=0.05)
        assert plan(chain).family != "launches"
