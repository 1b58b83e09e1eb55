"""Exchanges in a cluster, against a walk through its CTAs."""

from __future__ import annotations

from itertools import product as combinations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.chain.spec import Chain
from null.study.chains import random_case, random_tiling
from null.study.exchange_simulator import (
    Wires,
    all_exchanged,
    scatter,
    shuffled,
)
from study.dataflow.cluster import cluster_lanes
from study.dataflow.movement import METHODS, combined_bytes, exchanges
from study.dataflow.published import loop_schedules
from study.dataflow.schedules import kept
from study.dataflow.tiling import Tiling
from study.dataflow.volume import elements_made, elements_moved, nests

FFN = matrix_chain(128, [768, 3072, 768])


def tile(elements: int, offset: int = 0) -> list[tuple[int, int]]:
    return [(offset, each) for each in range(elements)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("split", [1, 2, 3, 4, 5, 8, 16])
def test_bytes_of_partial_tiles_that_are_combined(split: int, method: str) -> None:
    for elements, item, accumulator in combinations((1, 2, 7, 16, 33), (1, 2, 4), (4, 8)):
        wires = all_exchanged(range(split), tile(elements), item, accumulator, method)
        assert wires.total == combined_bytes(elements, split, item, accumulator, method)


def lengths(extent: int, size: int) -> list[int]:
    return [min(size, extent - start) for start in range(0, extent, size)]


def walked(chain: Chain, tiling: Tiling, method: str) -> tuple[dict[str, int], dict[str, int], int]:
    """All exchanges of a run that makes everything once, tile after tile, CTA after CTA."""
    lanes, cluster = cluster_lanes(chain, tiling.cluster), tiling.cluster
    rows = [lengths(chain.extents[dim], tiling.block[dim]) for dim in chain.rows]
    heights = [int(np.prod(each)) for each in combinations(*rows)]
    combined, gathered, stored, terms = {}, {}, 0, cluster.get("terms", 1)
    row = int(lanes[0].columns * lanes[0].split)
    for index, product in enumerate(chain.products):
        dim, lane, tensor = chain.column(index), lanes[index], chain.tensor(product.output)
        block, wide = tiling.block[dim], tiling.block[dim] * cluster.get(dim, 1)
        accumulator = 4 * (len(product.rights) if index else len(product.rights) // terms)
        for height, start in combinations(heights, range(0, chain.extents[dim], wide)):
            widths = [
                max(0, min(block, chain.extents[dim] - start - each * block))
                for each in range(int(lane.columns))
            ]
            tiles = [tile(height * width, each) for each, width in enumerate(widths)]
            group = range(int(lane.split))
            if tensor.role == "output":
                for each in tiles:
                    wires = Wires()
                    scatter(wires, group, each, accumulator)
                    stored += wires.total
                continue
            for each in tiles:
                wires = all_exchanged(group, each, tensor.item, accumulator, method)
                combined[tensor.name] = combined.get(tensor.name, 0) + wires.total
            wires = shuffled(row, lane, lanes[index + 1], tiles, tensor.item)
            gathered[tensor.name] = gathered.get(tensor.name, 0) + wires.total
    return combined, gathered, stored


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("products", [1, 2, 3, 4])
def test_exchanges_of_a_run_equal_the_walk(products: int, method: str) -> None:
    rng = np.random.default_rng([products, METHODS.index(method)])
    for _ in range(60):
        case = random_case(rng, products)
        chain, residency = case.chain, case.residency
        tiling = random_tiling(rng, chain)
        made = nests(chain, case.schedule, tiling, residency)["cluster"]
        found = exchanges(chain, tiling.cluster, made, residency, method=method)
        combined, gathered, stored = walked(chain, tiling, method)
        total = 0
        for index, tensor in enumerate(chain.intermediates):
            times, rest = divmod(
                elements_made(made[index], tensor.dims), chain.elements(tensor.name)
            )
            assert not rest
            if tensor.name in residency.grid_wide:
                split = cluster_lanes(chain, tiling.cluster)[index].split
                terms = tiling.cluster.get("terms", 1) if not index else 1
                size = 4 * len(chain.products[index].rights) // terms
                once = (split - 1) * chain.elements(tensor.name) * size
                assert found.all_exchange[tensor.name] == times * once
                assert tensor.name not in found.shuffle
            else:
                assert found.all_exchange[tensor.name] == times * combined[tensor.name]
                assert found.shuffle[tensor.name] == times * gathered[tensor.name]
            total += found.all_exchange[tensor.name] + found.shuffle.get(tensor.name, 0)
        hold = residency.position(chain.output, case.schedule)
        leaves = elements_moved(made[-1], chain.output.dims, hold)
        assert found.reduce_scatter * chain.elements(chain.output.name) == stored * leaves
        assert found.total == total + found.reduce_scatter


def test_other_methods_are_refused() -> None:
    with pytest.raises(PlanRefused, match="found 'ring'; limit: one of scatter, naive"):
        combined_bytes(4, 2, 2, 4, "ring")


def test_schedules_do_not_change_what_a_made_tile_costs() -> None:
    tiling = random_tiling(np.random.default_rng(4), FFN)
    for schedule in loop_schedules(list(FFN.extents)):
        residency = kept(FFN, schedule)
        made = nests(FFN, schedule, tiling, residency)["cluster"]
        found = exchanges(FFN, tiling.cluster, made, residency)
        split = cluster_lanes(FFN, tiling.cluster)[0].split
        assert found.all_exchange["C"] == (split - 1) * 6 * elements_made(made[0], ("m", "n"))
