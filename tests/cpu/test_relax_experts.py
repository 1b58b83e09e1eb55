"""Mixtures of experts in models of Relax, whose parts of gate and up are those of a split."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from crossfuse import _tvm as ir

torch = pytest.importorskip("torch")

from cpu.torch.test_experts import K, Mixture  # noqa: E402
from crossfuse import compile_model  # noqa: E402
from crossfuse.relax import import_torch  # noqa: E402
from crossfuse.relax.graph import clean, read_graph  # noqa: E402
from crossfuse.relax.slices import with_slices  # noqa: E402

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("way", ["weights first", "stored transposed"])
def test_experts_become_two_kernels(way: str, alternate: bool, bias: bool) -> None:
    model = Mixture(way, bias=bias, alternate=alternate).half().eval()
    x = torch.randn(2, K).half()
    fn = compile_model(model, (x,), runs_on="llvm")
    with torch.no_grad():
        eager, exact = model(x).double(), model.double()(x.double())
    assert (fn(x) - exact).abs().max() <= 2 * (eager - exact).abs().max()
    names = [each.name for each in fn.report.chains if each.name]
    assert names == ["crossfuse_experts", "crossfuse_experts1"], fn.report.text()


class Parts(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = x.split([1, 4, 3], 1)
        return first * 2, second.chunk(2, -1)[1], third


def test_parts_are_slices() -> None:
    x = torch.arange(64.0).reshape(2, 8, 4)
    mod = clean(with_slices(clean(import_torch(Parts().eval(), (x,)).mod)))
    operators = [each.operator for each in read_graph(mod["main"]).nodes]
    assert "relax.split" not in operators and operators.count("relax.strided_slice") == 4
    built = relax.build(mod, "llvm")
    made = relax.VirtualMachine(built, ir.tvm.cpu())["main"](ir.tvm.runtime.tensor(x.numpy()))
    for got, due in zip(made, Parts()(x), strict=True):
        np.testing.assert_array_equal(got.numpy(), due.numpy())


def test_parts_of_extents_that_are_not_known_stay() -> None:
    rows = ir.tirx.Var("rows", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = builder.emit(relax.op.split(x, 2, axis=0))
            made = builder.emit_output(relax.op.exp(parts[1]))
        builder.emit_func_output(made)
    mod = clean(builder.get())
    assert with_slices(mod)["main"].script() == mod["main"].script()
