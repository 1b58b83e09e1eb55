"""Whole functions through the lowering: values, where barriers stand, and twins with a fault."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from cpu.lower import kernels
from cpu.lower.support import barriers, checked, inputs_of, is_wrong, kernels_in, steps
from crossfuse.emulate.cuda import (
    early_exit,
    emulate,
    recycle_slab,
    remove_cluster_barrier,
    wrong_rank,
)
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import Lowered, lower

SYNC = r"crossfuse_cluster_sync\(\)"
LOAD = r"crossfuse_dsm_load_b\d+\("
STORE = r"crossfuse_dsm_store_b\d+\("
OUTPUT = r"\b(?:B|out)_ptr\[.*\] ="
OWN = r"crossfuse_shared_ptr\)(?: \+ |\[).*\]?\)? = "
FOR, END, IF, ELSE = r"for \(int s ", r"\n  \}\n(?!\})", r"\n  if ", r"else"


@cache
def made(family: str) -> tuple[Any, Lowered]:
    func = kernels.FAMILIES[family][0]()
    return func, lower(func)


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    """Outputs of the emulated kernel, which must be those of the sequential run."""
    func, lowered = made(family)
    inputs = inputs_of(lowered.image)
    report = emulate(lowered.image, inputs)
    assert report.ok, "\n".join(map(str, report.findings))
    for name, value in run_sequential(func, inputs).outputs.items():
        # Sums of a ring are taken in another order.
        got, wanted = report.outputs[name].astype("float64"), value.astype("float64")
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())
    return dict(report.outputs)


@pytest.mark.parametrize("family", kernels.FAMILIES)
def test_kernel_is_clean_and_has_the_barriers_it_needs(family: str) -> None:
    expected(family)
    assert barriers(made(family)[1].image) == kernels.FAMILIES[family][1]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("pull", [OWN, SYNC, LOAD, OUTPUT, SYNC]),
        ("push", [SYNC, STORE, SYNC, OUTPUT]),
        ("temporal", [FOR, SYNC, OWN, SYNC, LOAD, OUTPUT, END, SYNC]),
        ("two axes", [OWN, SYNC, LOAD, OUTPUT, SYNC]),
        ("some clusters", [OWN, IF, SYNC, LOAD, OUTPUT, SYNC, ELSE, OUTPUT]),
        ("split-K scatter", [OWN, SYNC, LOAD, OUTPUT, SYNC]),
        ("split-K all-exchange", [OWN, SYNC, OWN, LOAD, OWN, OUTPUT, SYNC]),
        ("chain, all-gather", [OWN, SYNC, LOAD, OWN, OUTPUT, SYNC]),
    ],
)
def test_barriers_stand_where_they_are_needed(family: str, wanted: list[str]) -> None:
    found = steps(kernels_in(made(family)[1].image.cuda), *dict.fromkeys(wanted))
    runs = [mark for mark, previous in zip(found, [None, *found], strict=False) if mark != previous]
    assert runs == wanted


TWINS = [
    (family, index) for family, (_, count) in kernels.FAMILIES.items() for index in range(count)
]


@pytest.mark.parametrize(("family", "index"), TWINS)
def test_each_barrier_is_necessary(family: str, index: int) -> None:
    twin = remove_cluster_barrier(made(family)[1].image, index)
    assert is_wrong(twin, expected(family))


@pytest.mark.parametrize("family", kernels.FAMILIES)
def test_ranks_outside_the_cluster_and_early_exits_are_caught(family: str) -> None:
    image = made(family)[1].image
    assert is_wrong(wrong_rank(image), expected(family))
    kinds = {each.kind for each in emulate(early_exit(image), inputs_of(image)).findings}
    # The last barrier of a push stands before the receiver reads.
    assert ("race" if family == "push" else "early-exit") in kinds


# A sum over all ranks does not change if every CTA takes the next one first.
@pytest.mark.parametrize("family", [each for each in kernels.FAMILIES if "split-K" not in each])
def test_wrong_ranks_of_the_cluster_are_caught(family: str) -> None:
    image = made(family)[1].image
    text = kernels_in(image.cuda)
    for index in range(len(re.findall(LOAD, text)) + len(re.findall(STORE, text))):
        assert is_wrong(wrong_rank(image, index, wrap=True), expected(family)), index


@pytest.mark.parametrize("family", ["pull", "chain, ring"])
def test_memory_of_a_slab_that_is_read_may_not_be_reused(family: str) -> None:
    lowered = made(family)[1]
    slab = max(lowered.shared_memory.placements, key=lambda each: each.last)
    other = next(
        each
        for each in lowered.shared_memory.placements
        if each is not slab and each.first <= slab.first <= each.last
    )
    moved, kept = sorted((slab, other), key=lambda each: each.size)
    twin = recycle_slab(lowered.image, (moved.offset, moved.size), kept.offset)
    assert is_wrong(twin, expected(family))


@pytest.mark.parametrize("cluster", [1, 2, 3, 8, 16])
def test_cluster_sizes(cluster: int) -> None:
    lowered = checked(kernels.split_k(cluster, k=96))
    assert barriers(lowered.image) == (0 if cluster == 1 else 2)
    assert lowered.image.launches[0].cluster == (cluster, 1, 1)


def test_two_kernels_are_two_launches_with_slabs_of_their_own() -> None:
    lowered = made("two kernels")[1]
    assert [each.grid for each in lowered.image.launches] == [(8, 1, 1), (4, 1, 1)]
    assert [each.cluster for each in lowered.image.launches] == [(4, 1, 1), (4, 1, 1)]
    assert [each.dynamic_shared_bytes for each in lowered.image.launches] == [128, 128]


def test_grid_of_a_cluster_on_two_axes() -> None:
    (launch,) = made("two axes")[1].image.launches
    assert (launch.grid, launch.cluster) == ((3, 4, 1), (3, 2, 1))


def test_phases_of_a_chain_share_memory() -> None:
    plan = made("chain, ring")[1].shared_memory
    spans = [
        (each.offset, each.offset + each.size, each.first, each.last) for each in plan.placements
    ]
    shared = [
        (one, other)
        for one in spans
        for other in spans
        if one[3] < other[2] and one[0] < other[1] and other[0] < one[1]
    ]
    assert shared
    assert plan.total < sum(each.size for each in plan.placements)
