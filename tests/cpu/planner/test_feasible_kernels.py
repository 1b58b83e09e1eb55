"""What the planner calls feasible has a kernel: points of the spaces of many workloads.

Both count from the same functions. Here is that they agree: each point is planned by the lowering,
and its grid, threads, shared memory and stages are those that the planner said.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest

from crossfuse.compiler.compiled import choose
from crossfuse.compiler.source import read_source
from crossfuse.errors import PlanRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.generate import plans_of
from crossfuse.lower.hopper.stream.plan.kernel import StreamPlan
from crossfuse.lower.hopper.stream.warps import WarpPlan
from crossfuse.lower.image import Launch
from crossfuse.meta_schedule.candidate import candidate_at, kernels_of, schedule_candidate
from crossfuse.planner.families import STREAM, TILES, WARPS
from crossfuse.planner.families.registry import CASCADE_FAMILIES, FAMILIES, read_tiles
from crossfuse.planner.plan import ranked
from crossfuse.planner.tune.kernel_space import CascadeSpace, KernelSpace
from crossfuse.workload.cascades import resolve_any
from crossfuse.workload.suites import ids

pytestmark = pytest.mark.cpu

DEVICE = "nvidia-h100"
#: Beside the suite, of odd extents, few rows, other types and layouts.
OTHERS = (
    "gemm:M=1,K=4096,N=4096,weights=nk",
    "gemm:M=65,K=640,N=1032",
    "gemm_chain:M=16,K=256,N=1024,L=128,dtype=float16,act=gelu",
    "gated_ffn:M=1,K=2048,N=5632,L=2048",
    "gated_ffn:M=200,K=520,N=1544,L=520,dtype=float16",
    "rmsnorm_ffn:tokens=48,K=264,N=520",
    "layernorm_ffn:tokens=300,K=1024,N=4096,gated=false,act=gelu",
    "softmax:rows=7,cols=262144",
    "rmsnorm:rows=513,cols=4096,residual=true",
    "attention:batch=1,heads=8,q_len=1,kv_len=8192,head_dim=128,kv_heads=2",
    # CTAs hand over wide states, scales of rows are read behind a product, rows have few tiles.
    "mla_decode:batch=16,q_heads=128,kv_len=4096,latent_dim=256,rope_dim=64",
    "quant_gemm:tokens=64,K=2304,N=4944",
    "quant_gemm:tokens=2048,K=1024,N=256",
)


def points(spec_text: str, count: int) -> Iterator[tuple[Any, int]]:
    """Draw so many points that are spread over a workload's space, and over its families."""
    space = kernels_of(resolve_any(spec_text), DEVICE)
    rng = np.random.default_rng(zlib.crc32(spec_text.encode()))
    share = -(-count // len(space.groups))
    for group in space.groups:
        drawn = rng.choice(group.size, min(share, group.size), replace=False)
        yield from ((space, group.first + int(each)) for each in drawn)


def said(space: Any, point: int) -> list[Any]:
    """What the planner says of each kernel: CTAs, cluster, threads, shared memory, stages.

    Of a cascade's kernel the first three: see `check_stream` for the shared memory of streams.
    """
    if isinstance(space, KernelSpace):
        every = space.kernel(point).resources(space.shape, space.device)
        return [
            (e.ctas, e.cluster, e.threads, e.shared_bytes, e.left_stages, e.right_stages)
            for e in every
        ]
    assert isinstance(space, CascadeSpace)
    name, fields = space.tiles(point)
    taken = CASCADE_FAMILIES[name](space.shape).taken(read_tiles(name, fields), space.device)
    return [(taken.ctas, taken.cluster, taken.threads)]


def planned(plans: Sequence[Any], chain: bool) -> list[Any]:
    """The same of the lowering's plans."""
    return [
        (each.clusters * each.cluster_size, each.cluster_size, each.threads)
        + ((each.arena.size, each.left.stages, each.right.stages) if chain else ())
        for each in plans
    ]


def check_stream(plan: StreamPlan | WarpPlan, space: Any, point: int) -> None:
    """Compare arrays of a stream between two products, and its shared memory, with the planner's.

    Warps, and warpgroups that share columns, pass fewer values of rows than the planner counts.
    """
    name, fields = space.tiles(point)
    taken = CASCADE_FAMILIES[name](space.shape).taken(read_tiles(name, fields), space.device)
    assert plan.registers.count == space.shape.work.arrays
    assert plan.arena.size <= taken.shared_bytes
    if isinstance(plan, WarpPlan):
        assert plan.size.registers == taken.registers
    else:
        assert plan.adders or plan.arena.size == taken.shared_bytes


def launched(launches: Sequence[Launch]) -> list[Any]:
    """The same of kernels that are none of the pipeline, and have no rings."""
    return [
        (prod(e.grid), e.cluster_size, prod(e.block), e.dynamic_shared_bytes, 0, 0)
        for e in launches
    ]


def difference(spec_text: str, space: Any, point: int) -> str:
    """Plan a point as it would be lowered; empty if that is what the planner said."""
    known = device(DEVICE)
    candidate = candidate_at(space, spec_text, point)
    scheduled = schedule_candidate(candidate, known)
    if candidate.family == STREAM:
        lower(scheduled, known)  # of threads, which have no other plan
        return ""
    if candidate.family in FAMILIES and not FAMILIES[candidate.family].pipelined:
        launches = lower(scheduled, known).image.launches
        expected, found = said(space, point), launched(launches)
        return "" if expected == found else f"{candidate.tiles}: {expected}, {found}"
    plans = plans_of(only_function(scheduled), known)
    expected, found = said(space, point), planned(plans, isinstance(space, KernelSpace))
    if isinstance(space, CascadeSpace) and candidate.family in (TILES, WARPS):
        for plan in plans:
            if isinstance(plan, StreamPlan | WarpPlan):
                check_stream(plan, space, point)
        # CTAs of a stream go through tiles one after another.
        expected, found = ([each[1:] for each in one] for one in (expected, found))
    return "" if expected == found else f"{candidate.family} {candidate.tiles}: {expected}, {found}"


def hold(spec_text: str, count: int) -> None:
    spec = str(resolve_any(spec_text))
    for space, point in points(spec_text, count):
        assert not difference(spec, space, point)


@pytest.mark.parametrize("spec", [*ids(), *OTHERS])
def test_points_of_the_space_are_planned(spec: str) -> None:
    hold(spec, 1)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("dtype=float32", "'operands of 16 bits, or of 8 bits stored as [n, k]' leaves 0 of"),
        ("dtype=float8_e4m3fn", "'operands of 16 bits, or of 8 bits stored as [n, k]' leaves 0 of"),
        ("combine=max", "chain: combine: found max; limit: sums of products"),
    ],
)
def test_what_no_kernel_multiplies_is_not_planned(options: str, found: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        ranked(f"gemm:M=64,K=128,N=64,{options}", DEVICE, only=("gemm",))
    assert found in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        "gemm:M=16,K=832,N=13,weights=nk",
        "gemm:M=1,K=832,N=12,weights=nk",
        "gemm_chain:M=16,K=64,N=2048,L=13,weights=nk",
    ],
)
def test_tiles_wider_than_their_product_lower_as_they_are_planned(spec: str) -> None:
    """Registers hold pairs of a row: sums of an odd width are not split."""
    chosen = choose(read_source(spec), device(DEVICE))
    assert chosen.option.plan is not None


@pytest.mark.parametrize(("columns", "sizes"), [(12, []), (30, [8]), (32, [8, 16])])
def test_clusters_of_one_row_share_the_columns_that_the_output_has(
    columns: int, sizes: list[int]
) -> None:
    """Each CTA sums as many pairs of a row as the others."""
    spec = resolve_any(f"gemm_chain:M=1,K=64,N=2048,L={columns},weights=nk")
    space = kernels_of(spec, DEVICE)
    found = {}
    for point in range(len(space)):
        family, tiles = space.tiles(point)
        if family == "registers" and tiles["cluster"] > 1:
            found[tiles["cluster"]] = point
    assert sorted(found) == sizes
    for point in found.values():
        assert not difference(str(spec), space, point)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [*ids(), *OTHERS])
def test_many_points_are_planned(spec: str) -> None:
    hold(spec, 100)
