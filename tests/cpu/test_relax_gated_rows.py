"""Gate and up of few rows as one kernel in Relax models."""

from __future__ import annotations

from typing import Any

import pytest

from relax_models import run

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.relax import FuseChains, import_torch  # noqa: E402
from crossfuse.runtime.tensors import to_numpy  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
D, H = 256, 128


class Gated(nn.Module):
    """The first half of a feed-forward block."""

    def __init__(self, bias: bool, act: Any) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, H, bias=bias) for _ in range(2))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate(x)) * self.up(x)


@pytest.mark.parametrize(
    ("shape", "bias", "act", "dtype"),
    [
        ((1, 4, D), False, F.silu, torch.bfloat16),
        ((3, D), True, F.gelu, torch.float16),
        ((1, 1, D), True, lambda g: g * torch.sigmoid(1.702 * g), torch.bfloat16),
    ],
    ids=["silu", "gelu with biases", "by hand"],
)
def test_both_are_one_kernel(shape: Any, bias: bool, act: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    module, x = Gated(bias, act).to(dtype).eval(), (4 * torch.randn(shape)).to(dtype)
    imported = import_torch(module, [x])
    fuse = FuseChains("nvidia-h200", always=True)
    mod = fuse(imported.mod)
    assert [(each.name, each.family) for each in fuse.outcomes] == [
        ("crossfuse_gated_gemm", "skinny")
    ]
    got = run(mod, [to_numpy(x), *imported.params.values()])[0].astype("float64")
    with torch.no_grad():
        eager = module(x).double().numpy()
        exact = module.double()(x.double()).numpy()
    assert abs(got - exact).max() <= 2 * abs(eager - exact).max() + 1e-6 * abs(exact).max()


def test_more_rows_stay_apart() -> None:
    module, x = Gated(False, F.silu).bfloat16().eval(), torch.randn(33, D).bfloat16()
    fuse = FuseChains("nvidia-h200", always=True)
    fuse(import_torch(module, [x]).mod)
    assert fuse.outcomes == ()
