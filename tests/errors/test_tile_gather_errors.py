"""Chains in a cluster that the rule and the Hopper pipeline refuse, by the text."""

from __future__ import annotations

from typing import Any

import pytest
import tvm

from crossfuse.errors import LoweringRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.planner.families.parted import ClusteredKernel
from crossfuse.schedule.rules.parted_ffn import ClusterTiles, schedule_clustered_ffn
from crossfuse.workload import parse, prim_func

CHAIN = "gemm_chain:M=128,K=64,N=256,L=64,dtype=bfloat16,act=relu"


def text_of(tiles: ClusterTiles) -> str:
    schedule = schedule_clustered_ffn(prim_func(parse(CHAIN)), tiles=tiles)
    return str(only_function(schedule).script())


#: Tiles, what is replaced by what in the scheduled function, and what the refusal says.
CHANGED: dict[str, tuple[tuple[int, int, int], str, str, str]] = {
    "ring order": (
        (64, 4, 1),
        '"all-gather"',
        '"ring"',
        "block 'hidden_shared.dsm_shared.dyn': found slices in ring order; limit: all of them "
        "by dsm_shuffle(..., ring=False), outside the loop with stages",
    ),
    "other rows are copied": (
        (64, 4, 1),
        "v1 = T.axis.spatial(128, i_0 * 64 + ax1)\n                    v2 =",
        "v1 = T.axis.spatial(128, ax1)\n                    v2 =",
        "block 'hidden_shared.dsm_shared.dyn': found 64 rows from 0; limit: the 64 rows from i_0 *",
    ),
    "slices of other CTAs": (
        (64, 4, 1),
        "hidden_shared_dsm[v_j // 64, v_i, v_j % 64] = ",
        "hidden_shared_dsm[3 - v_j // 64, v_i, v_j % 64] = ",
        "block 'hidden': found ",
    ),
    "another accumulator": (
        (64, 4, 1),
        "T.max(gemm0_local[v_i, v_j], T.float32(0.0))",
        "T.max(gemm0_local[v_i, (v_j + 1) % 256], T.float32(0.0))",
        "block 'hidden', buffer 'gemm0_local': found index (ax1_0 * 64 + ax1_1 + 1) % 256; limit: ",
    ),
    "a value that depends on the part": (
        (64, 2, 2),
        "T.max(gemm0_local[v1, v0 * 128 + v2], T.float32(0.0))",
        'gemm0_local[v1, v0 * 128 + v2] * T.Cast("float32", v0)',
        "block 'hidden': found a value that depends on 'v0'; limit: on row and column alone",
    ),
    "a value of what is in shared memory": (
        (64, 4, 1),
        "T.max(gemm0_local[v_i, v_j], T.float32(0.0))",
        'gemm0_local[v_i, v_j] + T.Cast("float32", A_shared_dyn[v_i, 0])',
        "block 'hidden': found a load of 'A_shared_dyn'; limit: the accumulator and parameters",
    ),
    "the sum of another element": (
        (64, 2, 2),
        'T.Cast("bfloat16", gemm1_local[v_i, v_j])',
        'T.Cast("bfloat16", gemm1_local[v_i, 63 - v_j])',
        "block 'out': found the accumulator at [v_i, 63 - v_j]; limit: the element that is stored",
    ),
    "other columns are multiplied": (
        (64, 2, 2),
        'T.Cast("float32", D_shared_dyn[vk_0 * 128 + vk_1, v_j])',
        'T.Cast("float32", D_shared_dyn[(1 - vk_0) * 128 + vk_1, v_j])',
        "block 'gemm1_rf': found operand 'D_shared_dyn'; limit: tiles that the same step loads",
    ),
    "partial sums of another part": (
        (64, 2, 2),
        "gemm1_rf[v0, v1, v2] = gemm1_rf_local[v0, v1, v2]",
        "gemm1_rf[1 - v0, v1, v2] = gemm1_rf_local[v0, v1, v2]",
        "block 'gemm1.rf_local': found a copy to 'gemm1_rf'; limit: float32 sums at",
    ),
    "sums that are not staged": (
        (64, 2, 2),
        'T.sblock_attr({"crossfuse.grid_stage": 1})',
        "T.sblock_attr({})",
        "block 'gemm1.rf_local': found no elementwise store of a matrix; limit: out[i, j] = ",
    ),
    "a part is left out": (
        (64, 2, 2),
        "for ax0, ax1, ax2 in T.grid(2, 1, 1):",
        "for ax0, ax1, ax2 in T.grid(1, 1, 1):",
        "block 'gemm1': found partial sums at [vk_0, v_i, v_j]; limit: the element of all 2 parts",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_program_is_refused(name: str) -> None:
    tiles, old, new, message = CHANGED[name]
    text = text_of(ClusterTiles(*tiles))
    assert text.count(old) == 1, text
    func = tvm.script.from_source(text.replace(old, new), check_well_formed=False)
    with pytest.raises(LoweringRefused) as caught:
        recover(func)
    assert str(caught.value).startswith(f"tile-program: {message}"), str(caught.value)


def any_division_fits(monkeypatch: Any) -> None:
    monkeypatch.setattr(ClusteredKernel, "legal", lambda *_: True)


@pytest.mark.parametrize(
    ("text", "cluster", "message"),
    [
        (
            "N=192,L=64,dtype=bfloat16",
            8,
            "found 8 slices of 24 columns of bfloat16; limit: slices of a multiple of 16 columns, "
            "of float16 or bfloat16.",
        ),
        (
            "N=96,L=64,dtype=bfloat16,weights=nk",
            2,
            "found 96 columns in steps of 64; limit: whole steps of a multiple of 16 columns.",
        ),
    ],
    ids=["slices that wgmma cannot take", "steps that leave a remainder"],
)
def test_division_is_refused(text: str, cluster: int, message: str, monkeypatch: Any) -> None:
    any_division_fits(monkeypatch)
    monkeypatch.setattr(ClusteredKernel, "width", lambda self, shape: shape.n // self.size)
    spec = parse(f"gemm_chain:M=64,K=64,{text}")
    schedule = schedule_clustered_ffn(prim_func(spec), tiles=ClusterTiles(64, cluster, 1))
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule)
    assert str(caught.value).startswith(f"tile-gather: tensor 'hidden_shared.dsm': {message}")


def test_more_clusters_than_run_at_once(monkeypatch: Any) -> None:
    any_division_fits(monkeypatch)
    spec = parse("gemm_chain:M=1024,K=64,N=256,L=64,dtype=bfloat16")
    schedule = schedule_clustered_ffn(prim_func(spec), tiles=ClusterTiles(64, 8, 2))
    with pytest.raises(LoweringRefused) as caught:
        plan_kernel(recover(only_function(schedule))[0], device("nvidia-h100"))
    assert str(caught.value).startswith(
        "grid-stage: clusters of 8 on nvidia-h100: found 32 clusters that wait for one another's "
        "sums; limit: 15 clusters that run at the same time."
    )


def test_parts_without_columns() -> None:
    spec = parse("gemm_chain:M=64,K=64,N=200,L=64,dtype=bfloat16")
    with pytest.raises(ScheduleRefused) as caught:
        schedule_clustered_ffn(prim_func(spec), tiles=ClusterTiles(64, 4, 8))
    assert str(caught.value).startswith(
        "cluster-tiles: block 'gemm1': found 200 columns of the intermediate and 64 of the output"
    )


def test_single_product() -> None:
    spec = parse("gemm:M=64,K=64,N=64,dtype=bfloat16")
    with pytest.raises(ScheduleRefused) as caught:
        schedule_clustered_ffn(prim_func(spec))
    assert str(caught.value).startswith(
        "rule: clustered_ffn, block 'gemm0': found a single product; limit: a chain of two products"
    )
