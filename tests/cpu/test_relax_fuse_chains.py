"""The pass that makes kernels of the chains in a model: what it takes, what it leaves, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_models import run

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.relax import ChainOutcome, FuseChains, import_torch  # noqa: E402
from crossfuse.relax.choice import PlannedGroup  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
D, H = 64, 128


class Model(nn.Module):
    """A function over layers of a transformer."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.down = nn.Linear(H, D, bias=False)
        self.project, self.expand = nn.Linear(D, D), nn.Linear(D, H)
        self.contract = nn.Linear(H, D)
        self.kn = nn.Parameter(torch.randn(D, H) / D**0.5)
        self.function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.down(F.silu(m.gate(x)) * m.up(x))


def layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A pre-norm layer without its attention, twice, with the same weights."""
    for _ in range(2):
        x = x + m.project(x)
        x = x + gated(m, m.norm(x))
    return x


def gelu_by_hand(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.expand(x)
    inner = 0.7978845608 * (h + 0.044715 * h * h * h)
    return m.contract(0.5 * h * (1 + torch.tanh(inner))) + x


def fused(
    forward: Callable[..., Any], dtype: str = "float16", **options: Any
) -> tuple[Any, tuple[ChainOutcome, ...], Callable[[], None]]:
    """A model with its chains fused, what became of them, and a check of its results."""
    torch.manual_seed(0)
    module = Model(forward).to(getattr(torch, dtype)).eval()
    x = torch.randn(2, 8, D).to(getattr(torch, dtype))
    imported = import_torch(module, [x])
    fuse = FuseChains(**{"always": True, **options})
    mod = fuse(imported.mod)

    def check() -> None:
        given = [to_numpy(x), *imported.params.values()]
        with torch.no_grad():
            exact = module.double()(x.double()).numpy()
        # TVM's own products of 16-bit floats, which stay beside the chains, add in 16 bits.
        got, apart = (run(each, given)[0].astype("float64") for each in (mod, imported.mod))
        noise = np.abs(apart - exact).max()
        assert np.abs(got - exact).max() <= 2 * noise + 1e-6 * np.abs(exact).max()

    return mod, fuse.outcomes, check


def calls(mod: Any) -> list[str]:
    """Functions of TensorIR that main calls, in order."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if getattr(getattr(value, "op", None), "name", "") == "relax.call_tir":
                found.append(str(value.args[0].name_hint))
    return found


def products(mod: Any) -> int:
    return str(mod["main"]).count("R.matmul")


@pytest.mark.slow
def test_equal_layers_share_one_kernel() -> None:
    mod, outcomes, check = fused(layers)
    assert calls(mod) == ["crossfuse_gated_ffn"] * 2
    assert products(mod) == 2  # the projections
    taken = [each for each in outcomes if each.name]
    assert len(taken) == 2
    assert taken[0].text.startswith(f"gated_ffn:M=16,K={D},N={H},L={D},dtype=float16")
    assert taken[0].eager_microseconds and taken[0].microseconds
    check()


def deep(count: int) -> Callable[..., Any]:
    """Layers one behind another, D and H columns in turns."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for number in range(count):
            x = F.gelu(m.contract(x) if number % 2 else m.expand(x))
        return x

    return forward


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4, 6])
def test_all_parts_of_a_row_of_layers_are_candidates(count: int) -> None:
    _, outcomes, check = fused(deep(count))
    sizes = [len(each.products) for each in outcomes]
    assert sorted(sizes) == sorted(n for n in range(2, count + 1) for _ in range(count + 1 - n))
    taken = [each for each in outcomes if each.name]
    products = [name for each in taken for name in each.products]
    assert len(products) == len(set(products))
    assert all("more is saved so" in each.text for each in outcomes if not each.name)
    check()


@pytest.mark.slow
def test_layers_are_one_group_where_that_is_foretold_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gain(group: PlannedGroup) -> float:
        return 15.0 if len(group.plans[0].chain.products) > 2 else 8.0

    monkeypatch.setattr(PlannedGroup, "gain", property(gain))
    mod, outcomes, check = fused(deep(3))
    assert [each.products for each in outcomes if each.name] == [outcomes[-1].products]
    assert calls(mod) == ["crossfuse_layers"]
    assert outcomes[-1].family in ("phases", "launches")
    check()


MODELS: dict[str, Callable[..., Any]] = {
    "gelu in parts": gelu_by_hand,
    "weights as [k, n]": lambda m, x: F.relu(x @ m.kn) @ m.contract.weight.T,
    "silu in parts": lambda m, x: m.down((g := m.gate(x)) / (1 + torch.exp(-g)) * m.up(x)) + x,
    "activation in float32": lambda m, x: m.down(F.silu(m.gate(x).float()).to(x.dtype) * m.up(x)),
    "one weight twice": lambda m, x: m.contract(F.relu(m.expand(m.contract(F.relu(m.expand(x)))))),
    "reshaped": lambda m, x: m.contract(F.gelu(m.expand(x.reshape(16, D)))).reshape(2, 8, D) * 2,
    "older product beside": lambda m, x: (
        (p := m.expand(x)).sum() + m.contract(F.relu(x @ m.kn) + torch.sigmoid(p))
    ),
    "normed input and output": lambda m, x: m.norm(m.contract(F.relu(m.expand(m.norm(x))))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_chains_are_found_however_they_are_written(name: str) -> None:
    mod, outcomes, check = fused(MODELS[name])
    assert any(each.name for each in outcomes)
    assert calls(mod)
    check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_types(dtype: str) -> None:
    mod, outcomes, check = fused(layers, dtype)
    if dtype == "float32":
        first = next(each for each in outcomes if len(each.products) == 3)
        assert first.name == "" and "operands of 16 bits" in first.text
        assert not calls(mod)
    check()


@pytest.mark.slow
def test_of_overlapping_chains_the_one_that_saves_most_is_taken() -> None:
    mod, outcomes, check = fused(
        lambda m, x: m.project(F.relu(m.contract(F.relu(m.expand(x))))), "bfloat16"
    )
    assert [len(each.products) for each in outcomes] == [2, 2, 3]
    left = [each for each in outcomes if not each.name]
    (kept,) = (each for each in outcomes if each.name)
    assert {each.text for each in left} == {
        f"a product of it is in {kept.name}, and more is saved so"
    }
    # The kernel of the first two layers applies the activation behind them, too.
    assert kept.products == outcomes[0].products
    assert products(mod) == 1
    check()


def test_an_intermediate_that_is_needed_elsewhere_is_not_hidden() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(m.expand(x))
        return m.contract(h) + h.sum(-1, keepdim=True)

    mod, (outcome,), check = fused(forward)
    assert not calls(mod)
    assert "found an intermediate that relax.sum reads too" in outcome.text
    check()


def test_an_intermediate_that_is_a_result_is_not_hidden() -> None:
    given = [relax.Var("x", relax.TensorType((16, D), "float16"))]
    given += [
        relax.Var(n, relax.TensorType(s, "float16")) for n, s in (("b", (D, H)), ("d", (H, D)))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(relax.op.matmul(given[0], given[1])))
            kept = builder.emit_output(hidden)
            out = builder.emit_output(relax.op.matmul(hidden, given[2]))
        builder.emit_func_output(relax.Tuple([kept, out]))
    fuse = FuseChains(always=True)
    mod = fuse(builder.get())
    (outcome,) = fuse.outcomes
    assert "found an intermediate that the model's results reads too" in outcome.text
    assert not calls(mod)


def test_what_is_slower_fused_stays() -> None:
    _, outcomes, _ = fused(gelu_by_hand, always=False)
    _, always, _ = fused(gelu_by_hand)
    (outcome,), (other,) = outcomes, always
    assert other.name
    faster = other.microseconds < other.eager_microseconds
    assert bool(outcome.name) == faster


def test_results_of_unknown_extent_are_left_alone_without_bins() -> None:
    rows = tvm.tirx.Var("rows", "int64")
    given = [relax.Var("x", relax.TensorType((rows, D), "float16"))]
    given += [
        relax.Var(n, relax.TensorType(s, "float16")) for n, s in (("b", (D, H)), ("d", (H, D)))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(relax.op.matmul(given[0], given[1])))
            out = builder.emit_output(relax.op.matmul(hidden, given[2]))
        builder.emit_func_output(out)
    fuse = FuseChains(always=True, bins=())
    mod = fuse(builder.get())
    (outcome,) = fuse.outcomes
    assert "the dynamic shape" in outcome.text and not calls(mod)
