"""What of the bench only a GPU can answer: results of its variants, and memory traffic."""

from __future__ import annotations

import pytest

from crossfuse.bench import worker
from crossfuse.bench.counters import PERMISSION, count
from crossfuse.bench.job import floor, weight_bytes
from crossfuse.measure.job import Job, Request
from crossfuse.workload import lookup

pytest.importorskip("torch")

EIGHT_BITS = "gemm:M=256,K=1024,N=512,dtype=float8_e4m3fn,out=bfloat16,weights=nk"


@pytest.mark.parametrize("variant", ["ours", "scaled-mm", "scaled-mm-fast"])
@pytest.mark.parametrize("protocol", ["graph", "stream"])
def test_products_of_8_bit_floats_are_right_and_timed(variant: str, protocol: str) -> None:
    found = worker.Session().answer(
        Request(Job(EIGHT_BITS, variant, protocol=protocol, repeats=3, calls=2))
    )
    assert found.status == "ok", found.message
    assert found.microseconds is not None
    assert found.complaints == ""


@pytest.mark.parametrize(
    ("spec", "variant"),
    [
        ("softmax:rows=512,cols=8192", "ours"),
        ("softmax:rows=512,cols=8192", "eager"),
        ("rmsnorm_ffn:tokens=16,K=2048,N=8192", "unfused"),
        ("model:gpt2-small,layers=1,tokens=4,reduce=12", "eager"),
    ],
)
@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_cascades_and_models_are_right_and_timed(spec: str, variant: str, l2: str) -> None:
    found = worker.Session().answer(Request(Job(spec, variant, l2, repeats=3, calls=5)))
    assert found.status == "ok", found.message
    assert found.microseconds is not None
    assert found.worst_before is not None and found.worst_after is not None


@pytest.mark.parametrize("variant", ["ours-l2", "ours-global", "eager"])
def test_cold_weights_are_read_from_memory_about_once(variant: str) -> None:
    spec = lookup("S8", M=128)
    found = count(Job(str(spec), variant), 240)
    if "no ncu" in found.message or PERMISSION in found.message:
        pytest.skip(f"this machine does not let its users count: {found.message}")
    assert found.status == "ok", found.message
    assert found.passes == 1
    assert len(found.kernels) >= 1
    assert found.dram_bytes is not None
    assert 0.9 * weight_bytes(spec) < found.dram_bytes < 2 * floor(spec).bytes
    assert found.l2_to_sm_bytes is not None
    assert found.l2_to_sm_bytes >= 0.9 * weight_bytes(spec)
