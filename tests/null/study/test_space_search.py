"""A search finds what looking at everything finds, whatever it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from crossfuse.errors import ArgumentRefused, PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of, matrix_chain
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload import parse
from null.study.chains import pieces, random_case
from study.dataflow.cluster import legal_cluster
from study.dataflow.movement import MEMORIES, Machine, movement
from study.dataflow.published import (
    blocks_of,
    chosen,
    count,
    grid,
    loop_schedules,
    published,
    sum_before_use,
)
from study.dataflow.relaxations import (
    RELAXATIONS,
    Batch,
    Group,
    combined,
    dividing,
    even,
    groups_of,
    relaxation,
)
from study.dataflow.rules import PUBLISHED, narrowed
from study.dataflow.schedules import kept
from study.dataflow.search import Candidate, Roof, idle_loops, least_bytes, search, spatial_twin
from study.dataflow.tiling import Tiling

H100 = device("nvidia-h100")
L2 = Machine(H100.l2_bytes)
SMALL = matrix_chain(48, [32, 80, 32])
GATED = matrix_chain(16, [16, 48, 32], gated=True)
CONVOLUTIONS = chain_of(parse("conv_chain:batch=1,H=4,W=4,IC=16,OC1=32,OC2=16,k1=3"))
THREE = matrix_chain(16, [16, 32, 16, 48])
#: Ratios that make each level the bound of some candidates; no measured numbers.
ROOFS = (
    Roof({"hbm": 3.0, "l2": 5.5, "dsm": 3.3, "shared": 20.0}),
    Roof({"hbm": 3.0, "l2": 5.5, "dsm": 0.5, "shared": 4.0, "registers": 30.0}),
    Roof({"l2": 1.0}),
    Roof({"registers": 1.0, "dsm": 0.3}),
)


def all_groups(chain: Chain, names: tuple[str, ...] = ()) -> list[Group]:
    members = [relaxation(each) for each in names] if names else RELAXATIONS
    return [group for each in members for group in groups_of(chain, H100, each)]


def everything(chain: Chain) -> Iterator[Group]:
    """All multiples of 16, all clusters that can run, all orders that sum before they use."""
    tiles = grid(blocks_of(chain))
    clusters = grid(dict.fromkeys(chain.extents, range(1, 17)))
    clusters = chosen(clusters, np.asarray(legal_cluster(chain, clusters)))
    for schedule in loop_schedules(list(chain.extents)):
        if sum_before_use(chain, schedule):
            batch = (Batch(tiles, clusters),)
            yield Group("everything", schedule, kept(chain, schedule), batch)


@pytest.mark.parametrize("roof", ROOFS)
def test_rules_of_our_own_leave_a_best_candidate(roof: Roof) -> None:
    """Even tiles, relaxations and bounds against all tiles, clusters and orders that there are.

    Odd clusters with uneven tiles are in no relaxation, so that they are given here as their own.
    """
    whole = list(everything(SMALL))
    best = search(SMALL, whole, roof.score, L2, keep=1).best[0].score
    few = [
        Group("few", each.schedule, each.residency, (Batch(grid(even(SMALL)), clusters),))
        for each in whole
        for clusters in [each.batches[0].clusters]
    ]
    bounds = (idle_loops(SMALL, few), least_bytes(SMALL, roof))
    found = search(SMALL, few, roof.score, L2, keep=1, bounds=bounds)
    assert found.best[0].score == best
    total = sum(each.size for each in few)
    assert found.scored + sum(found.bounded.values()) == total
    assert found.bounded["idle loop"] > 0 and total < sum(each.size for each in whole)


@pytest.mark.parametrize("chain", [SMALL, GATED, THREE])
@pytest.mark.parametrize("roof", ROOFS[:2])
def test_bounds_change_no_score_of_the_best(chain: Chain, roof: Roof) -> None:
    names = ("published", "one CTA")
    names += () if chain is THREE else ("again", "through L2", "apart")
    groups = all_groups(chain, names)
    plain = search(chain, groups, roof.score, L2, keep=1)
    bounds = (idle_loops(chain, groups), least_bytes(chain, roof))
    found = search(chain, groups, roof.score, L2, keep=1, bounds=bounds)
    assert found.best[0].score == plain.best[0].score
    assert plain.scored == sum(each.size for each in groups) > found.scored


def test_extents_that_are_left_out_are_needless() -> None:
    """The one that stays has as many tiles and no more bytes on any level."""
    rng, machine = np.random.default_rng(0), Machine(10**4)
    for _ in range(60):
        case = random_case(rng, 2)
        chain = matrix_chain(
            int(rng.integers(1, 300)), [int(each) for each in rng.integers(1, 300, 3)]
        )
        schedules = list(loop_schedules(list(chain.extents)))
        schedule = schedules[int(rng.integers(len(schedules)))]
        cluster = {dim: case.tiling.cluster.get(dim, 1) for dim in chain.extents}
        if not legal_cluster(chain, cluster):
            cluster = {}
        stays, blocks = even(chain), blocks_of(chain)
        picked = {dim: int(rng.choice(each)) for dim, each in blocks.items()}
        for dim, block in picked.items():
            if block in stays[dim]:
                continue
            tiles = -(-chain.extents[dim] // block)
            fitting = [
                each
                for each in stays[dim]
                if each < block and -(-chain.extents[dim] // each) == tiles
            ]
            found = [
                movement(
                    chain,
                    schedule,
                    Tiling({**picked, dim: each}, cluster),
                    kept(chain, schedule),
                    machine,
                )
                for each in (*fitting, block)
            ]
            totals = [[each.total(level) for level in MEMORIES] for each in found]
            assert any(
                all(a <= b for a, b in zip(each, totals[-1], strict=True)) for each in totals[:-1]
            )


def test_a_loop_of_one_step_may_as_well_be_spatial() -> None:
    rng, checked = np.random.default_rng(1), 0
    while checked < 200:
        case = random_case(rng)
        for dim in case.schedule.order:
            wide = case.tiling.block[dim] * case.tiling.cluster.get(dim, 1)
            if wide < case.chain.extents[dim]:
                continue
            twin = spatial_twin(case.schedule, dim, case.chain)
            machine = Machine(int(rng.choice([10, 100, 10**6])))
            walked = movement(
                case.chain, case.schedule, case.tiling, kept(case.chain, case.schedule), machine
            )
            side = movement(case.chain, twin, case.tiling, kept(case.chain, twin), machine)
            for level in MEMORIES:
                assert side.total(level) <= walked.total(level)
            checked += 1


@pytest.mark.parametrize("chain", [GATED, CONVOLUTIONS])
@pytest.mark.parametrize("roof", ROOFS)
def test_no_score_is_below_its_bound(chain: Chain, roof: Roof) -> None:
    """Also where L2 is too small, and memory has each pixel once and L2 all windows."""
    machine, bound = Machine(10**4), least_bytes(chain, roof)
    for group in all_groups(chain)[::3]:
        for tiling in pieces(group):
            moved = movement(chain, group.schedule, tiling, group.residency, machine)
            assert (roof.score(moved, group, tiling) >= bound.least(group, tiling)).all()


def key(each: Candidate) -> tuple[object, ...]:
    tiling = each.tiling
    cluster = tuple(sorted(tiling.cluster.items()))
    return (str(each.schedule), str(each.residency), tuple(tiling.block.items()), cluster)


def test_relaxations_share_no_candidate_and_have_what_they_say() -> None:
    found: dict[tuple[object, ...], str] = {}
    for group in all_groups(GATED):
        for tiling in pieces(group):
            for index in range(len(tiling.block["m"])):
                block = {dim: int(each[index]) for dim, each in tiling.block.items()}
                cluster = {dim: int(each[index]) for dim, each in tiling.cluster.items()}
                value = Tiling(block, cluster)
                one = key(Candidate(0, group.relaxation, group.schedule, group.residency, value))
                assert one not in found, (one, found.get(one), group.relaxation)
                found[one] = group.relaxation
                assert legal_cluster(GATED, cluster)
    assert len(found) == sum(each.size for each in all_groups(GATED))
    assert set(found.values()) == {each.name for each in RELAXATIONS}


def ruled(chain: Chain) -> tuple[Group, ...]:
    """The candidates that the published rules leave of the published space, and that can run.

    Each cluster makes an intermediate once. The rules keep some clusters that no chain can run on,
    such as cls_l that exceeds the CTAs of a row.
    """
    domain = published(chain)
    for rule in (each for each in PUBLISHED if each.on != "room"):
        domain = narrowed(chain, domain, rule)
    keep = np.asarray(legal_cluster(chain, domain.clusters))
    clusters = chosen(domain.clusters, keep)
    room = [each for each in PUBLISHED if each.on == "room"]
    residencies = {each: kept(chain, each) for each in domain.schedules}
    return combined(chain, H100, "published", residencies, room, grid(domain.blocks), clusters)


def test_the_published_family_is_the_published_space_less_what_cannot_run() -> None:
    chain = matrix_chain(256, [4096, 16384, 4096])
    groups = ruled(chain)
    assert (
        sum(each.size for each in groups)
        == sum(each.size for each in groups_of(chain, H100, relaxation("published")))
        == 602020
    )
    assert count(chain, H100)[-1].candidates == 1151870


@pytest.mark.parametrize(("threads", "piece"), [(1, 4096), (2, 700), (3, 10**6)])
def test_the_best_are_those_of_a_whole_sort(threads: int, piece: int) -> None:
    groups, roof = all_groups(SMALL, ("published", "one CTA")), ROOFS[1]
    scores = []
    for group in groups:
        for tiling in pieces(group, piece):
            moved = movement(SMALL, group.schedule, tiling, group.residency, L2)
            scores += list(roof.score(moved, group, tiling))
    found = search(SMALL, groups, roof.score, L2, keep=50, threads=threads, piece=piece)
    assert [each.score for each in found.best] == sorted(scores)[:50]
    once = search(SMALL, groups, roof.score, L2, keep=50, threads=1, piece=piece)
    assert [key(each) for each in once.best] == [key(each) for each in found.best]
    assert found.scored == len(scores)
    for each in found.best:
        assert all(type(size) is int for size in each.tiling.block.values())
        alone = movement(SMALL, each.schedule, each.tiling, each.residency, L2)
        group = Group(each.relaxation, each.schedule, each.residency, ())
        assert roof.score(alone, group, each.tiling) == each.score


@pytest.mark.parametrize("threads", [1, 3])
def test_bounds_leave_the_same_best_in_any_order(threads: int) -> None:
    """Of candidates that no other one stands for, the best are those of a search without limits."""
    groups, roof = all_groups(SMALL, ("published", "again")), ROOFS[0]
    idle = idle_loops(SMALL, groups)
    few = search(SMALL, groups, roof.score, L2, keep=20, bounds=[idle], threads=1)
    bounds = (idle, least_bytes(SMALL, roof))
    found = search(SMALL, groups, roof.score, L2, keep=20, bounds=bounds, threads=threads, piece=99)
    wide = [each.score for each in few.best]
    assert [each.score for each in found.best] == wide
    assert found.bounded["idle loop"] == few.bounded["idle loop"] > 0
    once = search(SMALL, groups, roof.score, L2, keep=20, bounds=bounds, threads=1, piece=99)
    assert [key(each) for each in once.best] == [key(each) for each in found.best]


def test_tiles_that_divide_are_among_the_even_ones() -> None:
    for chain in (SMALL, matrix_chain(200, [1000, 11008, 4096])):
        for dim, each in dividing(chain).items():
            assert set(each) <= set(even(chain)[dim])
    assert dividing(matrix_chain(8, [64, 64, 64]))["m"] == even(matrix_chain(8, [64] * 3))["m"]
    # 192 rows: of two tiles, 96 has four instructions of 64 rows and 128 has three.
    assert even(matrix_chain(192, [16, 16, 16]))["m"] == (16, 32, 48, 64, 80, 96, 128, 192)


def test_a_batch_is_taken_in_any_part() -> None:
    chain = matrix_chain(32, [32, 32, 32], batch=3)
    batch = chain.rows[0]
    assert blocks_of(chain)[batch] == (1, 2, 3) and dividing(chain)[batch] == (1, 3)
    assert any(each.size for each in groups_of(chain, H100, relaxation("published")))


def test_nothing_to_keep_is_refused() -> None:
    groups = all_groups(SMALL, ("published",))
    with pytest.raises(ArgumentRefused, match="keep of search: found 0; limit: a whole number of"):
        search(SMALL, groups, ROOFS[0].score, L2, keep=0)
    with pytest.raises(PlanRefused) as caught:
        search(SMALL, [], ROOFS[0].score, L2)
    assert "groups: found no candidates; limit: at least one" in str(caught.value)
    with pytest.raises(PlanRefused) as caught:
        relaxation("odd")
    assert "relaxation: found 'odd'; limit: one of published, one CTA, uneven" in str(caught.value)
