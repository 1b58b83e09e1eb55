"""Tensor-parallel models in the torch backend: sums over ranks in two processes, without GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from cpu.process_groups import answers_once

pytest.importorskip("torch")

SUM = "_c10d_functional.all_reduce.default"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all ranks answered alike."""
    every = answers_once("cpu.torch.tensor_parallel", tmp_path_factory)
    assert all(one == other for one, other in every.values())
    return {name: one for name, (one, _) in every.items()}


def test_graphs_of_cpus_stay_as_they_are(found: dict[str, Any]) -> None:
    assert found["on_cpus"] == {
        "close": True,
        "names": [],
        "texts": [],
        "reason": "its tensors are on cpu, and kernels need a GPU",
        "untranslated": [],
    }


def test_groups_that_are_not_connected_stay_as_they_are(found: dict[str, Any]) -> None:
    left = found["not_connected"]
    assert left["close"] and left["names"] == [""]
    assert left["texts"] == [
        "a sum over group '0', which crossfuse.torch.connect_ranks did not connect"
    ]
    assert SUM in left["untranslated"]


def test_sum_behind_a_row_parallel_layer_becomes_a_kernel(found: dict[str, Any]) -> None:
    assert found["connected"] == {
        "close": True,
        "names": ["all_reduce"],
        "texts": ["a sum of 1024 bytes over 2 GPUs"],
        "reason": "",
        "untranslated": [],
    }


@pytest.mark.parametrize(
    ("case", "name", "text"),
    [
        ("bfloat16", "all_reduce", "a sum of 768 bytes over 2 GPUs"),
        ("many", "", "NCCL is estimated to be faster for a sum of 524288 bytes over 2 GPUs"),
        ("many_of_ours", "all_reduce", "a sum of 524288 bytes over 2 GPUs"),
        ("more_than_a_slab", "", "a sum of 67112960 bytes; limit: 67108864"),
        ("doubles", "", "a sum of float64; limit: float16, bfloat16, float32"),
        (
            "uneven",
            "",
            "a sum of 40028 elements, which too few CTAs of whole warps divide",
        ),
        ("most", "", "the max over GPUs; limit: sums"),
    ],
)
def test_what_kernels_sum_is_chosen(case: str, name: str, text: str, found: dict[str, Any]) -> None:
    assert found[case]["equal"]
    assert (found[case]["names"], found[case]["texts"]) == ([name], [text])
    assert (SUM in found[case]["untranslated"]) == (not name and case != "doubles")


def test_sums_by_hand(found: dict[str, Any]) -> None:
    assert found["by_hand"] == [True] * 5


def test_slices_and_collections_become_kernels(found: dict[str, Any]) -> None:
    got = found["slices"]
    assert got["equal"] and got["names"] == ["all_gather", "reduce_scatter"]
    assert got["texts"] == [
        "an all-gather of 768 bytes over 2 GPUs",
        "a reduce-scatter of 1536 bytes over 2 GPUs",
    ]


def test_exchanges_of_equal_slices_become_kernels(found: dict[str, Any]) -> None:
    got = found["exchanged"]
    assert got["equal"] and got["names"] == ["all_to_all", ""]
    assert got["texts"] == [
        "an all-to-all of 768 bytes over 2 GPUs",
        "an all-to-all of slices of several sizes",
    ]


def test_errors_leave_a_graph_as_it_was(found: dict[str, Any]) -> None:
    got = found["broken"]
    assert got["equal"] and got["names"] == []
    assert got["reason"] == "ZeroDivisionError: planted"


def test_products_go_beside_their_collectives(found: dict[str, Any]) -> None:
    got = found["in_parts"]
    assert got["close"]
    assert got["names"] == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert set(got["texts"]) == {"products in parts, one of each rank, beside copies between GPUs"}


def test_rows_that_others_use_are_collected_in_one(found: dict[str, Any]) -> None:
    got = found["rows_used_elsewhere"]
    assert got["close"] and got["names"] == ["matmul_reduce_scatter", "all_gather"]


def test_collectives_and_products_by_hand(found: dict[str, Any]) -> None:
    assert found["others_by_hand"] == [True] * 12
    assert found["products_by_hand"] == [True] * 4
    assert found["by_hand_in_a_graph"] == ["True"]


def test_wrong_calls_are_refused(found: dict[str, Any]) -> None:
    scattered, product, collected, *others = found["wrong_calls"]
    assert scattered == (
        "torch-operator: crossfuse::reduce_scatter: found a reduce-scatter of 5 rows; limit: a "
        "multiple of 2, a slice for each rank. Instead: give the tensor other extents, or pad it "
        "with rows."
    )
    assert "found a reduce-scatter of 3 rows; limit: a multiple of 2" in product
    assert "found an all-gather of a scalar; limit: tensors of rows" in collected
    three, none, depth, exchanged, text, group = others
    assert text.startswith("argument: tensor of all_gather: found 'x'; limit: a Tensor.")
    assert group.startswith("argument: group of all_gather: found 'world'; limit: a ProcessGroup")
    assert "found an all-to-all of 3 rows; limit: a multiple of 2" in exchanged
    assert three == (
        "torch-operator: crossfuse::all_gather_matmul: found a tensor of (2, 3, 4) and weights of "
        "(4, 4); limit: [rows, depth], and [depth, columns] for each weight. Instead: flatten "
        "leading axes with reshape, and pass weights as x @ w takes them."
    )
    assert "found a tensor of (2, 4) and no weights" in none
    assert "found a tensor of (2, 4) and weights of (5, 4)" in depth


def test_gradients_are_refused(found: dict[str, Any]) -> None:
    assert "found a call that records gradients; limit: kernels" in found["gradients"]


def test_group_of_one(found: dict[str, Any]) -> None:
    assert found["one_rank"] == [True, "a sum over one GPU"]


def test_graphs_survive_their_connection(found: dict[str, Any]) -> None:
    assert found["closed"] == [["all_reduce"], True]
