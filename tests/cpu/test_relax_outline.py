"""Outlined models compute what torch computes, at least as exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.relax import Outlined, import_torch  # noqa: E402
from crossfuse.relax.outline import outline  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402
from crossfuse.workload import chain_module, gated_ffn_module  # noqa: E402
from crossfuse.workload.dtypes import float_type  # noqa: E402
from crossfuse.workload.tolerances import judge, make_tolerance  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
F32_UNIT = 2.0**-24


class Function(nn.Module):
    """A forward function over layers K -> N (three of them) and N -> L."""

    def __init__(self, forward: Callable[..., Any], K: int, N: int, L: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up, self.third = (nn.Linear(K, N, bias=bias) for _ in range(3))
        self.down = nn.Linear(N, L, bias=bias)
        self.kn = nn.Parameter(torch.randn(K, N) / K**0.5)
        self.nl = nn.Parameter(torch.randn(N, L) / N**0.5)
        self.rows = nn.Parameter(torch.randn(2, 3, 1))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("columns", torch.linspace(0.5, 2, N))
        self.register_buffer("offsets", torch.linspace(-1, 1, L))
        self.function = forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def module_of(
    forward: Callable[..., Any],
    dtype: str = "float32",
    K: int = 33,
    N: int = 65,
    L: int = 17,
    bias: bool = True,
) -> Any:
    torch.manual_seed(0)
    return Function(forward, K, N, L, bias).to(getattr(torch, dtype)).eval()


def outlined(module: Any, inputs: Sequence[torch.Tensor]) -> tuple[Outlined, list[np.ndarray]]:
    imported = import_torch(module, inputs)
    result = outline(imported.mod)
    return result, result.arrange([*map(to_numpy, inputs), *imported.params.values()])


def check_against_torch(module: Any, *inputs: torch.Tensor) -> Outlined:
    result, arguments = outlined(module, inputs)
    kind = float_type(result.output_dtype)
    output = tvm.runtime.tensor(np.zeros((result.M, result.L), kind.numpy))
    compiled = tvm.compile(result.func, target="llvm")
    compiled(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arguments), output)
    with torch.no_grad():
        eager = to_numpy(module(*inputs))
        exact = to_numpy(module.double()(*(tensor.double() for tensor in inputs)))
    assert (result.output_shape, result.output_dtype) == (eager.shape, eager.dtype.name)
    size = np.abs(exact) + np.sqrt(np.mean(exact**2))
    noise = F32_UNIT * (result.K + result.N) ** 0.5 * 2 * size
    hidden = float_type(result.dtype).unit * np.sqrt(np.mean(exact**2))
    limits = make_tolerance(exact, eager, noise, kind.unit * np.abs(exact) + hidden, size)
    judge(limits, output.numpy().reshape(result.output_shape), result.summary)
    return result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 33), (24, 33), (2, 3, 33)])
def test_a_gated_ffn(dtype: str, shape: tuple[int, ...]) -> None:
    module = gated_ffn_module(33, 65, dtype)
    result = check_against_torch(module, torch.randn(shape).to(getattr(torch, dtype)))
    assert result.gated and (result.K, result.N, result.L) == (33, 65, 33)
    assert [a.name for a in result.arguments] == ["A", "B_gate", "B_up", "D"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ["gelu_tanh", "relu", "x*sigmoid(1.702*x)", "max(x,0)**2"])
def test_a_chain(act: str, bias: bool, dtype: str) -> None:
    module = chain_module(33, 65, dtype, act=act, bias=bias)
    result = check_against_torch(module, torch.randn(7, 33).to(getattr(torch, dtype)))
    extras = ["p_expand_bias", "p_project_bias"] if bias else []
    assert [a.name for a in result.arguments] == ["A", "B", "D", *extras]


@pytest.mark.slow
def test_four_layers_two_of_them_gated() -> None:
    def gated_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = F.silu(m.gate(x)) * m.up(x)
        second = torch.tanh(m.down(first)) + m.offsets
        third = F.relu(second @ m.nl.T) - torch.sigmoid(F.linear(second, m.nl))
        return m.down(third) * 0.5 - m.offsets

    result = check_against_torch(module_of(gated_inside), torch.randn(2, 3, 33))
    assert (result.kind, result.gated, result.M) == ("layers", True, 6)
    assert result.form is not None and result.form.columns == (33, 65, 17, 65)
    assert "widths=33x65x17x65x17" in result.summary
    names = [each.name for each in result.arguments[:7]]
    assert names == ["A", "B0_gate", "B0_up", "B1", "B2_gate", "B2_up", "B3"]


GRAPHS: dict[str, Callable[..., Any]] = {
    "quick_gelu": lambda m, x: m.down((h := m.gate(x)) * torch.sigmoid(1.702 * h)),
    "power": lambda m, x: m.down(F.relu(m.gate(x)) ** 2),
    "fractional power": lambda m, x: m.down(F.relu(m.gate(x)) ** 1.5),
    "silu in parts": lambda m, x: m.down((g := m.gate(x)) / (1 + torch.exp(-g)) * m.up(x)),
    "up first": lambda m, x: m.down(m.up(x) * F.silu(m.gate(x))),
    "minus": lambda m, x: m.down(torch.tanh(m.gate(x)) - 2 * m.up(x).abs()),
    "leaky where": lambda m, x: m.down(torch.where((h := m.gate(x)) > 0, h, 0.1 * h)),
    "where not, a number": lambda m, x: m.down(
        torch.where((h := m.gate(x)) > 0, h, torch.tensor(-0.5, dtype=x.dtype))
    ),
    "masked": lambda m, x: m.down(m.gate(x).masked_fill(m.gate(x) < 0, 0.0)),
    "truth as number": lambda m, x: m.down((m.gate(x) > 0).to(x.dtype) * m.up(x)),
    "zeros like": lambda m, x: m.down(torch.maximum(h := m.gate(x), torch.zeros_like(h))),
    "hardswish": lambda m, x: m.down(F.hardswish(m.gate(x))),
    "mish": lambda m, x: m.down(F.mish(m.gate(x))),
    "elu": lambda m, x: m.down(F.elu(m.gate(x))),
    "clamp": lambda m, x: m.down(m.gate(x).clamp(-1, 1)),
    "identity": lambda m, x: x @ m.kn @ m.nl,
    "weights both ways": lambda m, x: F.linear(torch.relu(x @ m.kn), m.down.weight),
    "transposed weights": lambda m, x: torch.relu(x @ m.gate.weight.T) @ m.down.weight.T,
    "operands of every kind": lambda m, x: (
        m.down(F.silu(m.gate(x) * m.columns * m.rows)) * m.scale + 1
    ),
    "constants on both sides": lambda m, x: m.down(F.relu(m.gate(x)) * m.columns) + m.offsets,
    "casts": lambda m, x: m.down(F.silu(m.gate(x).float()).to(x.dtype) * m.up(x)).to(x.dtype),
    "reshaped": lambda m, x: m.down(F.relu(m.gate(x.reshape(6, 33)).reshape(2, 3, 65))).reshape(
        3, 2, 17
    ),
    "dropout": lambda m, x: F.dropout(m.down(F.relu(m.gate(x))), 0.5, m.training),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_any_elementwise_expression(name: str) -> None:
    dtype = "float32" if name in ("casts", "mish") else "float16"
    x = torch.randn(2, 3, 33).to(getattr(torch, dtype))
    check_against_torch(module_of(GRAPHS[name], dtype), x)


def test_constants_of_the_graph_are_arguments_with_values() -> None:
    module = module_of(GRAPHS["constants on both sides"])
    result, _ = outlined(module, [torch.randn(2, 33)])
    constants = {a.name: a for a in result.arguments if a.value is not None}
    assert {name: (a.position, a.source) for name, a in constants.items()} == {
        "constant": (-1, ""),
        "constant_1": (-1, ""),
    }
    np.testing.assert_array_equal(constants["constant_1"].value, module.offsets.numpy())


def test_a_residual_reads_the_input_again() -> None:
    module = module_of(lambda m, x: x + m.down(F.silu(m.gate(x)) * m.up(x)), "bfloat16", L=33)
    result = check_against_torch(module, torch.randn(5, 33).bfloat16())
    assert [a.name for a in result.arguments if a.source == "inputs_0"] == ["A"]
    assert result.epilogue == "A[i, j] + (gemm1[i, j] + p_down_bias[j])"


def test_a_second_input_is_an_operand() -> None:
    module = module_of(lambda m, x, y: m.down(F.relu(m.gate(x)) * y), N=24)
    x, y = torch.randn(5, 33), torch.randn(5, 24)
    result = check_against_torch(module, x, y)
    assert result.middle == "max(gemm0[i, j] + p_gate_bias[j], 0) * inputs_1[i, j]"


@pytest.mark.parametrize("extents", [(1, 1, 1), (1, 33, 1), (33, 1, 65), (8, 16, 8)])
def test_odd_extents(extents: tuple[int, int, int]) -> None:
    K, N, L = extents
    for rows in (1, 3):
        module = module_of(lambda m, x: m.down(F.gelu(m.gate(x)) * m.up(x)), K=K, N=N, L=L)
        result = check_against_torch(module, torch.randn(rows, K))
        assert [getattr(result, name) for name in "MKNL"] == [rows, K, N, L]


def test_large_values_do_not_overflow_in_between() -> None:
    """In float16 the cube inside GELU overflows; in float32 it does not."""
    module = chain_module(8, 16, "float16", bias=False)
    with torch.no_grad():
        module.expand.weight.mul_(100)
    check_against_torch(module, 4 * torch.randn(6, 8).half())
