"""Ranks in two processes that share a GPU: sums by windows over the memory of both."""

from __future__ import annotations

from typing import Any

import pytest

from cpu.process_groups import answers


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return answers("gpu.process_sums", tmp_path_factory.mktemp("ranks"))


def test_sums_of_two_processes(found: dict[str, list[Any]]) -> None:
    assert found["sums"] == [[True] * 26] * 2


def test_ranks_that_come_later(found: dict[str, list[Any]]) -> None:
    assert found["behind"] == [[True] * 48] * 2


def test_products_in_parts(found: dict[str, list[Any]]) -> None:
    assert found["in_parts"] == [[True] * 60] * 2


def test_late_rank_is_named(found: dict[str, list[Any]]) -> None:
    told = "peer-late: rank 0 of a collective: found no arrival of rank 1"
    assert found["late"][0].count(told) == 2
    assert found["late"][1] == "nothing"
