"""Every cluster size and combiner, through LLVM and through the emulated CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cpu.schedule.runs import (
    chain,
    check,
    exchange_chain,
    exchange_slices,
    gemm,
    scatter,
    shuffle,
)

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)


@pytest.mark.parametrize("size", SIZES)
def test_scatter(size: int) -> None:
    func = gemm(size)
    check(func, scatter(func, size), (size, 1, 1))


@pytest.mark.parametrize("size", SIZES)
def test_all_exchange_for_a_consumer_of_the_whole_tile(size: int) -> None:
    func = chain(size)
    check(func, exchange_chain(func, size), (size, 1, 1))


@pytest.mark.parametrize("size", [1, 4, 7, 16])
def test_all_exchange_for_a_consumer_of_slices(size: int) -> None:
    func = gemm(size)
    check(func, exchange_slices(func, size), (size, 1, 1))


@pytest.mark.parametrize("size", SIZES)
def test_ring(size: int) -> None:
    func = chain(size)
    check(func, shuffle(func, size, ring=True), (size, 1, 1))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size: int) -> None:
    func = chain(size)
    check(func, shuffle(func, size, ring=False), (size, 1, 1))


@pytest.mark.parametrize("size", [2, 5])
def test_ring_of_parts(size: int) -> None:
    func = chain(size)
    check(func, shuffle(func, size, ring=True, parts=2), (size, 1, 1))


@pytest.mark.parametrize("combine", ["prod", "max", "min"])
@pytest.mark.parametrize("schedule", [scatter, exchange_slices])
def test_combiners(schedule: Callable[[Any, int], Any], combine: str) -> None:
    func = gemm(3, combine)
    check(func, schedule(func, 3), (3, 1, 1), combine)
