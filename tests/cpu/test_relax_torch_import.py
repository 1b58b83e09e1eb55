"""Torch modules as Relax: types kept, weights apart and shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.errors import WorkloadRefused  # noqa: E402
from crossfuse.relax import import_torch  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402
from crossfuse.workload import chain_module, gated_ffn_module  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")


def operators(mod: tvm.IRModule) -> list[str]:
    (block,) = mod["main"].body.blocks
    calls = (binding.value for binding in block.bindings)
    return [call.op.name.removeprefix("relax.") for call in calls if hasattr(call, "op")]


def test_a_gated_ffn_keeps_its_operators() -> None:
    module = gated_ffn_module(16, 24, "float16")
    imported = import_torch(module, [torch.zeros(4, 16, dtype=torch.float16)])
    assert operators(imported.mod) == [
        *("permute_dims", "matmul", "nn.silu"),
        *("permute_dims", "matmul", "multiply"),
        *("permute_dims", "matmul"),
    ]
    assert imported.inputs == ("x",)
    names = ["p_gate_proj_weight", "p_up_proj_weight", "p_down_proj_weight"]
    assert list(imported.params) == names
    assert [p.name for p in imported.mod["main"].params] == ["x", *names]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_value_keeps_the_type_of_the_model(dtype: str) -> None:
    module = chain_module(16, 24, dtype)
    imported = import_torch(module, [torch.zeros(2, 3, 16, dtype=getattr(torch, dtype))])
    function = imported.mod["main"]
    values = [b.var for block in function.body.blocks for b in block.bindings]
    assert {str(value.ty.dtype) for value in [*function.params, *values]} == {dtype}


def test_weights_share_the_memory_of_the_module() -> None:
    module = gated_ffn_module(16, 24, "bfloat16")
    imported = import_torch(module, [torch.zeros(4, 16, dtype=torch.bfloat16)])
    with torch.no_grad():
        module.up_proj.weight.fill_(2.5)
    up = imported.params["p_up_proj_weight"]
    assert (up.dtype.name, up.shape) == ("bfloat16", (24, 16))
    assert (up.astype(np.float32) == 2.5).all()


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int64", "bool"],
)
def test_arrays_hold_the_values_of_tensors(dtype: str) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, -0.5, 448.0]]).to(getattr(torch, dtype)).T
    array = to_numpy(tensor)
    assert array.dtype.name == dtype
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())


def test_buffers_and_further_inputs_are_told_apart() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            self.register_buffer("scale", torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + y

    x = torch.randn(2, 4)
    module = Scaled().eval()
    imported = import_torch(module, [x, x])
    assert len(imported.inputs) == 2 and list(imported.params) == ["p_layer_weight"]
    got = evaluate(imported.mod, x.numpy(), np.ones((2, 4), np.float32), *imported.params.values())
    due = module(x, torch.ones(2, 4)).detach().numpy()
    np.testing.assert_allclose(got, due, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_operators_that_exist_only_decomposed_are_taken() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x) @ torch.eye(8))

    x = torch.randn(2, 3, 8)
    module = Normed().eval()
    imported = import_torch(module, [x])
    got = evaluate(imported.mod, x.numpy(), *imported.params.values())
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_convolutions_and_norms_of_batches() -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.BatchNorm2d(6)).eval()
    module[1].running_var.fill_(0.01)
    x = torch.randn(1, 4, 8, 8)
    imported = import_torch(module, [x])
    got = evaluate(imported.mod, x.numpy(), *imported.params.values())
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def evaluate(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def test_modules_of_equal_seed_are_equal() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (gated_ffn_module(8, 8, "float32", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.up_proj.weight, same.up_proj.weight)
    assert not torch.equal(one.up_proj.weight, other.up_proj.weight)
    assert not any(part.training for part in one.modules())


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("relu", F.relu),
        ("gelu", F.gelu),
        ("max(x,0)**2", lambda x: F.relu(x).square()),
        ("min(1,max(x,-x))", lambda x: x.abs().clamp(max=1)),
    ],
)
def test_a_chain_takes_any_activation(act: str, expected: object) -> None:
    module = chain_module(8, 16, "float32", act=act, bias=False)
    x = torch.randn(5, 8)
    by_hand = expected(x @ module.expand.weight.T) @ module.project.weight.T
    torch.testing.assert_close(module(x), by_hand)
    assert module.expand.bias is None


class Dropped(nn.Module):
    """Attention of an input to itself, and dropout behind it, both with a share of `p`."""

    def __init__(self, p: float, attention: float = 0.0) -> None:
        super().__init__()
        self.p, self.attention = p, attention

    def forward(self, x: Any) -> Any:
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=self.attention)
        return F.dropout(y, self.p, self.p > 0)


@pytest.mark.parametrize(
    ("p", "attention", "name", "operator"),
    [
        (0.5, 0.0, "dropout", "aten.dropout.default"),
        (0.0, 0.5, "scaled_dot_product_attention", "aten.scaled_dot_product_attention.default"),
    ],
)
def test_random_numbers_are_refused(p: float, attention: float, name: str, operator: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        import_torch(Dropped(p, attention).eval(), [torch.zeros(1, 2, 4, 8)])
    assert str(caught.value) == (
        f"torch-import: {name}: found {operator}, which draws random numbers; limit: operators "
        "without them. Instead: call the module as it is in evaluation, without dropout."
    )


def test_dropout_of_evaluation_is_none() -> None:
    imported = import_torch(Dropped(0.0).eval(), [torch.zeros(1, 2, 4, 8)])
    assert not any("dropout" in each for each in operators(imported.mod))
