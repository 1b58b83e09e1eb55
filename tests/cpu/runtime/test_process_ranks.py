"""Ranks in several processes: windows over the memory of all of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cpu.process_groups import answers_once

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return answers_once("cpu.runtime.process_ranks", tmp_path_factory)


def test_all_processes_have_all_rows(found: dict[str, list[Any]]) -> None:
    assert found["rows"] == [[7, 8]] * 2


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        (
            "no_memory",
            (
                "peer-group: rank 1: found cuda-driver: cuMemCreate: found CUresult 2; limit:",
                "cuda-driver: cuMemCreate: found CUresult 2; limit: GPUs that reach",
            ),
        ),
        (
            "no_way",
            (
                "cuda-driver: cuMemImportFromShareableHandle: found CUresult 2; limit: GPUs",
                "peer-group: rank 0: found cuda-driver: cuMemImportFromShareableHandle: found",
            ),
        ),
        ("hosts", ("peer-group: process group: found ranks on hosts node0, node1; limit:",) * 2),
        (
            "no_gpu",
            (
                "peer-group: rank 0: found 0 GPUs that torch sees; limit: a GPU of each rank. "
                "Instead: run it where there are as many GPUs.",
                "peer-group: rank 1: found 0 GPUs that torch sees; limit: a GPU of each rank.",
            ),
        ),
        (
            "not_a_member",
            (
                "",
                "peer-group: process group: found a process that is not in it; limit: a process of "
                "an initialised group. Instead: call it in the processes of the group.",
            ),
        ),
    ],
)
def test_what_one_rank_lacks_all_are_told(
    case: str, texts: tuple[str, str], found: dict[str, list[Any]]
) -> None:
    for text, expected in zip(found[case], texts, strict=True):
        assert text.startswith(expected)
