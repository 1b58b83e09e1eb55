"""Symbolic shapes in the backend of torch.compile: kernels for bins of rows, compiled once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402
from crossfuse.torch.kernels import BinnedKernel  # noqa: E402

pytestmark = pytest.mark.cpu

D, H, BINS = 64, 128, (32, 64)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setattr("crossfuse.torch.report._REPORTS", deque())
    yield
    torch.compiler.reset()


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bins of the kernels that ran, in order; 0 where torch computed."""
    run: list[int] = []
    whole = BinnedKernel.run

    def noted(self: BinnedKernel, inputs: Any, sizes: Any) -> Any:
        rows = self.rows(inputs[0])
        run.append(next((most for most, kernel in self.bins if kernel and rows <= most), 0))
        return whole(self, inputs, sizes)

    monkeypatch.setattr(BinnedKernel, "run", noted)
    return run


class Layer(nn.Module):
    """A gated layer with a residual, between operators that are no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate, self.up = nn.Linear(D, H), nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return torch.sin(x + self.down(F.silu(self.gate(h)) * self.up(h)))


def check(module: nn.Module, fn: Callable[..., Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    with torch.no_grad():
        got, eager = fn(x), module(x)
        exact = module.double()(x.double())
        module.half()
    assert got.shape == eager.shape
    allowed = 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (got - exact).abs().max() <= allowed


@pytest.mark.parametrize("rest", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_batch_and_sequence(rest: str, rows_run: list[int]) -> None:
    module = Layer().half().eval()
    backend = Backend(rest=rest, always=True, cpu="llvm", bins=BINS)
    fn = torch.compile(module, backend=backend, dynamic=True)
    for shape in ((2, 5, D), (4, 8, D), (3, 13, D), (5, 20, D)):
        check(module, fn, shape)
    assert rows_run == [32, 32, 64, 0]
    (report,) = reports()  # compiled once
    assert report.fused == ("crossfuse_gated_ffn",)
    assert "; kernels for up to 32, 64 rows" in " ".join(report.text().split())


class Sizes(nn.Module):
    """Elements between the layers, and behind them, that depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.contract(F.relu(self.expand(x)))
        y = y + torch.arange(x.shape[0], dtype=x.dtype)[:, None] / x.shape[0]
        return self.contract(F.relu(self.expand(y)) / x.shape[0])


@pytest.mark.slow
def test_numbers_that_depend_on_the_rows_are_no_constants(rows_run: list[int]) -> None:
    module = Sizes().half().eval()
    fn = torch.compile(module, backend=Backend(rest="eager", always=True, cpu="llvm", bins=(32,)))
    x = torch.randn(7, D).half()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        fn(x)
    for rows in (9, 31, 33):
        check(module, fn, (rows, D))
    assert rows_run == [32, 32, 32, 0]
    # The last pair of layers is none: what lies between depends on the number of rows.
    assert reports()[-1].fused == ("crossfuse_gemm_chain",)
    assert reports()[-1].text().startswith("crossfuse_gemm_chain, about ")
    assert "addmm_2, addmm_3" not in reports()[-1].text()


def test_bins_that_are_none_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"found \(0, 16\); limit: positive numbers"):
        Backend(bins=(0, 16))


@pytest.mark.slow
def test_weights_with_as_many_rows_as_the_input_are_left(rows_run: list[int]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        k = torch.sin(x)
        return torch.relu(x @ k.t()) @ torch.sin(k)

    fn = torch.compile(forward, backend=Backend(rest="eager", always=True, cpu="llvm", bins=BINS))
    for rows in (32, 9):
        x = torch.randn(rows, D).half()
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            torch.testing.assert_close(fn(x), forward(x))
    assert rows_run == []
