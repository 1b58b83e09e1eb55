"""The rule for one product with a split reduction, by both checkers."""

from __future__ import annotations

import pytest

from cpu.fuzz.oracle import INPUTS, judge
from crossfuse.schedule.rules.threads import Tiles, schedule_split_k
from crossfuse.workload import WorkloadSpec, prim_func

CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
COMBINERS = ("sum", "prod", "max", "min")
DTYPES = ("float16", "bfloat16", "float32")
EXCHANGES = pytest.mark.parametrize("scatter", [True, False], ids=["scatter", "all-exchange"])


def assert_right(
    spec: WorkloadSpec, cluster: int, scatter: bool, *inputs: str, tiles: Tiles | None = None
) -> None:
    def build() -> object:
        return schedule_split_k(prim_func(spec), cluster=cluster, scatter=scatter, tiles=tiles)

    verdict = judge(spec, build, *inputs)
    assert verdict.passed, verdict.text


@EXCHANGES
@pytest.mark.parametrize("combine", COMBINERS)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_cluster_size(cluster: int, combine: str, scatter: bool) -> None:
    """Of these 72 a day has every fifth, which has all clusters, combiners and exchanges."""
    case = CLUSTERS.index(cluster) + COMBINERS.index(combine) + scatter
    # All-exchange takes equal shares only.
    depth = cluster * 12 + (5 if scatter else 0)
    spec = WorkloadSpec(
        "gemm",
        M=(1, 5, 17, 33)[case % 4],
        K=depth,
        N=(96, 60, 48)[case % 3],
        dtype=DTYPES[case % 3],
        weights=("kn", "nk")[case % 2],
        combine=combine,
    )
    if cluster in (7, 16):
        # A tile of which each CTA stores whole columns.
        spec = WorkloadSpec("gemm", spec.M, depth, 2 * cluster, dtype=spec.dtype, combine=combine)
    assert_right(spec, cluster, scatter, INPUTS[case % len(INPUTS)])


@pytest.mark.slow
@EXCHANGES
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_adversarial_inputs(combine: str, scatter: bool) -> None:
    spec = WorkloadSpec("gemm", M=17, K=48, N=40, dtype="bfloat16", combine=combine)
    assert_right(spec, 4, scatter, *INPUTS)


@EXCHANGES
@pytest.mark.parametrize("act", ["gelu_tanh", "x*x + 1"])
def test_an_epilogue(act: str, scatter: bool) -> None:
    spec = WorkloadSpec("gemm", M=9, K=24, N=32, dtype="float16", act=act, out="float32")
    assert_right(spec, 2, scatter, "random")


@EXCHANGES
@pytest.mark.parametrize("tiles", [Tiles(rows=4), Tiles(rows=8, threads_x=8), Tiles(depth=3)])
def test_given_tiles_are_used(tiles: Tiles, scatter: bool) -> None:
    spec = WorkloadSpec("gemm", M=8, K=24, N=32, dtype="float16")
    assert_right(spec, 2, scatter, "random", tiles=tiles)
