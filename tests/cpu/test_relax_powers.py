"""Small whole powers are products, others stay powers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from crossfuse.relax.operators import LEGAL, check_elementwise

pytestmark = pytest.mark.cpu


def legal(exponent: float, dtype: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), dtype))
    with builder.function("main", [x]):
        made = relax.op.power(x, relax.const(exponent, dtype))
        builder.emit_func_output(builder.emit(made))
    return relax.transform.LegalizeOps(dict(LEGAL))(builder.get())


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("exponent", [2, 3, 4])
def test_small_powers_are_products(exponent: int, dtype: str) -> None:
    mod = legal(exponent, dtype)
    assert "T.pow" not in mod.script()
    x = np.arange(-32, 32).astype(dtype)
    built = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    got = built["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(got, x**exponent)


@pytest.mark.parametrize("exponent", [0.5, -1.0, 2.5, 5.0])
def test_other_powers_stay(exponent: float) -> None:
    assert "T.pow" in legal(exponent, "float32").script()


@pytest.mark.parametrize("exponent", [2.0, 0.5, -1.0])
def test_powers_of_bfloat16_which_tvm_has_none_of(
    exponent: float, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "bfloat16" in legal(exponent, "bfloat16").script()
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "bfloat16"))
    with builder.function("main", [x]):
        call = relax.op.power(x, relax.const(exponent, "bfloat16"))
        builder.emit_func_output(builder.emit(call))
    check_elementwise(call)
    assert capfd.readouterr().err == ""
