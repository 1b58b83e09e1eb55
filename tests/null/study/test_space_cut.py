"""Chains that are cut where an intermediate is in L2 for all clusters."""

from __future__ import annotations

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import matrix_chain
from study.dataflow.cut import cut, cuts
from study.dataflow.movement import Machine
from study.dataflow.relaxations import RELAXATIONS, groups_of
from study.dataflow.search import Roof, search

H100 = device("nvidia-h100")


def test_parts_of_a_gated_chain() -> None:
    chain = matrix_chain(32, [48, 64, 32], gated=True)
    first, second = cut(chain, ["C"])
    assert list(first.extents) == ["m", "k", "n"] and list(second.extents) == ["m", "n", "l"]
    assert [each.role for each in first.tensors] == ["input", "input", "input", "output"]
    assert [(each.name, each.role) for each in second.tensors] == [
        ("C", "input"),
        ("D", "input"),
        ("E", "output"),
    ]
    assert first.flops + second.flops == chain.flops
    assert cut(chain, []) == (chain,)


def test_all_cuts_of_longer_chains() -> None:
    chain = matrix_chain(32, [48, 64, 32, 16])
    ways = [cut(chain, each) for each in cuts(chain)]
    assert [[len(each.products) for each in way] for way in ways] == [
        [3],
        [1, 2],
        [2, 1],
        [1, 1, 1],
    ]
    for way in ways:
        assert sum(each.flops for each in way) == chain.flops
        assert way[-1].output == chain.output
        joined = [each.output.name for each in way[:-1]]
        assert joined == [each.products[0].left for each in way[1:]]


def test_each_part_chooses_a_cluster_of_its_own() -> None:
    """A tall product takes rows of CTAs and multicasts weights; a wide one takes columns."""
    chain, machine = matrix_chain(64, [512, 64, 1024]), Machine(H100.l2_bytes)
    roof, best = Roof({"l2": 1.0}), []
    for part in cut(chain, ["C"]):
        groups = [group for each in RELAXATIONS[:1] for group in groups_of(part, H100, each)]
        best.append(search(part, groups, roof.score, machine, keep=1).best[0])
    compulsory = [2 * (64 * 512 + 512 * 64 + 64 * 64), 2 * (64 * 64 + 64 * 1024 + 64 * 1024)]
    assert [each.score for each in best] == compulsory


def test_only_intermediates_are_cut() -> None:
    with pytest.raises(PlanRefused) as caught:
        cut(matrix_chain(32, [48, 64, 32]), ["E"])
    assert "cut: after: found E; limit: intermediates: C." in str(caught.value)
