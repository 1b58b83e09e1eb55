"""Where intermediates go, and what is left of the room."""

from __future__ import annotations

from itertools import product as combinations

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from study.dataflow.placement import PLACES, Capacities, Need, capacities, place


def where(**places: int) -> dict[str, int]:
    return {**dict.fromkeys(PLACES, 0), **places}


def test_the_fastest_place_first_and_the_rest_in_the_next() -> None:
    room = Capacities(registers=100, shared=200, l2=1000)
    placed = place([Need("E", 1500, registers=True, units=1)], room)
    assert placed["E"] == where(registers=100, shared=200, l2=1000, hbm=200)


def test_needs_take_room_from_those_after_them() -> None:
    room = Capacities(registers=100, shared=200, l2=1000)
    placed = place([Need("E", 90, registers=True), Need("C", 150), Need("F", 60)], room)
    assert placed["E"] == where(registers=90)
    assert placed["C"] == where(shared=150)
    assert placed["F"] == where(shared=50, l2=10)


def test_peers_have_room_only_for_what_they_read_too() -> None:
    room = Capacities(registers=0, shared=3, l2=1000)
    assert place([Need("C", 6, sharers=4)], room)["C"] == where(shared=3, dsm=3)
    assert place([Need("C", 12, sharers=4)], room)["C"] == where(shared=3, dsm=9)
    assert place([Need("C", 14, sharers=4)], room)["C"] == where(shared=3, dsm=9, l2=2)
    assert place([Need("E", 6)], room)["E"] == where(shared=3, l2=3)


@pytest.mark.parametrize("sharers", [1, 2, 3, 4, 8, 16])
def test_what_is_local_and_remote_can_be_stored(sharers: int) -> None:
    """Some bytes are stored by all, the others by one: that must fill each CTA's room exactly."""
    for size, shared in combinations((0, 1, 5, 12, 60, 400), (0, 1, 3, 12, 50)):
        placed = place([Need("C", size, sharers=sharers)], Capacities(0, shared, 0))["C"]
        local, remote = placed["shared"], placed["dsm"]
        if not remote:
            assert local == min(size, shared)
            continue
        # By all of them: d; by one each: s. Local are d + s / X, remote the rest of s.
        spread = remote * sharers / (sharers - 1)
        copied = local + remote - spread
        assert copied >= -1e-9
        assert copied + spread / sharers == pytest.approx(shared)


def test_groups_share_l2() -> None:
    room = Capacities(registers=0, shared=0, l2=1000)
    placed = place([Need("C", 80, units=10), Need("E", 40, units=10)], room)
    assert placed == {"C": where(l2=80), "E": where(l2=20, hbm=20)}


def test_nothing_is_lost_and_no_room_is_used_twice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        room = Capacities(*(int(each) for each in rng.integers(0, 100, 3)))
        needs = [
            Need(
                name,
                int(rng.integers(0, 120)),
                sharers=int(rng.integers(1, 17)),
                registers=bool(rng.integers(2)),
                units=int(rng.integers(1, 5)),
            )
            for name in "CDE"
        ]
        placed = place(needs, room)
        for need in needs:
            assert sum(placed[need.name].values()) == need.bytes
            assert min(placed[need.name].values()) >= 0
        for name in ("registers", "shared"):
            assert sum(each[name] for each in placed.values()) <= getattr(room, name)
        assert sum(placed[each.name]["l2"] * each.units for each in needs) <= room.l2


def test_many_candidates_at_once() -> None:
    rng = np.random.default_rng(1)
    sizes, sharers = rng.integers(0, 120, (2, 50)), rng.integers(1, 17, 50)
    shared = rng.integers(0, 100, 50)
    needs = [Need("E", sizes[0], registers=True), Need("C", sizes[1], sharers=sharers)]
    together = place(needs, Capacities(20, shared, 60))
    for each in range(50):
        alone = place(
            [
                Need("E", int(sizes[0][each]), registers=True),
                Need("C", int(sizes[1][each]), sharers=int(sharers[each])),
            ],
            Capacities(20, int(shared[each]), 60),
        )
        for name, places in alone.items():
            assert {where: together[name][where][each] for where in PLACES} == places


def test_the_room_of_an_h100() -> None:
    room = capacities(device("nvidia-h100"), threads=256, other_registers=56, pipeline=131072)
    assert room.registers == (255 - 56) * 256 * 4
    assert room.shared == 232448 - 131072
    assert room.l2 == 25 * 2**20
    small = capacities(device("nvidia-h100"), threads=1024, other_registers=80, pipeline=262144)
    assert (small.registers, small.shared) == (0, 0)


def test_what_cannot_be_is_refused() -> None:
    target = device("nvidia-h100")
    with pytest.raises(PlanRefused, match=r"found 0, 0\.5; limit: 1 to 1024 threads"):
        capacities(target, threads=0, other_registers=40, pipeline=0)
    with pytest.raises(PlanRefused, match=r"found 128, 1\.5; limit: .* a share of 0 to 1"):
        capacities(target, threads=128, other_registers=40, pipeline=0, l2_share=1.5)
    with pytest.raises(PlanRefused, match="found C, C; limit: one need for each tensor"):
        place([Need("C", 1), Need("C", 1)], Capacities(0, 0, 0))
