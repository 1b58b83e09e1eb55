"""Cascades with products in the backend: attention as a formula, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.torch import Backend, Report, reports  # noqa: E402

pytestmark = pytest.mark.cpu

D = 64
HEADS = (2, 32, D)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With capped scores, which no operator of torch has."""
    scores = q @ k.transpose(-1, -2) * D**-0.5
    return torch.softmax(10 * torch.tanh(scores / 10), -1) @ v


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)) @ weight


def check(function: Callable[..., Any], *given: torch.Tensor, **options: Any) -> Report:
    """The compiled function errs at most twice as much as torch does."""
    half = [each.half() for each in given]
    with torch.no_grad():
        backend = Backend(rest="eager", cpu="llvm", **options)
        got = torch.compile(function, backend=backend)(*half)
        eager, exact = function(*half), function(*(each.double() for each in half))
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-4
    return reports()[-1]


def test_attention_as_a_formula() -> None:
    given = [torch.randn(HEADS) for _ in range(3)]
    report = check(lambda q, k, v: 1 + attention(q, k, v), *given, always=True)
    assert report.fused == ("crossfuse_cascade_0",)
    assert report.text().startswith("crossfuse_cascade_0, about")
    assert check(attention, *given, always=True, cascades=False).fused == ()


def test_scores_that_others_read_are_left() -> None:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(q @ k.transpose(-1, -2) / D**0.5, -1)
        return weights @ v + torch.special.i0(weights).sum()

    report = check(forward, *(torch.randn(HEADS) for _ in range(3)), always=True)
    assert not report.reason and report.fused == ()


def test_operators_of_torch_and_products_behind_norms_are_left() -> None:
    given = [torch.randn(HEADS) for _ in range(3)]
    assert check(F.scaled_dot_product_attention, *given, always=True).outcomes == ()
    assert check(norm, torch.randn(64, 128), torch.randn(128, 128), always=True).outcomes == ()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [32, 1])
@pytest.mark.parametrize("least", [torch.finfo(torch.bfloat16).min, -1e9, -torch.inf])
def test_rows_all_of_whose_keys_are_masked(least: float, queries: int) -> None:
    """Of a number they are the mean of all values, as in torch; of an infinity 0, not NaN."""

    def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * D**-0.5 + mask, -1) @ v

    keys = 64
    given = [torch.randn(2, rows, D).bfloat16() for rows in (queries, keys, keys)]
    seen = torch.rand(2, queries, keys) < 0.5
    seen[0] = False
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill(~seen, least)
    with torch.no_grad():
        backend = Backend(rest="eager", cpu="llvm", always=True)
        got = torch.compile(forward, backend=backend)(*given, mask)
        due = forward(*given, mask).nan_to_num(nan=0)
    assert reports()[-1].fused == ("crossfuse_cascade_0",)
    torch.testing.assert_close(got, due, rtol=2e-2, atol=2e-2)


#: Masks of flags as models write them: what is seen, and what is left out.
FORMS: dict[str, Callable[[Any, Any, float], Any]] = {
    "masked_fill": lambda scores, seen, least: scores.masked_fill(~seen, least),
    "where": lambda scores, seen, least: torch.where(seen, scores, torch.tensor(least).bfloat16()),
    "added": lambda scores, seen, least: scores + torch.where(seen, 0.0, least).bfloat16(),
}


@pytest.mark.parametrize("least", [torch.finfo(torch.bfloat16).min, -torch.inf])
@pytest.mark.parametrize("form", FORMS)
def test_masks_of_flags_are_part_of_the_kernel(form: str, least: float) -> None:
    """TVM makes a tensor of -inf in two calls, which keep what is left out from sight."""

    def forward(q: Any, k: Any, v: Any, seen: Any) -> Any:
        scores = FORMS[form](q @ k.transpose(-1, -2) * D**-0.5, seen, least)
        return torch.softmax(scores, -1) @ v

    given = [torch.randn(2, rows, D).bfloat16() for rows in (4, 64, 64)]
    seen = torch.rand(2, 1, 64) < 0.5
    seen[0] = False
    with torch.no_grad():
        backend = Backend(rest="eager", cpu="llvm", always=True)
        got = torch.compile(forward, backend=backend)(*given, seen)
        due = forward(*given, seen).nan_to_num(nan=0)
    report = reports()[-1]
    assert report.fused == ("crossfuse_cascade_0",)
    torch.testing.assert_close(got, due, rtol=2e-2, atol=2e-2)
