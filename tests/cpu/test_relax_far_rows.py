"""Statistics that nobody chose, on rows far from zero, of equal elements and out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from torch_functions import Of  # noqa: E402

pytestmark = pytest.mark.cpu
#: Rows of each kind, and elements of a row: more than a thread takes, and no power of two.
ROWS, COLUMNS = 4, 77
KEPT = {"dim": -1, "keepdim": True}
EPSILON = torch.finfo(torch.float32).eps


def mean(x: Any) -> Any:
    return x.mean(**KEPT)


def variance(x: Any) -> Any:
    return ((x - mean(x)) ** 2).mean(**KEPT)


def log_likelihood(x: Any) -> Any:
    """Of normal numbers: a sum of squares divided by itself is n, but of equal ones 0/0."""
    v = variance(x)
    return (-((x - mean(x)) ** 2) / (2 * v) - 0.5 * v.log()).sum(-1)


def correlation(x: Any, y: Any) -> Any:
    a, b = x - mean(x), y - mean(y)
    return (a * b).sum(-1) / ((a * a).sum(-1) * (b * b).sum(-1)).sqrt()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sharpened softmax": lambda x: ((x - x.amax(**KEPT)) / 0.07).softmax(-1),
    "centred log-sum-exp": lambda x: torch.logsumexp(x - mean(x), -1),
    "softmax of standard scores": lambda x: ((x - mean(x)) / variance(x).sqrt()).softmax(-1),
    "skewness": lambda x: ((x - mean(x)) ** 3).sum(-1) / variance(x)[:, 0] ** 1.5,
    "cubes of standard scores": lambda x: (((x - mean(x)) / variance(x).sqrt()) ** 3).mean(-1),
    "signal to noise": lambda x: x.mean(-1) ** 2 / variance(x)[:, 0],
    "peak to mean": lambda x: x.abs().amax(-1) / x.abs().mean(-1),
    "mean of what is left": lambda x: (x - mean(x)).mean(-1),
    "sum of shares": lambda x: (x / x.sum(**KEPT)).sum(-1),
    "log-likelihood": log_likelihood,
    "correlation": correlation,
    "sums": lambda x: (x.sum(-1), (x * x).sum(-1)),
}
#: Errors of separate passes that the luck of one order of additions leaves: 4 units of the result.
UNITS = 4


def kinds() -> dict[str, Any]:
    """Rows in float32, by what they are."""
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).double()
    found = {
        f"about {about:g}": about + spread * drawn
        for about, spread in ((0, 1), (100, 1), (1e4, 1), (1e4, 1e3), (1e5, 1))
    }
    found |= {f"all {each:g}": torch.full_like(drawn, each) for each in (0.1, 1e4 + 0.1, 1e26, 0)}
    found["about 1e18"] = 1e17 * drawn
    for each in (float("inf"), -float("inf"), float("nan"), 1e20):
        one = drawn.clone()
        one[:, COLUMNS // 2] = each
        found[f"one {each:g}"] = one
    return {name: each.float() for name, each in found.items()}


def kind(x: Any) -> Any:
    """1 and 2 where a number is infinite in float32, 3 where it is none, else 0."""
    large = x.double().abs() > torch.finfo(torch.float32).max
    return torch.where(torch.isnan(x), 3, torch.where(large, torch.where(x > 0, 1, 2), 0))


def listed(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_most_twice_the_error_of_separate_passes(name: str) -> None:
    module, rows = Of(FUNCTIONS[name]).eval(), kinds()
    given = [torch.cat(list(rows.values()))]
    if name == "correlation":
        given.append(given[0].nan_to_num(1, 1, 1).clamp(-1e5, 1e5).flip(-1).sin())
    fn = crossfuse.compile_model(module, tuple(given), always=True, runs_on="llvm")
    assert fn.report.fused
    found = (listed(of(*given)) for of in (fn, module))
    exact = listed(module(*(each.double() for each in given)))
    for got, apart, due in zip(*found, exact, strict=True):
        for number, which in enumerate(rows):
            one, other, wanted = (e[ROWS * number : ROWS * (number + 1)] for e in (got, apart, due))
            alike = (kind(one) == kind(other)) | (kind(one) == kind(wanted))
            assert alike.all(), f"{which}: {one} for {other}"
            known = (kind(one) == 0) & (kind(other) == 0) & (kind(wanted) == 0)
            error, noise = ((e.double() - wanted)[known].norm() for e in (one, other))
            allowed = 2 * noise + UNITS * EPSILON * wanted[known].norm() + 1e-37
            assert error <= allowed, f"{which}: {error} off, separate passes {noise}"


def test_a_sum_of_one_element_is_that_element() -> None:
    """What autograd takes from the largest of a row is the sum of all: of one that is left, it."""

    def rows_and_sum(x: Any, by: Any) -> Any:
        e = torch.exp(x - x.amax(**KEPT))
        rows = by / ((e * e).sum(**KEPT) + 1e-3) * (2 * e) * e
        return rows, (-rows).sum(**KEPT)

    generator = torch.Generator().manual_seed(0)
    given = [1e4 * torch.randn(64, COLUMNS, generator=generator)]
    given += [torch.randn(64, 1, generator=generator)]
    fn = crossfuse.compile_model(Of(rows_and_sum).eval(), tuple(given), always=True, runs_on="llvm")
    assert [each.form for each in fn.report.cascades] == ["threads"]
    rows, total = fn(*given)
    assert torch.equal(rows.sum(**KEPT), -total)
