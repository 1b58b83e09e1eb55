"""What the planner calls feasible has a kernel: points of the spaces of many workloads."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.kernels import candidate_at, kernels_of
from crossfuse.meta_schedule.scheduled import schedule_candidate
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
)


def hold(spec_text: str, count: int) -> None:
    """Lower so many points that are spread over a workload's space."""
    spec, known = resolve_any(spec_text), device(DEVICE)
    space = kernels_of(spec, DEVICE)
    rng = np.random.default_rng(zlib.crc32(spec_text.encode()))
    for point in rng.choice(space.order, min(count, len(space.order)), replace=False):
        candidate = candidate_at(space, str(spec), int(point))
        lower(schedule_candidate(candidate, known), known)


@pytest.mark.parametrize("spec", [*ids(), *OTHERS])
def test_a_point_of_the_space_lowers(spec: str) -> None:
    hold(spec, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [*ids(), *OTHERS])
def test_many_points_lower(spec: str) -> None:
    hold(spec, 24)
