"""Cascades in the bench: floors, jobs, and the rows that are held against float64."""

from __future__ import annotations

import numpy as np
import pytest

from crossfuse.bench.cascades import cascade_floor, formula, quack, sample
from crossfuse.bench.plan import plan, setting
from crossfuse.errors import WorkloadRefused
from crossfuse.workload.cascade_numerics import random_inputs, reference, run
from crossfuse.workload.cascades import resolve

HOW = setting("ours,eager", "cold", "graph", 15, 16)
#: Microseconds: the larger of compulsory bytes at 3.0 TB/s and operations at 790 TFLOP/s.
FLOORS = {"R1": 348.12, "R2": 16.78, "R6": 76.11, "R7": 178.96, "R9": 36.35, "R10": 89.49}


@pytest.mark.parametrize("name", FLOORS)
def test_the_floor_is_bytes_or_operations(name: str) -> None:
    assert cascade_floor(resolve(name)).microseconds == pytest.approx(FLOORS[name], abs=0.01)


def test_a_decode_step_sees_nearly_all_keys() -> None:
    text = "attention:batch=8,heads=32,q_len={},kv_len=4096,head_dim=128,causal={}"
    few, all_of_them = (cascade_floor(resolve(text.format(64, e))) for e in ("true", "false"))
    assert few.flops == pytest.approx(all_of_them.flops * (4096 - 31.5) / 4096)


def test_cascades_are_planned_beside_chains() -> None:
    jobs = plan(["R7", "G1", "softmax:rows=4,cols=8"], "", HOW)
    assert [(each.label, each.rows) for each in jobs[::2]] == [
        ("R7", 4096),
        ("G1", 128),
        ("softmax:rows=4,cols=8", 4),
    ]
    assert jobs[0].job.spec == "softmax:rows=4096,cols=32768"


def test_a_cascade_has_no_m() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        plan(["R7"], "16", HOW)
    assert str(caught.value) == (
        "bench: --m: found 16 for R7; limit: chains of products, whose rows M are. "
        "Instead: leave --m out, and write the rows of a cascade into it: R7:rows=16."
    )


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=100,cols=6",
        "cross_entropy:rows=70,cols=9",
        "variance:rows=40,cols=5",
        "log_softmax:rows=40,cols=5",
        "rmsnorm:rows=40,cols=5,residual=true",
        "attention:batch=2,heads=4,q_len=3,kv_len=5,head_dim=2,kv_heads=2,causal=true",
        "mla_decode:batch=4,q_heads=2,kv_len=5,latent_dim=3,rope_dim=1",
        "moe_routing:tokens=100,hidden=3,experts=8,top_k=2",
        "rmsnorm_gemm:tokens=64,K=4,N=3",
        "layernorm_ffn:tokens=64,K=4,N=3",
        "softmax:rows=3,cols=4",
    ],
)
def test_some_rows_are_the_cascade_of_fewer_rows(text: str) -> None:
    spec = resolve(text)
    part = sample(spec)
    rng = np.random.default_rng(0)
    arrays = {
        each.name: rng.integers(0, 5, each.shape).astype(np.int32)
        if each.dtype == "int32"
        else rng.standard_normal(each.shape)
        for each in spec.operands
    }

    def take(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes = {each.name: each.shape for each in (*part.spec.operands, *part.spec.outputs)}
        picked = {
            name: each[part.picks[name]] if name in part.picks else each
            for name, each in values.items()
        }
        return {name: each.reshape(shapes[name]) for name, each in picked.items()}

    def results(of: object, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return run(of, values, np.float64, lambda x, _: x, typed=False)  # type: ignore[arg-type]

    whole = take(results(spec, arrays))
    alone = results(part.spec, take(arrays))
    for name, due in whole.items():
        np.testing.assert_allclose(alone[name], due, rtol=1e-12)


@pytest.mark.parametrize("text", ["log_softmax:rows=4,cols=8", "softmax:rows=4,cols=8"])
def test_what_quack_does_not_do_is_refused(text: str) -> None:
    """It has no logarithm of a softmax, and it is not installed here."""
    with pytest.raises(WorkloadRefused, match=r"bench: quack: found .*softmax:rows=4,cols=8"):
        quack(resolve(text))


@pytest.mark.parametrize(
    "text", ["layernorm:rows=3,cols=16,residual=true", "rmsnorm:rows=3,cols=16,residual=true"]
)
def test_torch_and_numpy_agree_on_norms(text: str) -> None:
    torch = pytest.importorskip("torch")
    spec = resolve(f"{text},dtype=float32")
    inputs = random_inputs(spec)
    found = formula("eager", spec)(*(torch.from_numpy(each) for each in inputs.values()))
    due = reference(spec, inputs)
    for each, values in zip(spec.outputs, found, strict=True):
        np.testing.assert_allclose(values.numpy(), due[each.name], rtol=1e-5, atol=1e-5)


def test_library_attention_takes_the_cache_for_keys_and_values() -> None:
    torch = pytest.importorskip("torch")
    spec = resolve("mla_decode:batch=2,q_heads=5,kv_len=9,latent_dim=16,rope_dim=8")
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(each.shape, generator=generator).bfloat16() for each in spec.operands]
    found, due = (formula(each, spec)(*inputs) for each in ("sdpa-flash", "eager"))
    assert found.shape == due.shape == (2, 5, 16)
    assert (found.float() - due.float()).abs().max() < 0.02
    with pytest.raises(WorkloadRefused):
        formula("sdpa-flash", resolve("softmax:rows=4,cols=8"))
