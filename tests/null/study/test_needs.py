"""From a candidate to where its tensors live."""

from __future__ import annotations

import numpy as np

from crossfuse.hardware import device
from crossfuse.planner.chain.build import matrix_chain
from null.study.chains import random_case
from study.dataflow.movement import Machine, movement
from study.dataflow.placement import Capacities, Need, capacities, needs_of, place, spilled
from study.dataflow.schedules import Residency, kept, read_schedule
from study.dataflow.tiling import Tiling
from study.dataflow.volume import nests

H100 = device("nvidia-h100")
G5 = matrix_chain(128, [4096, 16384, 4096])
TILES = Tiling({"m": 128, "n": 128, "k": 64, "l": 128}, {"n": 8, "l": 8})


def needs(order: str, residency: Residency, tiling: Tiling = TILES, ctas: int = 128) -> list[Need]:
    made = nests(G5, read_schedule(order, G5), tiling, residency)["cta"]
    return needs_of(G5, tiling.cluster, made, residency, ctas)


def test_an_order_that_keeps_sums_and_one_that_keeps_a_stripe() -> None:
    one = read_schedule("m | n l k", G5)
    sums = Residency({**kept(G5, one).hold, "E": one.position("n")})
    assert needs("m | n l k", sums) == [
        Need("E sums", 128 * 4096 // 8 * 4, registers=True, units=128),
        Need("C sums", 128 * 128 * 4, registers=True, units=128),
        Need("C", 8 * 128 * 128 * 2, sharers=8, units=16),
    ]
    other = read_schedule("m | l n k", G5)
    assert needs("m | l n k", kept(G5, other)) == [
        Need("E sums", 128 * 128 * 4, registers=True, units=128),
        Need("C sums", 128 * 128 * 4, registers=True, units=128),
        Need("C", 128 * 16384 * 2, sharers=8, units=16),
    ]


def test_a_stripe_that_no_cta_has_room_for_is_spread_over_the_cluster() -> None:
    """C of G5 has 4 MiB: more than a CTA and than a cluster of 8 has, so that a part is in L2."""
    schedule = read_schedule("m | l n k", G5)
    residency = kept(G5, schedule)
    room = capacities(H100, threads=256, other_registers=56, pipeline=128 << 10)
    wanted = needs("m | l n k", residency)
    placed = place(wanted, room)
    free = 232448 - (128 << 10)
    assert placed["E sums"]["registers"] == placed["C sums"]["registers"] == 128 * 128 * 4
    assert placed["C"]["shared"] == free and placed["C"]["dsm"] == 7 * free
    rest = 128 * 16384 * 2 - 8 * free
    # 16 groups share 25 MiB of L2.
    assert placed["C"]["l2"] == min(rest, (25 << 20) // 16)
    share = spilled(G5, wanted, placed)["C"]
    assert share == rest / (128 * 16384 * 2)
    machine = Machine(H100.l2_bytes, spilled={"C": share})
    found = movement(G5, schedule, TILES, residency, machine)
    # Written once, read for each of four steps of l.
    assert found.bytes["l2"]["C"] == 5 * 128 * 16384 * 2 * share


def test_sums_over_a_spatial_dim_are_of_one_tile() -> None:
    schedule = read_schedule("m k | l n", G5)
    found = {each.name: each.bytes for each in needs("m k | l n", kept(G5, schedule))}
    assert found["C sums"] == 128 * 128 * 4
    assert found["C"] == 128 * 16384 * 2


def test_a_grid_wide_intermediate_needs_no_room_in_a_cta() -> None:
    wide = Residency({"C": 0}, frozenset({"C"}))
    assert [each.name for each in needs("m n l | k", wide)] == ["E sums", "C sums"]


def test_sums_of_gate_and_up_are_two() -> None:
    chain = matrix_chain(128, [64, 256, 64], gated=True)
    schedule = read_schedule("m | n l k", chain)
    tiling = Tiling({"m": 128, "n": 64, "k": 64, "l": 64}, {})
    made = nests(chain, schedule, tiling, kept(chain, schedule))["cta"]
    found = needs_of(chain, {}, made, kept(chain, schedule), 1)
    assert {each.name: each.bytes for each in found}["C sums"] == 2 * 128 * 64 * 4


def test_room_enough_spills_nothing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        case = random_case(rng)
        made = nests(case.chain, case.schedule, case.tiling, case.residency)["cta"]
        wanted = needs_of(case.chain, case.tiling.cluster, made, case.residency, 16)
        for room, share in ((Capacities(10**6, 10**6, 0), 0), (Capacities(0, 0, 10**6), 1)):
            parts = spilled(case.chain, wanted, place(wanted, room))
            assert all(each == share for each in parts.values())
            names = {each.name for each in case.chain.intermediates}
            assert set(parts) == names - case.residency.grid_wide
