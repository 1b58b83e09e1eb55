"""A norm, two layers and the residual as one kernel, from Relax modules and from torch graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.relax import FuseChains, import_torch  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = pytest.mark.cpu


class Block(nn.Module):
    """``x + down(silu(gate(norm(x))) * up(norm(x)))``; without `gated` a plain layer."""

    def __init__(self, width: int, hidden: int, norm: Any = nn.RMSNorm, gated: bool = True) -> None:
        super().__init__()
        self.norm = norm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False) if gated else None
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        hidden = F.silu(self.gate(rows))
        if self.up is not None:
            hidden = hidden * self.up(rows)
        return x + self.down(hidden)


class Read(Block):
    """A block whose norm is read outside of it too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.norm(x)


def outcomes(module: nn.Module, *shape: int, always: bool = False) -> list[Any]:
    """What becomes of the groups of a module."""
    fuse = FuseChains("nvidia-h100", always=always)
    module = module.to(torch.bfloat16).eval()
    fuse(import_torch(module, (torch.zeros(shape, dtype=torch.bfloat16),)).mod)
    return list(fuse.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.RMSNorm, (32, 512)), (nn.LayerNorm, (4, 4, 1024))], ids=str
)
def test_the_norm_is_taken_where_more_is_saved(norm: Any, shape: tuple[int, ...]) -> None:
    chain, whole, layer = outcomes(Block(shape[-1], 4 * shape[-1], norm), *shape)
    assert (whole.name, whole.family) == ("crossfuse_rows_chain", "rows_chain")
    assert whole.microseconds < whole.eager_microseconds
    assert chain.products == whole.products and layer.products == whole.products[:2]
    for each in (chain, layer):
        assert each.text == "a product of it is in crossfuse_rows_chain, and more is saved so"


@pytest.mark.slow
def test_a_small_chain_is_faster_in_registers() -> None:
    chain, whole, *_ = outcomes(Block(256, 512), 32, 256)
    assert (chain.name, chain.family) == ("crossfuse_gated_ffn", "registers")
    assert whole.text == "a product of it is in crossfuse_gated_ffn, and more is saved so"


@pytest.mark.slow
def test_a_norm_that_others_read_stays_apart() -> None:
    found = outcomes(Read(512, 2048), 16, 512)
    assert [each.name for each in found] == ["crossfuse_gated_ffn", ""]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("gated", [True, False])
def test_torch_calls_one_kernel(gated: bool) -> None:
    torch.manual_seed(0)
    module = Block(512, 2048, gated=gated).to(torch.bfloat16).eval()
    x = (3 * torch.randn(2, 12, 512) + 10).to(torch.bfloat16)
    backend = Backend("eager", always=True, cpu="llvm", products=False)
    with torch.no_grad():
        got = torch.compile(module, backend=backend)(x).double()
        eager = module(x).double()
        exact = module.double()(x.double())
    assert reports()[-1].fused == ("crossfuse_rows_chain",)
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()


@pytest.fixture
def fresh_dynamo() -> Any:
    """Nothing that was compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
