"""Chains of convolutions: specs, inputs and references."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crossfuse.bench.job import floor, weight_bytes
from crossfuse.errors import WorkloadRefused
from crossfuse.workload import (
    adversarial_inputs,
    check,
    conv_module,
    ids,
    lookup,
    parse,
    random_inputs,
    reference,
    unfused,
)
from crossfuse.workload.conv_chain import ConvChainSpec, conv_chain, windows
from crossfuse.workload.numerics import stages
from crossfuse.workload.spec import WorkloadSpec

SMALL = "conv_chain:batch=2,H=5,W=7,IC=6,OC1=8,OC2=4,k1=3,k2=1,dtype=float32,act=relu"


def test_the_suite_has_all_chains() -> None:
    specs = {name: lookup(name) for name in ids("conv_chain")}
    assert str(specs["C5"]) == (
        "conv_chain:batch=1,H=56,W=56,IC=64,OC1=64,OC2=256,k1=3,k2=1,dtype=bfloat16,act=relu"
    )
    assert [each.M for each in specs.values()] == [3136, 784, 196, 49] * 2
    assert [each.K for each in specs.values()] == [64, 128, 256, 512, 576, 1152, 2304, 4608]


@pytest.mark.parametrize("name", ids("conv_chain"))
def test_the_text_is_read_back(name: str) -> None:
    spec = lookup(name, dtype="float16")
    assert parse(str(spec)) == spec
    other = replace(spec, weights="kn", out="float32")
    assert parse(str(other)) == other != spec


def test_extents_of_matrices_and_tensors() -> None:
    spec = parse(SMALL)
    assert isinstance(spec, ConvChainSpec)
    assert (spec.M, spec.K, spec.N, spec.L, spec.IC) == (70, 54, 8, 4, 6)
    assert spec.inputs == {"X": (2, 5, 7, 6), "B": (8, 54), "D": (4, 8)}
    assert replace(spec, weights="kn").inputs == {"X": (2, 5, 7, 6), "B": (54, 8), "D": (8, 4)}
    assert (spec.output, spec.flops) == ((70, 4), 2 * 70 * (54 * 8 + 8 * 4))
    assert spec == conv_chain(batch=2, H=5, W=7, IC=6, OC1=8, OC2=4, k1=3, dtype="float32")


def test_biases_scales_and_residuals_are_those_of_the_products() -> None:
    text = SMALL + ",bias=first+last,scale=first,residual=in"
    spec = parse(text)
    assert str(spec) == text.replace("residual=in", "residual=out")
    assert parse(str(spec)) == spec
    shapes = {"scale0": (1,), "bias0": (8,), "bias1": (4,), "residual": (70, 4)}
    assert spec.inputs == parse(SMALL).inputs | shapes
    inputs = random_inputs(spec)
    values = {name: each.astype(np.float64) for name, each in inputs.items()}
    first = windows(values["X"], 3) @ values["B"].T * values["scale0"] + values["bias0"]
    wanted = np.maximum(first, 0) @ values["D"].T + values["bias1"] + values["residual"]
    np.testing.assert_allclose(reference(spec, inputs), wanted, rtol=1e-12)


def test_the_floor_counts_each_pixel_once() -> None:
    spec = parse(SMALL)
    assert floor(spec).bytes == 4 * (2 * 5 * 7 * 6 + 8 * 54 + 4 * 8 + 70 * 4)
    assert weight_bytes(spec) == 4 * (8 * 54 + 4 * 8)


def test_rows_follow_from_the_images() -> None:
    with pytest.raises(WorkloadRefused) as caught:
        replace(lookup("C5"), M=128)
    assert str(caught.value) == (
        "workload-extent: conv_chain:M: found 128 rows of 576; limit: 3136 rows, one for each "
        "pixel, of a multiple of 9. Instead: change batch, H, W and k1, which say how many there "
        "are."
    )
    with pytest.raises(WorkloadRefused, match="kind: found 'conv_chain'; limit: one of gated_ffn"):
        WorkloadSpec("conv_chain", 1, 1, 1, 1)


def test_windows_are_read_row_by_row() -> None:
    images = np.arange(2 * 2 * 3 * 2).reshape(2, 2, 3, 2)
    found = windows(images, 3).reshape(2, 2, 3, 3, 3, 2)
    for n, y, x, r, s in np.ndindex(2, 2, 3, 3, 3):
        inside = 0 <= y + r - 1 < 2 and 0 <= x + s - 1 < 3
        wanted = images[n, y + r - 1, x + s - 1] if inside else 0
        np.testing.assert_array_equal(found[n, y, x, r, s], wanted)
    np.testing.assert_array_equal(windows(images, 1), images.reshape(12, 2))


@pytest.mark.parametrize("weights", ["nk", "kn"])
@pytest.mark.parametrize("window", [1, 3, 5])
def test_the_reference_is_that_of_torch(window: int, weights: str) -> None:
    torch = pytest.importorskip("torch")
    text = f"conv_chain:batch=2,H=5,W=4,IC=6,OC1=8,OC2=4,k1={window},weights={weights}"
    spec = parse(text + ",dtype=float32")
    inputs = random_inputs(spec)
    x, b, d = (torch.from_numpy(each.astype(np.float64)) for each in inputs.values())
    if weights == "kn":
        b, d = b.T, d.T
    first = b.reshape(8, window, window, 6).permute(0, 3, 1, 2)
    hidden = torch.conv2d(x.permute(0, 3, 1, 2), first, padding=window // 2).relu()
    out = torch.conv2d(hidden, d.reshape(4, 8, 1, 1)).permute(0, 2, 3, 1).reshape(spec.output)
    np.testing.assert_allclose(reference(spec, inputs), out.numpy(), rtol=1e-12, atol=1e-12)


def test_the_module_has_the_weights_of_the_spec() -> None:
    """A module in channels_last computes the workload of its weights as they lie in memory."""
    torch = pytest.importorskip("torch")
    spec = parse("conv_chain:batch=2,H=5,W=4,IC=6,OC1=8,OC2=4,k1=3,dtype=float32,act=gelu")
    module = conv_module((6, 8, 4), 3, dtype="float32", act="gelu")
    weights = [each.detach().permute(0, 2, 3, 1) for each in module.parameters()]
    assert all(each.is_contiguous() for each in weights)
    first, second = (each.reshape(len(each), -1).numpy() for each in weights)
    inputs = random_inputs(spec) | {"B": first, "D": second}
    x = torch.from_numpy(inputs["X"].astype(np.float64)).permute(0, 3, 1, 2)
    with torch.no_grad():
        out = module.double()(x).permute(0, 2, 3, 1).reshape(spec.output).numpy()
    np.testing.assert_allclose(reference(spec, inputs), out, rtol=1e-9, atol=1e-9)


def test_inputs_are_those_of_images() -> None:
    spec = parse(SMALL.replace("float32", "float16"))
    cases = dict(adversarial_inputs(spec))
    for inputs in cases.values():
        assert {name: each.shape for name, each in inputs.items()} == spec.inputs
        check(spec, inputs, unfused(spec, inputs))
    assert not cases["zero_rows"]["X"].reshape(-1, 6)[::2].any()
    assert cases["zero_rows"]["X"].any()
    assert set(np.unique(cases["one_hot"]["X"].astype(np.float32))) == {0.0, 1.0}
    assert np.abs(stages(spec, cases["large"]).first[0]).max() > 100
