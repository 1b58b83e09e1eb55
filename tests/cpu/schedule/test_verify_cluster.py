"""`verify_cluster` accepts what the primitives make, and records nothing."""

from __future__ import annotations

import pytest
from tvm.s_tir import Schedule

from cpu.schedule.kernels import matmul, scaled_matmul
from cpu.schedule.sampled import CASES, sampled
from cpu.schedule.steps import split_reduction


@pytest.mark.parametrize("case", CASES)
def test_accepts_what_the_primitives_make(case: str) -> None:
    sch = sampled(case)
    instructions = len(sch.trace.insts)
    assert sch.verify_cluster() is None
    assert len(sch.trace.insts) == instructions


def test_accepts_a_function_without_clusters() -> None:
    assert Schedule(scaled_matmul).verify_cluster() is None


def test_accepts_a_cluster_of_one_cta() -> None:
    sch = Schedule(matmul)
    block = sch.get_sblock("C")
    sch.dsm_reduce(block, split_reduction(sch, block, 4, 1))
    assert sch.verify_cluster() is None
    assert sch.cluster_layout().size == 1
