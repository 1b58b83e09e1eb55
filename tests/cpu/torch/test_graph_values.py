"""Tensors of a graph that change in place, that lie in other ways or elsewhere, or are empty."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from crossfuse.torch import Backend, reports  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

M, D, H = 16, 32, 64
HERE = Backend(rest="eager", always=True, cpu="llvm")


def ffn(x: Any, up: Any, down: Any) -> Any:
    return F.relu(x @ up) @ down


def halves(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(each).half() / each[-1] ** 0.5 for each in shapes]


def close(got: Any, due: Any) -> None:
    assert got.stride() == due.stride()
    torch.testing.assert_close(got, due, rtol=1e-2, atol=1e-2)


def test_what_an_input_becomes_is_not_what_it_was() -> None:
    """Inductor's graphs end with copies into inputs, such as a cache that a layer writes to."""

    def forward(cache: Any, up: Any, down: Any) -> Any:
        new = torch.slice_scatter(cache, cache[:4] + 1, 0, 4, 8)
        y = ffn(new, up, down) + ffn(cache, up, down)
        cache.copy_(new)
        return y

    cache, *weights = halves((M, D), (D, H), (H, D))
    module = make_fx(forward, tracing_mode="fake")(cache, *weights)
    HERE.fuse(module)
    assert len(reports()[-1].fused) == 2
    due = cache.clone()
    close(module(cache, *weights), forward(due, *weights))
    close(cache, due)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_lie_as_torch_lays_them(dynamic: bool) -> None:
    def forward(x: Any, residual: Any, up: Any, down: Any) -> Any:
        y = residual.transpose(1, 2) + ffn(x, up, down)
        return y, y.transpose(1, 2).view(-1), torch.as_strided(y, (3, 5), (1, 2))

    weights = halves((D, H), (H, D))
    for each in weights:
        torch._dynamo.mark_static(each)
    backend = Backend(rest="eager", always=True, cpu="llvm", bins=(M,))
    fn = torch.compile(forward, backend=backend, dynamic=dynamic)
    for batch, length in ((2, 8), (3, 5))[: 1 + dynamic]:
        given = [*halves((batch, length, D), (batch, D, length)), *weights]
        with torch.no_grad():
            for got, due in zip(fn(*given), forward(*given), strict=True):
                close(got, due)
    assert reports()[-1].fused == ("crossfuse_gemm_chain",)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_on_the_cpu_are_left_to_torch(dynamic: bool) -> None:
    def forward(x: Any, up: Any, down: Any, scale: Any) -> Any:
        return (F.relu(x @ up) * scale) @ down

    backend = Backend(rest="eager", always=True, target="nvidia-h100")
    with FakeTensorMode(), torch.no_grad():
        given = [
            torch.empty(each, device="cuda", dtype=torch.float16)
            for each in ((M, D), (D, H), (H, D))
        ]
        for each in given[1:]:
            torch._dynamo.mark_static(each)
        number = torch.empty((), dtype=torch.float16)
        torch.compile(forward, backend=backend, dynamic=dynamic)(*given, number)
    assert reports()[-1].fused == ()
    left = "no two layers of matrix products" if dynamic else "left, outline: main: found a single"
    assert reports()[-1].text().startswith(left)


def test_graphs_of_no_rows_are_left_to_torch() -> None:
    x, *weights = halves((M, D), (D, H), (H, D))
    fn = torch.compile(ffn, backend=HERE, dynamic=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert fn(x[:0], *weights).shape == (0, D)
    assert reports()[-1].fused == ()
