"""Kernels as values: many at once as each alone, limits, and what rules take of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of, matrix_chain
from crossfuse.planner.families.parted import ClusteredKernel
from crossfuse.planner.families.registry import FAMILIES, families, read_kernel
from crossfuse.planner.kernels.kernel import TileKernel
from crossfuse.planner.kernels.shape import Shape, count, select, shape_of, stack
from crossfuse.workload import resolve
from study.dataflow.movement import Machine, movement
from study.dataflow.schedules import kept, read_schedule
from study.dataflow.tiling import Tiling

H100 = device("nvidia-h100")
SPECS = ("G4", "G1:M=16", "S8:M=512", "S3", "gemm:M=512,K=768,N=3072")


def shape(text: str) -> Shape:
    spec = resolve(text)
    return shape_of(chain_of(spec), k_major=spec.weights == "nk")


def some(text: str, family: str, number: int = 40) -> TileKernel:
    found = FAMILIES[family].every(shape(text), H100)
    picks = np.random.default_rng(0).permutation(count(found))[:number]
    return select(found, picks)


CASES = [(text, each.name) for text in SPECS for each in families(shape(text))]


@pytest.mark.parametrize(("text", "family"), CASES)
def test_arrays_say_what_numbers_say(text: str, family: str) -> None:
    of, kernels = shape(text), some(text, family)
    rooms = kernels.memories(of, H100) if count(kernels) else ()
    for index in range(count(kernels)):
        one = select(kernels, index)
        assert bool(one.legal(of, H100))
        for many, alone in zip(rooms, one.memories(of, H100), strict=True):
            for name in ("left", "right", "size"):
                assert np.broadcast_to(getattr(many, name), (count(kernels),))[index] == getattr(
                    alone, name
                )
        for phase, number in zip(kernels.phases(of), one.phases(of), strict=True):
            for name in ("rows", "columns", "steps", "tiles", "left", "right", "received"):
                values = np.broadcast_to(getattr(phase, name), (count(kernels),))
                assert values[index] == getattr(number, name)


@pytest.mark.parametrize(("text", "family"), CASES)
def test_what_fits_stays_within_the_device(text: str, family: str) -> None:
    of, kernels = shape(text), some(text, family)
    for index in range(count(kernels)):
        for found in select(kernels, index).resources(of, H100):
            assert found.shared_bytes <= H100.max_shared_bytes
            assert found.cluster <= H100.max_cluster
            assert found.busy <= H100.sms
            assert found.right_stages >= 2
            assert found.sums <= 192


@pytest.mark.parametrize(("text", "family"), CASES)
def test_tiles_read_back_as_the_same_kernel(text: str, family: str) -> None:
    kernels = some(text, family)
    ones = [select(kernels, index) for index in range(count(kernels))]
    for one in ones:
        assert read_kernel(family, one.tiles()).tiles() == one.tiles()
    if ones:
        assert count(stack(ones)) == len(ones)


def test_less_shared_memory_leaves_fewer_stages_and_kernels() -> None:
    of = shape("G4")
    small = replace(H100, name="small", max_shared_bytes=H100.max_shared_bytes // 4)
    for family in families(of):
        assert count(family.every(of, small)) < count(family.every(of, H100))


def test_gathered_slices_move_what_the_dataflow_counts() -> None:
    chain = chain_of(resolve("G4"))
    kernel = ClusteredKernel(128, 8, 3)
    tiling = Tiling({"m": 128, "n": 128, "k": 64, "l": 96}, {"n": 8, "l": 8})
    schedule = read_schedule("m n l | k", chain)
    found = movement(chain, schedule, tiling, kept(chain, schedule), Machine(H100.l2_bytes))
    assert kernel.moved_bytes(shape("G4"))["dsm"] == sum(found.bytes["dsm"].values())


def test_a_chain_that_no_rule_builds_is_refused() -> None:
    message = "chain of 2 products: found rows b, m; limit: one dim of rows"
    with pytest.raises(PlanRefused, match=message):
        shape_of(matrix_chain(16, [16, 32, 16], batch=3))


@pytest.mark.parametrize(
    ("family", "tiles", "message"),
    [
        ("local", {}, "found 'local'; limit: gemm, registers, dsm, l2, global"),
        ("dsm", {"rows": 64, "cluster": 8}, "dsm: found no parts; limit: every field"),
        ("l2", {"first": {"split": 1, "rows": 64}}, "l2: found no columns; limit: every field"),
    ],
)
def test_tiles_that_do_not_say_enough_are_refused(
    family: str, tiles: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanRefused, match=message):
        read_kernel(family, tiles)
