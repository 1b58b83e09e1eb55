"""References, inputs, and the rule by which a result passes; planted faults must be caught."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from crossfuse.errors import CheckFailed
from crossfuse.workload import (
    WorkloadSpec,
    adversarial_inputs,
    check,
    parse,
    random_inputs,
    reference,
    tolerance,
    unfused,
)
from crossfuse.workload.dtypes import FLOAT_TYPES, float_type
from crossfuse.workload.numerics import activate

Inputs = dict[str, np.ndarray]
GATED = parse("gated_ffn:M=24,K=96,N=160,L=48,dtype=bf16")
CASES = ("large", "zero_rows", "constant_rows", "denormal", "one_hot", "alternating")


def fused(spec: WorkloadSpec, inputs: Inputs, up_scale: float = 1.0) -> np.ndarray:
    """A gated FFN as a fused kernel rounds it: once between the products, once at the end."""
    a, gate, up, down = (inputs[name].astype(np.float32) for name in spec.inputs)
    hidden = activate(spec, a @ gate.T) * (a @ up.T) * np.float32(up_scale)
    hidden = hidden.astype(float_type(spec.dtype).numpy).astype(np.float32)
    return (hidden @ down.T).astype(float_type(spec.out).numpy)


def test_the_reference_of_a_chain() -> None:
    spec = parse("gemm_chain:M=2,K=3,N=4,L=5,dtype=f32,act=squared_relu,weights=nk")
    given = random_inputs(spec, 3)
    a, b, d = (array.astype(np.float64) for array in given.values())
    np.testing.assert_array_equal(reference(spec, given), np.maximum(a @ b.T, 0) ** 2 @ d.T)


def test_the_reference_of_a_gated_ffn() -> None:
    spec = parse("gated_ffn:M=2,K=3,N=4,L=5,dtype=f16,weights=kn,act=tanh")
    given = random_inputs(spec, 3)
    a, gate, up, d = (array.astype(np.float64) for array in given.values())
    expected = (np.tanh(a @ gate) * (a @ up)) @ d
    np.testing.assert_allclose(reference(spec, given), expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("combine", "reduce"),
    [("sum", np.sum), ("prod", np.prod), ("max", np.max), ("min", np.min)],
)
def test_the_reference_of_a_general_reduction(
    combine: str, reduce: Callable[..., np.ndarray]
) -> None:
    spec = parse(f"gemm:M=3,K=7,N=4,dtype=f32,combine={combine}")
    given = random_inputs(spec, 1)
    a, b = (array.astype(np.float64) for array in given.values())
    expected = reduce(a[:, :, None] * b[None], axis=1)
    np.testing.assert_allclose(reference(spec, given), expected, rtol=1e-12)
    assert check(spec, given, unfused(spec, given)).worst <= 1


def test_separate_kernels_round_after_every_operator() -> None:
    spec = parse("gated_ffn:M=1,K=1,N=1,L=1,dtype=bf16,act=identity")
    bf16 = float_type("bf16").numpy
    given = {
        n: np.full((1, 1), v, bf16) for n, v in zip(spec.inputs, (1, 1.0078125, 3, 1), strict=True)
    }
    given["A"][:] = 1.015625
    first = np.float32(1.015625) * np.float32(1.0078125)
    gate = np.float32(first.astype(bf16))
    up = np.float32((np.float32(1.015625) * np.float32(3)).astype(bf16))
    assert unfused(spec, given).item() == (gate * up).astype(bf16)
    assert unfused(spec, given).dtype == bf16


@pytest.mark.parametrize("dtype", sorted(FLOAT_TYPES))
def test_inputs_have_shapes_type_and_a_seed(dtype: str) -> None:
    spec = parse(f"gemm_chain:M=5,K=6,N=7,L=8,dtype={dtype}")
    first, again, other = (random_inputs(spec, seed) for seed in (4, 4, 5))
    assert {n: a.shape for n, a in first.items()} == spec.inputs
    assert all(array.dtype == float_type(dtype).numpy for array in first.values())
    assert all((first[n] == again[n]).all() for n in first)
    assert not (first["A"] == other["A"]).all()


@pytest.mark.parametrize("dtype", sorted(FLOAT_TYPES))
@pytest.mark.parametrize("kind", ["gated_ffn", "gemm_chain"])
def test_adversarial_inputs_are_finite_and_separate_kernels_pass(kind: str, dtype: str) -> None:
    spec = parse(f"{kind}:M=8,K=32,N=48,L=16,dtype={dtype},act=squared_relu")
    seen = []
    for name, given in adversarial_inputs(spec):
        output = unfused(spec, given)
        assert np.isfinite(output.astype(np.float32)).all(), name
        assert np.isfinite(reference(spec, given)).all(), name
        assert check(spec, given, output).worst <= 1, name
        seen.append(name)
    assert tuple(seen) == CASES


EPILOGUES = (
    "gemm:M=24,K=96,N=40,dtype=bf16,act=gelu,bias=last,scale=last,residual=out",
    "gemm:M=24,K=96,N=40,dtype=e4m3,out=f32,bias=last,scale=last,residual=in",
    "gated_gemm:M=24,K=96,N=40,dtype=f16,bias=last,scale=last,residual=out",
    "gemm_chain:M=24,K=96,N=64,L=40,dtype=f16,bias=first+last,scale=last,residual=out",
    "gated_ffn:M=24,K=96,N=64,L=40,dtype=bf16,bias=first,scale=first,residual=out",
)


@pytest.mark.parametrize("text", EPILOGUES)
def test_separate_kernels_pass_with_epilogues(text: str) -> None:
    spec = parse(text)
    seen = []
    for name, given in adversarial_inputs(spec):
        assert check(spec, given, unfused(spec, given)).worst <= 1, name
        seen.append(name)
    assert tuple(seen) == (*CASES, "opposite")
    # What is added last cancels the rest.
    with_it = np.abs(reference(spec, given)).max()
    assert with_it < 0.1 * np.abs(given["residual"].astype(np.float64)).max()


@pytest.mark.parametrize("text", EPILOGUES)
def test_what_an_epilogue_leaves_out_is_found(text: str) -> None:
    spec = parse(text)
    given = random_inputs(spec)
    for operand in spec.operands[1 + len(spec.weight_operands) :]:
        left_out = 1.0 if operand.name.startswith("scale") else 0.0
        without = given | {operand.name: np.full_like(given[operand.name], left_out)}
        with pytest.raises(CheckFailed, match=r"element-error|norm-error"):
            check(spec, given, unfused(spec, without))


def test_the_reference_of_epilogues() -> None:
    spec = parse("gated_ffn:M=2,K=3,N=4,L=5,dtype=f32,bias=first+last,scale=first+last,residual=in")
    given = {name: each.astype(np.float64) for name, each in random_inputs(spec, 3).items()}
    gate, up = (
        given["A"] @ given[f"B_{each}"].T * given[f"scale0_{each}"][0] + given[f"bias0_{each}"]
        for each in ("gate", "up")
    )
    hidden = gate / (1 + np.exp(-gate)) * up
    expected = hidden @ given["D"].T * given["scale1"][0] + given["bias1"] + given["residual"]
    np.testing.assert_allclose(reference(spec, random_inputs(spec, 3)), expected, rtol=1e-12)


def test_adversarial_inputs_are_what_they_are_called() -> None:
    spec = parse("gemm:M=6,K=16,N=8,dtype=f16")
    cases = {name: given["A"].astype(np.float64) for name, given in adversarial_inputs(spec)}
    assert not cases["zero_rows"][::2].any() and cases["zero_rows"][1::2].all()
    assert (cases["constant_rows"] == cases["constant_rows"][:, :1]).all()
    assert 0 < np.abs(cases["denormal"]).max() < 2.0**-14
    assert (cases["one_hot"].sum(axis=1) == 1).all()
    assert (cases["alternating"] == (-1.0) ** np.arange(16)).all()
    assert np.abs(cases["large"]).max() > 100


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_fused_result_passes(dtype: str) -> None:
    spec = parse(f"gated_ffn:M=24,K=96,N=160,L=48,dtype={dtype}")
    for name, given in [("random", random_inputs(spec)), *adversarial_inputs(spec)]:
        accuracy = check(spec, given, fused(spec, given))
        assert accuracy.error <= accuracy.allowed, name
        assert accuracy.worst <= 1, name


def test_a_single_row_and_column_pass() -> None:
    for seed in range(40):
        spec = parse("gated_ffn:M=1,K=33,N=65,L=1,dtype=bf16")
        given = random_inputs(spec, seed)
        check(spec, given, fused(spec, given))


def without_last_k(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    a = given["A"].copy()
    a[:, -1] = 0
    return fused(spec, given | {"A": a})


def without_up(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    ones = np.zeros_like(given["B_up"])
    return fused(spec, given | {"B_up": ones})


def gate_and_up_swapped(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    return fused(spec, given | {"B_gate": given["B_up"], "B_up": given["B_gate"]})


def slightly_scaled(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    return fused(spec, given, up_scale=1.02)


def one_stale_element(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    output = fused(spec, given).copy()
    output[3, 5] = output[2, 5]
    return output


def last_column_unwritten(spec: WorkloadSpec, given: Inputs) -> np.ndarray:
    output = fused(spec, given).copy()
    output[:, -1] = 0
    return output


@pytest.mark.parametrize(
    "fault",
    [
        without_last_k,
        without_up,
        gate_and_up_swapped,
        slightly_scaled,
        one_stale_element,
        last_column_unwritten,
    ],
)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_planted_fault_is_caught(
    fault: Callable[[WorkloadSpec, Inputs], np.ndarray], dtype: str
) -> None:
    spec = parse(f"gated_ffn:M=24,K=96,N=160,L=48,dtype={dtype}")
    given = random_inputs(spec)
    with pytest.raises(CheckFailed, match=r"^(element|norm)-error: gated_ffn:M=24"):
        check(spec, given, fault(spec, given))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_caught(bad: float) -> None:
    given = random_inputs(GATED)
    output = fused(GATED, given)
    output[4, 7] = bad
    with pytest.raises(CheckFailed, match=rf"value-class: .*: found {bad} at \[4, 7\]; limit: "):
        check(GATED, given, output)


def test_infinities_must_be_there_too() -> None:
    spec = parse("gemm:M=2,K=4,N=2,dtype=f16")
    given = random_inputs(spec)
    given["A"][0] = 60000
    given["B"][:, 0] = 2
    expected = unfused(spec, given)
    assert np.isinf(expected[0, 0])
    check(spec, given, expected)
    clipped = np.nan_to_num(expected, posinf=65504)
    with pytest.raises(CheckFailed, match=r"found 65504\.0 at \[0, 0\]; limit: 480000, as in"):
        check(spec, given, clipped)


def test_nan_inputs_give_nan() -> None:
    given = random_inputs(GATED)
    given["A"][3, 3] = np.nan
    check(GATED, given, unfused(GATED, given))
    zeroed = np.nan_to_num(unfused(GATED, given).astype(np.float32))
    with pytest.raises(CheckFailed, match="value-class"):
        check(GATED, given, zeroed.astype(float_type("bf16").numpy))


def test_the_tolerance_is_near_the_precision_of_the_type() -> None:
    for dtype, most in (("f16", 2e-3), ("bf16", 2e-2), ("f32", 1e-5)):
        spec = parse(f"gated_ffn:M=24,K=96,N=160,L=48,dtype={dtype}")
        limits = tolerance(spec, random_inputs(spec))
        assert limits.norm / np.linalg.norm(limits.reference) < most


def test_a_result_of_another_type_or_shape_is_refused() -> None:
    given = random_inputs(GATED)
    output = fused(GATED, given)
    with pytest.raises(CheckFailed, match=r"found float32\[24, 48\]; limit: bfloat16\[24, 48\]"):
        check(GATED, given, output.astype(np.float32))
    with pytest.raises(CheckFailed, match=r"found bfloat16\[48, 24\]"):
        check(GATED, given, output.T)


def test_inputs_of_another_spec_are_refused() -> None:
    given = random_inputs(GATED)
    with pytest.raises(CheckFailed, match=r"workload-inputs: B: found no such input; limit: bfloa"):
        reference(parse("gemm_chain:M=24,K=96,N=160,L=48"), given)
    with pytest.raises(CheckFailed, match=r"workload-inputs: A: found bfloat16\[24, 96\]; limit: "):
        reference(parse("gated_ffn:M=23,K=96,N=160,L=48"), given)
