"""Models that nobody chose, fused on rows that nobody chose: what separate functions compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

import crossfuse  # noqa: E402
from torch_functions import Of  # noqa: E402

pytestmark = pytest.mark.cpu
ROWS, COLUMNS = 8, 37


def least(x: Any) -> Any:
    return x.amin(-1, keepdim=True)


def most(x: Any) -> Any:
    return x.amax(-1, keepdim=True)


def zero_point(x: Any) -> Any:
    """Rows quantised to 8 bits with a zero point, and back."""
    scale = (most(x) - least(x)) / 255
    zero = (-least(x) / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero) * scale


def kurtosis(x: Any) -> Any:
    away = x - x.mean(-1, keepdim=True)
    return (away**4).mean(-1) / (away**2).mean(-1) ** 2


def weighed_variance(x: Any) -> Any:
    """By weights that are no polynomial: exponentials of rows far from zero are infinite."""
    weights = torch.sigmoid(x)
    total = weights.sum(-1, keepdim=True)
    mean = (weights * x).sum(-1, keepdim=True) / total
    return (weights * (x - mean) ** 2).sum(-1) / total[:, 0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min-max": lambda x: (x - least(x)) / (most(x) - least(x)),
    "zero point": zero_point,
    "kurtosis": kurtosis,
    "weighed variance": weighed_variance,
    "masked mean": lambda x: (x * (x > 0)).sum(-1) / (x > 0).sum(-1),
    "part of the range": lambda x: ((x - least(x)) * (most(x) - least(x)) / 255).sum(-1),
    "squares of shares": lambda x: (x / x.abs().sum(-1, keepdim=True)).pow(2).sum(-1),
    "entropy by cases": lambda x: torch.special.entr(x.softmax(-1)).sum(-1),
}


def rows() -> Any:
    """Rows of each kind, in float32."""
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).double()
    drawn[1] *= 30
    drawn[2] = 100 + 1e-3 * drawn[2]
    drawn[3] = 3.7
    drawn[4] = 0
    drawn[5] *= 1e-41
    drawn[6] *= 1e30
    drawn[7, 5] = 1e6
    return drawn.float()


def kind(x: Any) -> Any:
    """1 and 2 where a number is infinite in float32, 3 where it is none, else 0."""
    large = x.double().abs() > torch.finfo(torch.float32).max
    return torch.where(torch.isnan(x), 3, torch.where(large, torch.where(x > 0, 1, 2), 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_fused_is_what_separate_passes_make(name: str) -> None:
    module, x = Of(FUNCTIONS[name]).eval(), rows()
    fn = crossfuse.compile_model(module, (x,), always=True, runs_on="llvm")
    got, apart, exact = fn(x), module(x), module(x.double())
    assert fn.report.fused
    assert ((kind(got) == kind(apart)) | (kind(got) == kind(exact))).all()
    for one, other, due in zip(got, apart, exact, strict=True):
        known = torch.isfinite(one) & torch.isfinite(other) & torch.isfinite(due)
        error, noise = ((each.double() - due)[known].abs() for each in (one, other))
        size = due[known].abs().max() if known.any() else 0
        # Sums and scales in another order; steps of quantisation move by one where they do.
        slack = 3e-5 * size + 1e-44
        assert (error <= 2 * noise.max() + slack).all() if known.any() else True


INTEGERS: dict[str, tuple[Callable[..., Any], int, Any]] = {
    "distances": (lambda x: (most(x) - x).sum(-1), 2**40, torch.int64),
    "range": (lambda x: (x.amax(-1), (x - least(x)).amax(-1)), 2**30, torch.int32),
    "squares that wrap": (lambda x: (x.sum(-1), (x * x).sum(-1)), 255, torch.uint8),
    "flags": (
        lambda x: ((x > 3).any(-1), (x > 3).sum(-1), (x > 3).float().mean(-1)),
        9,
        torch.int8,
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(name: str) -> None:
    function, largest, dtype = INTEGERS[name]
    x = torch.randint(0, largest, (ROWS, 70), generator=torch.Generator().manual_seed(0)).to(dtype)
    fn = crossfuse.compile_model(Of(function).eval(), (x,), always=True, runs_on="llvm")
    for one, due in zip(
        *(e if isinstance(e, tuple) else (e,) for e in (fn(x), function(x))), strict=True
    ):
        torch.testing.assert_close(one, due, rtol=1e-6 if one.is_floating_point() else 0, atol=0)
    assert bool(fn.report.fused) == (name == "flags")


def test_squares_of_bfloat16_beside_attention(recwarn: pytest.WarningsRecorder) -> None:
    """Their legalisation failed, and left all cascades of the graph to torch."""
    from crossfuse.torch import Backend

    q, k, v = (torch.randn(2, 40, 64, dtype=torch.bfloat16) for _ in range(3))

    def attention(q: Any, k: Any, v: Any) -> Any:
        return (F.relu(q @ k.transpose(-1, -2)) ** 2 / 40) @ v

    torch.compiler.reset()
    fn = torch.compile(attention, backend=Backend(rest="eager", cpu="llvm", always=True))
    with torch.inference_mode():
        torch.testing.assert_close(fn(q, k, v), attention(q, k, v))
    assert not [each for each in recwarn if "crossfuse" in str(each.message)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_functions_that_tvm_lacks_in_two_bytes(dtype: Any) -> None:
    """All in one model, of which each had been refused."""

    def functions(x: Any) -> tuple[Any, ...]:
        small = 0.1 * x
        inside = (torch.asin, torch.acos, torch.atanh)
        anywhere = (torch.sinh, torch.cosh, torch.asinh, torch.atan)
        found = [f(small) for f in inside] + [f(x) for f in anywhere]
        return (*found, torch.acosh(x.abs() + 1), torch.atan2(x, x + 1), torch.fmod(x, 0.75))

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    fn = crossfuse.compile_model(Of(functions).eval(), (x,), runs_on="llvm")
    for one, other in zip(fn(x), functions(x), strict=True):
        unit = torch.finfo(dtype).eps  # sums of it in a function are rounded by torch alone
        torch.testing.assert_close(one, other, rtol=4 * unit, atol=unit)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_within_the_type_though_its_parts_are_not(dtype: Any) -> None:
    """Norms and deviations of rows whose squares, and sums whose exponentials, are beyond it."""

    def functions(x: Any) -> tuple[Any, ...]:
        norms = (torch.linalg.vector_norm(x, each, -1) for each in (0.5, 2, 3))
        spreads = (x.var(-1), x.std(-1, correction=0), x.std((0, 1), correction=2))
        return (*norms, *spreads, torch.logaddexp(x, x.flip(-1)), F.normalize(x, dim=-1))

    drawn = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    drawn[1], drawn[2], drawn[3, 7] = 30 * drawn[1], 200 + drawn[2], 4000
    x = drawn.to(dtype)
    fn = crossfuse.compile_model(Of(functions).eval(), (x,), runs_on="llvm")
    unit = torch.finfo(dtype).eps
    for one, apart, due in zip(fn(x), functions(x), functions(x.double()), strict=True):
        noise = (apart.double() - due).abs()
        allowed = 2 * noise + 16 * torch.finfo(torch.float32).eps * due.abs() + unit / 2 * due.abs()
        assert ((kind(one) == kind(apart)) & ~(one.double() - due > allowed)).all()


def test_places_in_rows_of_infinities() -> None:
    """TVM's were -1, in front of the row."""
    x = torch.tensor([[torch.inf] * 4, [-torch.inf] * 4, [1.0, 3.0, -2.0, 3.0]])

    def places(x: Any) -> tuple[Any, ...]:
        return x.argmax(-1), x.argmin(-1), x[1:2].argmax(), x.max(-1)[1]

    fn = crossfuse.compile_model(Of(places).eval(), (x,), runs_on="llvm")
    for one, due in zip(fn(x), places(x), strict=True):
        torch.testing.assert_close(one, due)


@pytest.mark.slow
def test_a_cache_that_is_written_between_products() -> None:
    """TVM's scatters take tensors at any offset, which no function could be joined with."""

    def attention(x: Any, weight: Any, cache: Any, at: Any) -> tuple[Any, ...]:
        rows = (x @ weight).view(2, 6, 2, 16).transpose(1, 2)
        cache = cache.index_copy(2, at, rows)
        keys = cache.repeat_interleave(2, 1)
        return cache, keys @ keys.transpose(-1, -2)

    given = [torch.randn(2, 6, 64), torch.randn(64, 32) / 8, torch.randn(2, 2, 32, 16)]
    halves = [*(each.half() for each in given), torch.arange(5, 11)]
    fn = crossfuse.compile_model(Of(attention).eval(), tuple(halves), runs_on="llvm")
    for one, due in zip(fn(*halves), attention(*halves), strict=True):
        torch.testing.assert_close(one, due, rtol=2e-3, atol=2e-2)
