"""Operators that TVM's importer computes otherwise than torch, through `compile_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tvm import relax  # noqa: E402

nn, F = torch.nn, torch.nn.functional

from crossfuse import compile_model  # noqa: E402
from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.relax import import_torch  # noqa: E402
from crossfuse.relax.operators import LEGAL  # noqa: E402
from relax_models import run  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

INF = float("inf")
MASK = torch.arange(8) % 3 == 1

#: Of x [3, 8], indices of 0 to 7 [3, 8], and an image [1, 8, 4, 4].
ARITHMETIC: list[Callable[..., Any]] = [
    lambda x, i, p: torch.add(x, x.flip(0), alpha=2),
    lambda x, i, p: torch.sub(x, 1, alpha=3),
    lambda x, i, p: torch.rsub(x, x.flip(0), alpha=3),
    lambda x, i, p: (i * 0.5, i / 2.5, i / (i + 1), i > 0.5, i == 1.5),
    lambda x, i, p: ((x > 0) + 1, (x > 0) * 2.5, x.half() * x[0, 0]),
    lambda x, i, p: torch.where(x > 0, x.half(), x),
    lambda x, i, p: (torch.where(x > 0, x, -INF), torch.where(x > 0, 2, x)),
    lambda x, i, p: (torch.where(i > 3, 1, 2), torch.where(i > 3, 0.5, INF)),
    lambda x, i, p: ((x > 2).any(-1), x.any(), (x > -9).all(0, keepdim=True), i.all(), i.any(1)),
    lambda x, i, p: torch.cat([x.half(), x]),
    lambda x, i, p: x.masked_fill(MASK, -INF) + torch.full((8,), -INF),
    lambda x, i, p: (x.std(-1), x.std(), x.std(0, keepdim=True, unbiased=False)),
    lambda x, i, p: (x.amax(-1), x.amin((0, 1), keepdim=True)),
    lambda x, i, p: (F.softmax(i.half(), -1, dtype=torch.float32), (x > 0).cumsum(-1)),
]
ACTIVATIONS: list[Callable[..., Any]] = [
    lambda x, i, p: torch.clamp_max(x, 0.1) + torch.clamp_min(x, -0.1),
    lambda x, i, p: (x.clamp(-0.5, 0.7), x.clamp(0.7, -0.5), i.clamp(2, 5), x.clamp(max=x[0])),
    lambda x, i, p: (F.hardtanh(x, -0.3, 0.6), F.relu6(4 * x), F.hardswish(3 * x)),
    lambda x, i, p: (F.celu(x, 2.0), F.elu(x, 0.5), F.selu(x), F.hardsigmoid(3 * x)),
]
aten = torch.ops.aten
GRADIENTS: list[Callable[..., Any]] = [
    lambda x, i, p: (aten.sigmoid_backward(x, x.sigmoid()), aten.tanh_backward(x, x.tanh())),
    lambda x, i, p: (aten.silu_backward(x.flip(0), x), aten.silu_backward(x.half(), 3 * x.half())),
    lambda x, i, p: (aten.gelu_backward(x.flip(0), x), aten.gelu_backward(x.half(), -x.half())),
    lambda x, i, p: aten.gelu_backward(x.flip(0), x, approximate="tanh"),
    lambda x, i, p: aten.threshold_backward(1 / x.flip(0), x / x.relu(), 0.5),
]
if hasattr(torch.ops.prims, "fma"):
    GRADIENTS.append(lambda x, i, p: torch.ops.prims.fma(x, x.flip(0), x + 1))
PLACES: list[Callable[..., Any]] = [
    lambda x, i, p: (x[:, -1], x[-2], x[torch.tensor([-1, 0])], x[:, i[0] - 8]),
    lambda x, i, p: F.pixel_shuffle(p, 2),
    lambda x, i, p: (F.group_norm(p, 2), F.instance_norm(p, eps=0.1)),
    lambda x, i, p: (F.interpolate(p, size=(7, 5)), F.interpolate(p, scale_factor=2)),
    lambda x, i, p: F.scaled_dot_product_attention(p, p, p, scale=0.3),
]


class Every(nn.Module):
    """Results of several functions."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = (function(*given) for function in self.functions)
        return tuple(x for each in made for x in (each if isinstance(each, tuple) else (each,)))


@pytest.mark.slow
@pytest.mark.parametrize("functions", [ARITHMETIC, ACTIVATIONS, GRADIENTS, PLACES])
def test_operators_are_torchs(functions: list[Callable[..., Any]]) -> None:
    given = (torch.randn(3, 8), torch.randint(0, 8, (3, 8)), torch.randn(1, 8, 4, 4))
    module = Every(functions).eval()
    got, due = compile_model(module, given, runs_on="llvm")(*given), module(*given)
    for place, (one, other) in enumerate(zip(got, due, strict=True)):
        near = dict(rtol=2e-3, atol=2e-3) if other.dtype == torch.float16 else {}
        text = f"result {place}"
        torch.testing.assert_close(
            one, other, equal_nan=True, msg=lambda m, text=text: f"{text}: {m}", **near
        )


def crossed(x: Any, i: Any, **options: Any) -> Any:
    """Cross entropy of rows, and of columns as positions of an image."""
    labels = i.clamp(max=2)
    options = {"ignore_index": 1, **options}
    return (
        F.cross_entropy(x, labels[:, 0], **options),
        F.cross_entropy(x[None], labels[:1], weight=x[:, 0].abs(), **options),
    )


def unfused(module: Any, *given: Any) -> Any:
    """Results of a model without any kernel of ours, as tensors."""
    imported = import_torch(module, given)
    mod = relax.transform.LegalizeOps(LEGAL)(imported.mod)
    inputs = [*(each.numpy() for each in given), *imported.params.values()]
    return [torch.from_numpy(each) for each in run(mod, inputs)]


#: Of x [3, 8] and indices of 0 to 7 [3, 8]: options that TVM's importer leaves out.
LOSSES: list[Callable[..., Any]] = [
    lambda x, i: crossed(x, i, label_smoothing=0.2),
    lambda x, i: crossed(x, i, reduction="sum"),
    lambda x, i: crossed(x, i, reduction="none"),
    lambda x, i: F.cross_entropy(x, i[:, 0] * 0 - 100),
]


@pytest.mark.slow
def test_losses_have_their_options() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    i = torch.arange(24).reshape(3, 8) % 8
    module = Every(LOSSES).eval()
    for got, due in zip(unfused(module, x, i), module(x, i), strict=True):
        torch.testing.assert_close(got, due, equal_nan=True)


#: Numbers of each kind.
KINDS = torch.tensor([0, 1e-20, -1e-4, 0.3, -2, 7.5, 1e9, -1e30, INF, -INF, torch.nan])
EDGES: list[Callable[..., Any]] = [
    lambda x: (x != 0, x != x.flip(0), torch.where(x != 3, x, 5)),
    lambda x: (torch.tanh(x), torch.atanh(x.clamp(-0.9, 0.9)), F.softshrink(x), F.selu(x)),
    lambda x: (x % 3, torch.remainder(x, -0.1), x * 0, 0.0 * x),
    lambda x: (torch.copysign(x.abs(), -x.flip(0)), torch.signbit(x)),
]


def test_infinities_nan_and_numbers_of_any_size() -> None:
    module = Every(EDGES).eval()
    found = compile_model(module, (KINDS,), runs_on="llvm")(KINDS)
    for place, (got, due) in enumerate(zip(found, module(KINDS), strict=True)):
        text = f"result {place}"
        torch.testing.assert_close(
            got, due, atol=0, rtol=1e-6, equal_nan=True, msg=lambda m, text=text: f"{text}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quotients_and_remainders_are_exact(dtype: torch.dtype) -> None:
    """The quotient of 1 and a tenth is rounded to 10, though a tenth is a bit more than that."""
    x = (torch.arange(-40, 60) * 0.1).to(dtype)
    y = torch.full_like(x, 0.1)

    class Quotients(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x // y, torch.div(x, -y, rounding_mode="floor"), x % y, torch.remainder(x, -y)

    module = Quotients().eval()
    for got, due in zip(unfused(module, x, y), module(x, y), strict=True):
        assert torch.equal(got, due)


class Last(nn.Module):
    """States and cells, of which TVM's importer made the outputs, and of which grids another."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.gated = nn.LSTM(6, 5), nn.GRU(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, (state, cell) = self.long(x)
        return state, cell, self.gated(x)[1], *torch.meshgrid(x[0, 0], x[0, 0, :2], indexing="xy")


@pytest.mark.parametrize("trains", [False, True])
def test_batch_norms_by_both_statistics(trains: bool) -> None:
    x, mean, variance = 3 + torch.randn(4, 5, 6), torch.randn(5), torch.rand(5)
    module = Every([lambda x, m, v: F.batch_norm(x, m.clone(), v.clone(), training=trains)])
    found = compile_model(module.eval(), (x, mean, variance), runs_on="llvm")(x, mean, variance)
    (due,) = module(x, mean, variance)
    torch.testing.assert_close(found, due)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*_flat_weights.*:UserWarning")
def test_each_of_several_results() -> None:
    torch.manual_seed(0)
    module, x = Last().eval(), torch.randn(1, 2, 6)  # one step: all of one shape
    for got, due in zip(unfused(module, x), module(x), strict=True):
        torch.testing.assert_close(got, due)


def test_long_sums_that_tvm_has() -> None:
    """One after the other, 65536 times 0.1 were off by 0.02 of 6553.6."""
    x = torch.stack([torch.full((1 << 16,), 0.1), torch.linspace(-1, 3, 1 << 16)])
    module = Every([lambda x: (x.sum(-1), x.abs().log().mean(-1), x @ x.T)]).eval()
    found = compile_model(module, (x,), runs_on="llvm")(x)
    for got, due in zip(found, module(x.double()), strict=True):
        torch.testing.assert_close(got.double(), due, rtol=3e-7, atol=0)


#: Of an image [1, 8, 4, 4]: what TVM does not know, or not with these arguments.
OF_TORCH: dict[str, Callable[..., Any]] = {
    "aten.avg_pool2d.default": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "aten.index.Tensor": lambda x: x[torch.tensor([0]), :, torch.tensor([1])],
    "aten.median.dim": lambda x: torch.median(x.bfloat16(), -1),
    "aten.cummax.default": lambda x: torch.cummax(x, 1),
}


def of_image(function: Callable[..., Any]) -> Any:
    """A model of a function, whose results are torch's."""
    given = torch.randn(1, 8, 4, 4)
    module = Every([function]).eval()
    found = compile_model(module, (given,), runs_on="llvm")
    got, due = found(given), module(given)
    got = got if isinstance(got, tuple) else (got,)
    torch.testing.assert_close(got, due, equal_nan=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("operator", OF_TORCH)
def test_what_has_no_converter_is_left_to_torch(operator: str) -> None:
    function = OF_TORCH[operator]

    def with_others(x: Any) -> Any:
        found = function(x)
        return (found[0] if isinstance(found, tuple) else found).relu() * 2

    for each in (function, with_others):
        report = of_image(each).report
        assert report.by_torch, report.text()
    assert f"left to torch: {report.by_torch[0]}" in report.text()


@pytest.mark.slow
def test_what_has_no_converter_becomes_other_operators() -> None:
    assert not of_image(lambda x: F.interpolate(x, scale_factor=1.3)).report.by_torch


@pytest.mark.slow
def test_operators_beside_what_is_decomposed_stay_whole() -> None:
    """So that what is known of them is still found."""

    def function(x: Any) -> Any:
        return F.silu(x) + F.unfold(x, 3).sum()

    assert "R.nn.silu" in str(of_image(function).imported.mod)


def test_what_torch_runs_is_exported_and_loaded(tmp_path: Any) -> None:
    from crossfuse import load_model

    x = torch.randn(1, 8, 4, 4)
    found = of_image(OF_TORCH["aten.cummax.default"])
    found.export(tmp_path)
    torch.testing.assert_close(tuple(load_model(tmp_path)(x)), tuple(found(x)))


def test_what_depends_on_values_is_refused() -> None:
    with pytest.raises(RefusedError, match="which makes a result of no known shape"):
        compile_model(Every([torch.nonzero]).eval(), (torch.randn(3, 8),), runs_on="llvm")


NAN = float("nan")
#: Nothing that is larger or smaller than all others, ties, zeros of both signs.
UNORDERED = [
    [1, NAN, 3, 2, -INF, INF, 0, -1],
    [-INF] * 8,
    [NAN] * 8,
    [5, 5, 5, 5, 1, 1, 1, 1],
    [-0.0, 0, -0.0, 0, -1, -2, -3, -4],
    [INF, INF, -INF, NAN, 1, 2, 3, 4],
]
ORDERED: list[Callable[..., Any]] = [
    lambda x: torch.topk(x, 3),
    lambda x: torch.topk(x, 4, 0, largest=False),
    lambda x: torch.topk(x, 2, sorted=False),
    torch.sort,
    lambda x: torch.sort(x, 0, descending=True),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_is_larger_than_all_others(dtype: str) -> None:
    x = torch.tensor(UNORDERED).to(getattr(torch, dtype))
    module = Every(ORDERED).eval()
    got, due = compile_model(module, (x,), runs_on="llvm")(x), module(x)
    for place in range(0, len(due), 2):
        axis = 0 if due[place].shape[1] == 8 and place != 6 else 1
        values, places = got[place], got[place + 1].long()
        torch.testing.assert_close(values, due[place], equal_nan=True, rtol=0, atol=0)
        # Equal elements may come from different places.
        torch.testing.assert_close(x.gather(axis, places), values, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_windows_repeats_and_mish(dtype: str) -> None:
    x = 4 * torch.randn(6, 9).to(getattr(torch, dtype))
    functions: list[Callable[..., Any]] = [
        lambda x: x.unfold(1, 4, 2),
        lambda x: x.unfold(0, 3, 5).sum(-1),
        lambda x: (x.repeat_interleave(3, dim=-1), x.repeat_interleave(2)),
        F.mish,
    ]
    module = Every(functions).eval()
    got, due = compile_model(module, (x,), runs_on="llvm")(x), module(x)
    torch.testing.assert_close(tuple(got), due)


NEAR_ZERO: list[Callable[..., Any]] = [
    torch.log1p,
    torch.expm1,
    lambda x: F.softplus(16 * x),
    lambda x: F.mish(16 * x),
    lambda x: F.softplus(x, beta=3, threshold=1),
    lambda x: F.logsigmoid(16 * x),
    lambda x: F.elu(-x, 0.5),
    F.celu,
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_numbers_keep_their_digits(dtype: torch.dtype) -> None:
    size = 10.0 ** torch.linspace(-30, 0.3, 60)
    x = torch.cat([size, -size.clamp(max=0.9)]).to(dtype)

    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # elu and celu of 2 bytes stay as kernels have them
            kept = NEAR_ZERO[: -2 if dtype == torch.bfloat16 else None]
            return tuple(each(x) for each in kept)

    module = Small().eval()
    found, allowed = compile_model(module, (x,), runs_on="llvm")(x), 3 * torch.finfo(dtype).eps
    for got, due in zip(found, module(x.double()), strict=True):
        assert ((got.double() - due).abs() <= allowed * due.abs()).all()


class Norms(nn.Module):
    """A group and an instance norm of images."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.group_norm(x, 2), F.instance_norm(x)


def test_norms_of_images_far_from_zero() -> None:
    """The square of the mean from the mean of squares was a negative variance, and NaN."""
    drawn = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    compiled = compile_model(Norms().eval(), (drawn,), always=True, runs_on="llvm")
    # A mean of 1e4 may be off by 1e-3, a tenth of the deviation.
    for x, most in ((drawn, 1e-5), (1e4 + 1e-2 * drawn, 0.2), (torch.full_like(drawn, 3.7), 1e-3)):
        for got, due in zip(compiled(x), Norms()(x.double()), strict=True):
            torch.testing.assert_close(got.double(), due, rtol=1e-5, atol=most)
