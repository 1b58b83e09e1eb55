"""Cascades as values and as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crossfuse.errors import CheckFailed, WorkloadRefused
from crossfuse.workload import cascade_spec, cascades, suites
from crossfuse.workload.cascade_numerics import (
    adversarial_inputs,
    check,
    random_inputs,
    reference,
    unfused,
)

pytestmark = pytest.mark.null

IDS = suites.ids("cascade")


@pytest.mark.parametrize("name", IDS)
def test_text_is_read_back(name: str) -> None:
    spec = cascades.resolve(name)
    assert cascades.parse(str(spec)) == spec
    assert spec.kind == suites.entry(name).title


def test_every_kind_but_blocks_of_models_is_packaged() -> None:
    blocks = {"rmsnorm_ffn", "layernorm_ffn", "attention_out"}
    assert {cascades.resolve(name).kind for name in IDS} == set(cascades.KINDS) - blocks


@pytest.mark.parametrize(
    "text",
    [
        "rmsnorm_ffn:tokens=3,K=16,N=24",
        "rmsnorm_ffn:tokens=3,K=16,N=24,L=8,gated=false,residual=false,act=gelu,dtype=float16",
        "layernorm_ffn:tokens=1,K=16,N=24,out=float32",
    ],
)
def test_a_norm_and_an_ffn_in_numpy_are_those_of_torch(text: str) -> None:
    """In float64, from text to text; `L` is that of the input unless another one is named."""
    torch = pytest.importorskip("torch")
    from crossfuse.bench.cascades import formula

    spec = cascades.parse(text)
    assert isinstance(spec, cascade_spec.NormFfn) and str(spec) == text
    inputs = random_inputs(spec)
    exact = reference(spec, inputs)["out"]
    assert exact.shape == (spec.tokens, spec.L or spec.K)
    given = [torch.from_numpy(each.astype("float64")) for each in inputs.values()]
    assert np.allclose(exact, formula("eager", spec)(*given).numpy(), rtol=1e-9, atol=1e-12)


def test_a_residual_has_the_columns_of_the_output() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        cascades.parse("rmsnorm_ffn:tokens=3,K=16,N=24,L=8")
    assert str(caught.value) == (
        "workload-extent: rmsnorm_ffn:L: found 8; limit: 16, as the residual x has (K). Instead: "
        "write residual=false, or L=K."
    )


def test_attention_and_its_product_read_what_they_write() -> None:
    text = "attention_out:batch=2,heads=8,q_len=3,kv_len=5,head_dim=16,kv_heads=2,hidden=48"
    found = cascades.parse(text)
    assert str(found) == text
    assert cascades.parse(str(found)) == found
    assert {each.name: each.shape for each in (*found.operands[3:], *found.outputs)} == {
        "weight": (48, 128),
        "residual": (6, 48),
        "out": (6, 48),
    }
    assert found.flops == 4 * 2 * 8 * 3 * 5 * 16 + 2 * 6 * 128 * 48
    bare = cascades.parse(f"{text},bias=true,residual=false")
    assert [each.name for each in bare.operands] == ["q", "k", "v", "weight", "bias"]


def test_packaged_extents_are_those_of_the_suite() -> None:
    attention, decode = cascades.resolve("R1"), cascades.resolve("R3")
    assert str(attention) == (
        "attention:batch=8,heads=32,q_len=2048,kv_len=2048,head_dim=128,causal=true"
    )
    assert attention.operands[0].shape == (8, 32, 2048, 128)
    assert decode.operands[1].shape == (16, 8, 8192, 128)
    assert cascades.resolve("R3:q_heads=16").operands[0].shape == (16, 16, 1, 128)
    assert cascades.resolve("R7").bytes == 2 * 2 * 4096 * 32768
    assert cascades.resolve("R5").outputs[1].dtype == "int32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmaxx:rows=1", r"workload-kind: kind: .*write 'softmax'"),
        ("softmax:rows=4", r"workload-extent: softmax: found no cols; limit: .*rows, cols"),
        ("softmax:rows=4,cols=0", r"workload-extent: softmax:cols: found 0"),
        ("softmax:rows=4,cols=-1", r"workload-extent: softmax:cols: found -1"),
        ("softmax:rows=4,columns=8", r"workload-key: softmax:key: found 'columns'"),
        ("softmax:rows=4,rows=5,cols=1", r"workload-key: softmax:rows: found 4 and 5"),
        ("softmax:rows=4,cols", r"workload-spec: softmax: found 'cols'"),
        ("softmax:rows=4,cols=8,dtype=int8", r"workload-dtype: dtype: found 'int8'"),
        ("softmax:rows=65536,cols=65536", r"workload-extent: softmax:x: found 4294967296"),
        ("R1:causal=maybe", r"workload-causal: attention:causal: found 'maybe'"),
        ("R3:kv_heads=5", r"decode_attention:kv_heads: found 5 for 32"),
        ("R5:top_k=129", r"moe_routing:top_k: found 129; limit: at most the experts, 128"),
        ("R6:quant=int4", r"workload-quant: quant_gemm:quant: found 'int4'"),
        ("softmax:rows=4,cols=8,grad=maybe", r"workload-grad: softmax:grad: found 'maybe'"),
        (
            "R9:grad",
            r"workload-grad: rmsnorm_gemm:grad: found the gradient of rmsnorm_gemm; limit: "
            r"gradients of softmax, log_softmax, cross_entropy, layernorm, rmsnorm, variance. "
            r"Instead: differentiate its function by crossfuse.autodiff.gradients, and compile",
        ),
        ("S3", r"workload-kind: S3: found gated_ffn .*limit: a cascade, R1 to R14"),
        ("R15", r"workload-id: suites: found 'R15'"),
    ],
)
def test_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(WorkloadRefused, match=message):
        cascades.resolve(text)


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("softmax:rows=4,cols=8", "x d_y"),
        ("log_softmax:rows=4,cols=8", "x d_y"),
        ("cross_entropy:rows=4,cols=8", "x labels d_loss"),
        ("layernorm:rows=4,cols=8", "x weight d_y"),
        ("rmsnorm:rows=4,cols=8,residual=true,out=float32", "x residual weight d_h d_y"),
        ("variance:rows=4,cols=8", "x d_variance"),
    ],
)
def test_a_gradient_is_a_workload(text: str, takes: str) -> None:
    """It takes what is read and gradients of outputs, of their types, and is that of torch."""
    torch = pytest.importorskip("torch")
    from crossfuse.bench.cascades import formula

    spec = cascades.parse(f"{text},grad")
    assert str(spec) == f"{text},grad=true"
    assert cascades.parse(str(spec)) == spec
    assert [each.name for each in spec.operands] == takes.split()
    assert [each.name for each in spec.outputs] == ["d_x"]
    of = cascades.parse(text)
    types = {f"d_{each.name}": each.dtype for each in (*of.operands, *of.outputs)}
    for each in (*spec.operands, *spec.outputs):
        assert each.dtype == types.get(each.name, each.dtype)
    assert (spec.count, spec.with_count(2).operands[0].shape) == (4, (2, 8))
    inputs = random_inputs(spec)
    exact = reference(spec, inputs)["d_x"]
    wide = {n: e if e.dtype == "i4" else e.astype("float64") for n, e in inputs.items()}
    tensors = {name: torch.from_numpy(each) for name, each in wide.items()}
    tensors["x"].requires_grad_()
    zeros = torch.zeros(8, dtype=torch.float64)
    found = _in_torch(of, [tensors.get(each.name, zeros) for each in of.operands])
    given = [tensors[f"d_{each.name}"] for each in of.outputs]
    (due,) = torch.autograd.grad(found, tensors["x"], given)
    np.testing.assert_allclose(exact, due.numpy(), rtol=1e-9, atol=1e-12)
    ours = formula("eager", spec)(*(each.detach() for each in tensors.values()))
    np.testing.assert_allclose(ours.numpy(), due.numpy(), rtol=1e-5, atol=1e-5)


def _in_torch(spec: cascade_spec.CascadeSpec, inputs: list[Any]) -> Any:
    """A cascade in float64; the formulas of benchmarks widen some to float32 alone."""
    import torch

    from crossfuse.bench.cascades import formula

    if isinstance(spec, cascade_spec.CrossEntropy):
        x, labels = inputs
        return (torch.nn.functional.cross_entropy(x, labels.long(), reduction="none"),)
    if isinstance(spec, cascade_spec.Variance):
        return (torch.var(inputs[0], -1, correction=0),)
    found = formula("eager", spec)(*inputs)
    return found if isinstance(found, tuple) else (found,)


def test_flags_alone_are_true() -> None:
    assert cascades.parse("rmsnorm:rows=4,cols=8,residual").residual  # type: ignore[attr-defined]
    assert str(cascades.resolve("R7:grad")).endswith(",grad=true")
    assert cascades.parse("softmax:rows=4,cols=8,grad=false").kind == "softmax"


def test_a_wrong_result_is_found() -> None:
    spec = cascades.parse("softmax:rows=3,cols=17,dtype=float32")
    inputs = random_inputs(spec)
    outputs = unfused(spec, inputs)
    assert check(spec, inputs, outputs)["y"].worst <= 1
    outputs["y"][1, 5] *= np.float32(1.001)
    with pytest.raises(CheckFailed, match=r"element-error: .*at \[1, 5\]"):
        check(spec, inputs, outputs)
    with pytest.raises(CheckFailed, match=r"output-type: .*found float64\[3, 17\]"):
        check(spec, inputs, reference(spec, inputs))


def test_a_quantiser_three_times_as_far_off_is_found() -> None:
    """Each element may be as far off as rounding explains, but not all of them together."""
    spec = cascades.parse("quant_gemm:tokens=16,K=512,N=32")
    inputs = random_inputs(spec)
    right = unfused(spec, inputs)
    check(spec, inputs, right)
    exact = reference(spec, inputs)["out"]
    far = exact + 3 * (right["out"].astype(np.float64) - exact)
    with pytest.raises(CheckFailed, match="norm"):
        check(spec, inputs, {"out": far.astype(right["out"].dtype)})


def test_softmax_of_few_numbers() -> None:
    spec = cascades.parse("softmax:rows=1,cols=2,dtype=float32")
    inputs = {"x": np.log(np.array([[1, 3]], np.float32))}
    np.testing.assert_allclose(reference(spec, inputs)["y"], [[0.25, 0.75]], rtol=1e-6)


def test_inertia_of_two_points() -> None:
    spec = cascades.parse("moment_of_inertia:bodies=1,points=2")
    inputs = {"mass": [[1, 3]], "x": [[0, 4]], "y": [[1, 1]], "z": [[2, 2]]}
    arrays = {name: np.array(value, np.float32) for name, value in inputs.items()}
    # Reduced mass 3/4 at a distance of 4.
    assert reference(spec, arrays)["inertia"] == pytest.approx(12)


def test_causal_rows_see_what_is_before_them() -> None:
    spec = cascades.parse(
        "attention:batch=1,heads=1,q_len=2,kv_len=3,head_dim=1,causal=true,dtype=float32"
    )
    values = {"q": [0, 0], "k": [0, 0, 0], "v": [1, 3, 8]}
    inputs = {
        name: np.array(value, np.float32).reshape(1, 1, -1, 1) for name, value in values.items()
    }
    assert reference(spec, inputs)["out"].ravel().tolist() == [2, 4]


@pytest.mark.parametrize(
    "text",
    [
        "R1:batch=1,heads=2,q_len=3,kv_len=4,head_dim=5",
        "R5:tokens=2,hidden=3,experts=4,top_k=2",
        "R8:rows=2,cols=9",
        "R12:bodies=2,points=3",
        "R14:rows=2,cols=9",
        "layernorm:rows=3,cols=5,residual=true",
    ],
)
def test_adversarial_inputs_have_the_types_of_the_operands(text: str) -> None:
    spec = cascades.resolve(text)
    cases = list(adversarial_inputs(spec))
    assert len({name for name, _ in cases}) == len(cases) >= 8
    for _, inputs in cases:
        found = {name: (array.shape, str(array.dtype)) for name, array in inputs.items()}
        assert found == {each.name: (each.shape, each.dtype) for each in spec.operands}
