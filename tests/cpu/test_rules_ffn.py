"""The rule for GEMM chains and gated FFNs, by both checkers."""

from __future__ import annotations

import pytest

from cpu.fuzz.oracle import INPUTS, judge
from crossfuse.schedule.rules.threads import Tiles, schedule_ffn
from crossfuse.workload import WorkloadSpec, prim_func
from crossfuse.workload.suites import ids, lookup

CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
KINDS = ("gemm_chain", "gated_ffn")
ROWS = (1, 5, 17, 33)


def assert_right(
    spec: WorkloadSpec, cluster: int, *inputs: str, ring: bool = True, tiles: Tiles | None = None
) -> None:
    def build() -> object:
        return schedule_ffn(prim_func(spec), cluster=cluster, ring=ring, tiles=tiles)

    verdict = judge(spec, build, *inputs)
    assert verdict.passed, verdict.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_cluster_size(cluster: int, kind: str, dtype: str) -> None:
    case = CLUSTERS.index(cluster) + KINDS.index(kind) + len(dtype)
    widths = {"N": cluster * (8, 12, 5)[case % 3], "L": cluster * (4, 3, 8)[case % 3]}
    spec = WorkloadSpec(
        kind, M=ROWS[case % 4], K=(37, 96)[case % 2], **widths, dtype=dtype, act="silu"
    )
    assert_right(spec, cluster, INPUTS[case % len(INPUTS)], ring=case % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [True, False], ids=["ring", "all-gather"])
def test_adversarial_inputs(ring: bool) -> None:
    spec = WorkloadSpec("gated_ffn", M=17, K=40, N=96, L=48, dtype="float16")
    assert_right(spec, 4, *INPUTS, ring=ring)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weights", ["kn", "nk"])
def test_odd_rows_in_both_layouts(rows: int, weights: str) -> None:
    spec = WorkloadSpec("gemm_chain", M=rows, K=50, N=60, L=36, dtype="bfloat16", weights=weights)
    assert_right(spec, 6, "random")


@pytest.mark.parametrize("name", [*ids("gemm_chain"), *ids("gated_ffn")])
def test_the_packaged_shapes_in_small(name: str) -> None:
    """A 16th to a 64th of each width keeps the factors that decide tiles and slices."""
    whole = lookup(name, M=3)
    scale = {"gemm_chain": 16, "gated_ffn": 64}[whole.kind]
    widths = {dim: max(8, getattr(whole, dim) // scale) for dim in ("N", "L")}
    spec = WorkloadSpec(whole.kind, M=3, K=max(8, whole.K // 64), **widths, dtype=whole.dtype)
    cluster = max(c for c in CLUSTERS if spec.N % c == 0 and spec.L % c == 0 and c <= 8)
    assert_right(spec, cluster, "random")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(rows=4),
        Tiles(rows=5, threads_y=5),
        Tiles(rows=12, threads_y=3, threads_x=4, columns=2, depth=4),
        Tiles(rows=1, threads_x=8),
        Tiles(columns=1, depth=1),
    ],
)
def test_given_tiles_are_used(tiles: Tiles) -> None:
    spec = WorkloadSpec("gated_ffn", M=12, K=24, N=32, L=16, dtype="float16")
    schedule = schedule_ffn(prim_func(spec), cluster=2, tiles=tiles)
    text = str(schedule.mod.script())
    if tiles.threads_y:
        assert f'T.thread_binding({tiles.threads_y}, thread="threadIdx.y")' in text
    if tiles.threads_x:
        assert f'T.thread_binding({tiles.threads_x}, thread="threadIdx.x")' in text
    assert_right(spec, 2, "random", tiles=tiles)


@pytest.mark.slow
def test_a_prime_reduction_is_staged_whole_or_by_element() -> None:
    short = WorkloadSpec("gemm_chain", M=2, K=67, N=8, L=8, dtype="float32")
    assert_right(short, 2, "random")
    long = WorkloadSpec("gemm_chain", M=2, K=521, N=8, L=8, dtype="float32")
    assert_right(long, 2, "random")


@pytest.mark.parametrize(("K", "N", "L"), [(8, 1, 8), (1, 13, 1)])
def test_one_column_or_one_step(K: int, N: int, L: int) -> None:
    """A staged element is copied by the one thread that its bound leaves."""
    spec = WorkloadSpec("gemm_chain", M=5, K=K, N=N, L=L, dtype="float32")
    assert_right(spec, 1, "random")
