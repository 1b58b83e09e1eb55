"""Formulas of volumes and footprints against the walk."""

from __future__ import annotations

import os
from math import prod

import numpy as np
import pytest

from crossfuse.planner.dataflow.footprint import region_elements
from crossfuse.planner.dataflow.residency import check_residency, kept, recomputed
from crossfuse.planner.dataflow.schedules import loop_schedules
from crossfuse.planner.dataflow.simulator import Walk
from crossfuse.planner.dataflow.tiling import LEVELS, check_tiling, grains
from crossfuse.planner.dataflow.volume import elements_made, elements_moved, nests, operand_reads
from null.planner.chains import Case, random_case, random_chain, random_tiling

#: Random chains of each length; walks of more steps than this are left out.
CASES = 400 * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1)
STEPS = 3000
PIECES = {"m": 2, "k": 2, "n": 3, "l": 2, "n0": 2}


def steps(case: Case, level: str) -> int:
    views = grains(case.chain, case.schedule, case.tiling, level)
    lanes = sum(prod(each.lanes for each in view.values()) for view in views)
    return lanes * prod(each.steps for each in views[-1].values())


def agree(case: Case, level: str) -> None:
    chain, schedule, residency = case.chain, case.schedule, case.residency
    walk = Walk(chain, schedule, case.tiling, residency, level, PIECES).run()
    for nest, product in zip(
        nests(chain, schedule, case.tiling, residency, level), chain.products, strict=True
    ):
        for name in (product.left, *product.rights, product.output):
            tensor = chain.tensor(name)
            hold, result = residency.position(tensor, schedule), name == product.output
            if result:
                assert elements_made(nest, tensor.dims) == walk.made[name], (case, level, name)
            if result and tensor.role == "intermediate":
                continue
            moved = elements_moved(nest, tensor.dims, hold)
            assert moved == walk.moved[name], (case, level, name)
            assert region_elements(nest, tensor.dims, hold) == walk.largest[name], (case, level)
            if result:
                first = elements_moved(nest, tensor.dims, hold, first=True)
                assert moved - first == walk.again[name], (case, level, name)
            else:
                times = len(product.rights) if name == product.left else 1
                reads = times * operand_reads(nest, tensor.dims, PIECES)
                assert reads == walk.read[name], (case, level, name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("products", [1, 2, 3, 4])
def test_formulas_equal_the_walk_on_random_chains(products: int, level: str) -> None:
    rng = np.random.default_rng([products, LEVELS.index(level)])
    done = 0
    while done < CASES:
        case = random_case(rng, products)
        check_tiling(case.chain, case.tiling)
        check_residency(case.chain, case.schedule, case.residency)
        if steps(case, level) <= STEPS:
            agree(case, level)
            done += 1
