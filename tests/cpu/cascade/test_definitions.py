"""The plain functions of the packaged cascades compute what numpy computes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from cpu.cascade.small import SMALL, small
from crossfuse.errors import CheckFailed
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs, unfused
from crossfuse.workload.cascade_spec import CascadeSpec

pytestmark = pytest.mark.cpu


def compiled(spec: CascadeSpec) -> tvm.runtime.Module:
    # From level 2 on, LLVM reads past the operands of some bfloat16 products.
    return tvm.compile(prim_func(spec), target={"kind": "llvm", "opt-level": 1})


def run(spec: CascadeSpec, built: tvm.runtime.Module, inputs: dict) -> dict[str, np.ndarray]:
    outputs = [tvm.runtime.empty(each.shape, each.dtype) for each in spec.outputs]
    built(*(tvm.runtime.tensor(each) for each in inputs.values()), *outputs)
    return {each.name: array.numpy() for each, array in zip(spec.outputs, outputs, strict=True)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "R6"])
def test_functions_compute_what_numpy_does(name: str, dtype: str) -> None:
    spec = small(name, dtype)
    built = compiled(spec)
    cases = [(f"seed {seed}", random_inputs(spec, seed)) for seed in range(2)]
    for case, inputs in [*cases, *adversarial_inputs(spec)]:
        outputs = run(spec, built, inputs)
        try:
            check(spec, inputs, outputs)
        except CheckFailed as error:
            raise AssertionError(case) from error


def test_a_quantised_product_computes_what_numpy_does() -> None:
    """On numbers whose quotients are no denormals: TVM converts those wrongly on the CPU."""
    spec = small("R6")
    inputs = random_inputs(spec)
    rng = np.random.default_rng(1)
    for name in ("x", "weight"):
        shape, kind = inputs[name].shape, inputs[name].dtype
        signs = rng.choice([-1.0, 1.0], shape)
        inputs[name] = (signs * np.exp(rng.uniform(-2, 2, shape))).astype(kind)
    outputs = run(spec, compiled(spec), inputs)
    errors = check(spec, inputs, outputs)
    assert 0 < errors["out"].error < 0.05


def test_a_wrong_expert_is_found() -> None:
    spec = small("R5")
    inputs = random_inputs(spec)
    outputs = unfused(spec, inputs)
    check(spec, inputs, outputs)
    outputs["chosen"][2, 1] = outputs["chosen"][2, 0]
    with pytest.raises(CheckFailed, match=r"chosen: .*in row 2"):
        check(spec, inputs, outputs)
