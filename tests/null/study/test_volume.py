"""Formulas of volumes and footprints against the walk."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.chain.spec import Chain
from null.study.chains import Case, random_case, random_chain, random_residency, random_tiling
from null.study.simulator import Walk
from study.dataflow.movement import further_loops
from study.dataflow.published import LoopSchedule, loop_schedules
from study.dataflow.schedules import check_residency, kept, recomputed
from study.dataflow.tiling import LEVELS, Tiling, check_tiling, grains
from study.dataflow.volume import (
    Nest,
    elements_made,
    elements_moved,
    nests,
    operand_reads,
    region_elements,
)

#: Random cases of each length and level.
CASES = 120 * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1)
#: Walks of more steps, times units, are left out.
STEPS = 1500
PIECES = {"m": 2, "k": 2, "n": 3, "l": 2, "n0": 2}


def steps(case: Case, level: str) -> int:
    views = grains(case.chain, case.schedule, case.tiling)[level]
    lanes = sum(prod(each.lanes for each in view.values()) for view in views)
    return lanes * prod(each.steps for each in views[-1].values())


def formulas(case: Case, level: str) -> dict[tuple[str, str], int]:
    """What the formulas say, by count and tensor."""
    chain, schedule, found = case.chain, case.schedule, {}
    made = nests(chain, schedule, case.tiling, case.residency)[level]
    for index, (own, product) in enumerate(zip(made, chain.products, strict=True)):
        for name in (product.left, *product.rights, product.output, *product.further):
            tensor, result, nest = chain.tensor(name), name == product.output, own
            hold = case.residency.position(tensor, schedule)
            if result:
                found["made", name] = elements_made(nest, tensor.dims)
            elif name in product.further:
                nest = replace(own, own=further_loops(chain, index, name))
            else:
                times = len(product.rights) if name == product.left else 1
                found["read", name] = times * operand_reads(nest, tensor.dims, PIECES)
            if result and tensor.role == "intermediate":
                continue
            found["moved", name] = elements_moved(nest, tensor.dims, hold)
            first = elements_moved(nest, tensor.dims, hold, first=True)
            found["largest", name] = region_elements(nest, tensor.dims, hold)
            if result:
                found["again", name] = found["moved", name] - first
    return found


def walked(case: Case, level: str) -> Walk:
    chain, schedule, tiling = case.chain, case.schedule, case.tiling
    return Walk(chain, schedule, tiling, case.residency, level, PIECES).run()


def agree(case: Case, level: str) -> None:
    walk = walked(case, level)
    for (count, name), found in formulas(case, level).items():
        assert found == getattr(walk, count)[name], (case, level, count, name)


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


@pytest.mark.parametrize("schedule", list(loop_schedules("mnkl")), ids=str)
def test_formulas_equal_the_walk_in_all_schedules(schedule: LoopSchedule) -> None:
    rng = np.random.default_rng(sum(map(ord, str(schedule))))
    done = 0
    while done < CASES // 8:
        chain = random_chain(rng, 2)
        if "b" in chain.extents:
            continue
        residency = random_residency(rng, chain, schedule)
        case = Case(chain, schedule, random_tiling(rng, chain), residency)
        for level in LEVELS:
            if steps(case, level) <= STEPS:
                agree(case, level)
                done += 1


def only_loops_that_index(nest: Nest, dims: tuple[str, ...], hold: int, **_: bool) -> int:
    """A planted fault: the volume of Algorithm 1 of FlashFuser, without what is read again."""
    return prod(nest.grains[dim].extent for dim in dims)


def the_sum_repeats_all(nest: Nest, dims: tuple[str, ...], hold: int, **options: bool) -> int:
    """A planted fault: what the epilogue reads comes for every step of the sum."""
    return elements_moved_as_is(replace(nest, own=nest.grains), dims, hold, **options)


def every_loop_crosses(nest: Nest, dims: tuple[str, ...], hold: int, **_: bool) -> int:
    """A planted fault: Chimera's rules as printed, where loops of one iteration cross too."""
    count, crossed = 1, False
    for dim in (*reversed(nest.schedule.order), *nest.schedule.spatial):
        crossed |= dim in dims
        if crossed and (dim in nest.own or dim in nest.repeats):
            grain = nest.grains[dim]
            count *= grain.extent if dim in dims else grain.tiles
    return count


elements_moved_as_is = elements_moved


@pytest.mark.parametrize("fault", [only_loops_that_index, every_loop_crosses, the_sum_repeats_all])
def test_the_walk_catches_rules_as_published(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "elements_moved", fault)
    rng, caught, done = np.random.default_rng(6), 0, 0
    while done < 100:
        case = random_case(rng, 2)
        case = replace(case, residency=recomputed(case.chain, case.schedule))
        if steps(case, "cluster") <= STEPS:
            walk, found = walked(case, "cluster"), formulas(case, "cluster")
            moved = [key for key in found if key[0] == "moved" and key[1] not in ("C",)]
            caught += any(found[key] != walk.moved[key[1]] for key in moved)
            done += 1
    assert caught > 10


def test_arrays_of_candidates_say_the_same_as_each_alone() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        case = random_case(rng)
        chain, many = case.chain, [random_tiling(rng, case.chain) for _ in range(20)]
        tiling = Tiling(
            {dim: np.array([each.block[dim] for each in many]) for dim in chain.extents},
            {
                dim: np.array([each.cluster.get(dim, 1) for each in many])
                for dim in (*chain.extents, "terms")
            },
        )
        for level in LEVELS:
            together = formulas(replace(case, tiling=tiling), level)
            for index, each in enumerate(many):
                alone = formulas(replace(case, tiling=each), level)
                for key, count in alone.items():
                    assert type(count) is int
                    assert np.broadcast_to(together[key], 20)[index] == count, (case, level, key)


#: G4, GPT-2 small: tiles of 64 rows, 128 columns of either product, 64 of the first sum.
G4 = matrix_chain(128, [768, 3072, 768])
TILES = Tiling({"m": 64, "n": 128, "k": 64, "l": 128}, {})
M, N, K, L = 128, 3072, 768, 768
BY_HAND = {
    # Partial sums of E leave for each n; A comes again for each n, weights for each of two m.
    ("m | n l k", kept): {"A": M * K * 24, "B": N * K * 2, "D": N * L * 2, "E": M * L * 24},
    # E is whole before it leaves, and a stripe of C stays: nothing is made twice.
    ("m | l n k", kept): {"A": M * K * 24, "B": N * K * 2, "D": N * L * 2, "E": M * L},
    # The same, but C is made again for each of six l, and so A and B come again.
    ("m | l n k", recomputed): {
        "A": M * K * 24 * 6,
        "B": N * K * 2 * 6,
        "D": N * L * 2,
        "E": M * L,
    },
    # Clusters along n each read A and have partial sums of E; l repeats nothing, as C stays.
    ("m n | l k", recomputed): {"A": M * K * 24, "B": N * K * 2, "D": N * L * 2, "E": M * L * 24},
}


@pytest.mark.parametrize(
    ("order", "rule"), [pytest.param(*each, id=f"{each[0]}-{each[1].__name__}") for each in BY_HAND]
)
def test_volumes_by_hand(order: str, rule) -> None:
    spatial, _, temporal = order.partition(" | ")
    schedule = LoopSchedule(tuple(spatial.split()), tuple(temporal.split()))
    residency = rule(G4, schedule)
    found = formulas(Case(G4, schedule, TILES, residency), "cta")
    expected = BY_HAND[order, rule]
    assert {name: found["moved", name] for name in expected} == expected
    stripe = 64 * (N if (order, rule) == ("m | l n k", kept) else 128)
    assert found["largest", "C"] == stripe


def test_the_published_order_of_chimera() -> None:
    """Order m l k n of the paper, whose l is our n: DM of A, B, D, E for two matrix products."""
    case = Case(G4, LoopSchedule(("m",), ("n", "k", "l")), TILES, recomputed(G4, _MNKL))
    moved = formulas(case, "cta")
    expected = {"A": M * K * (N // 128), "B": K * N * (M // 64), "D": N * L * (M // 64)}
    expected["E"] = M * L * (N // 128)
    assert {name: moved["moved", name] for name in expected} == expected


_MNKL = LoopSchedule(("m",), ("n", "k", "l"))


def test_a_kept_intermediate_is_made_once() -> None:
    rng = np.random.default_rng(8)
    for _ in range(CASES):
        case = random_case(rng)
        chain: Chain = case.chain
        residency = kept(chain, case.schedule)
        made = nests(chain, case.schedule, case.tiling, residency)["grid"]
        for index, tensor in enumerate(chain.intermediates):
            assert elements_made(made[index], tensor.dims) == chain.elements(tensor.name)
