"""`replace_mlp`: MLPs found by what they compute, replaced, restored, and refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.torch import replace_mlp  # noqa: E402

pytestmark = pytest.mark.cpu

D, H = 64, 128


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, H), nn.Linear(D, H), nn.Linear(H, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.silu(self.a(x)) * self.b(x))


class Transposed(nn.Module):
    """Weights as matrices of its own, [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = (
            nn.Parameter(torch.randn(shape) / shape[0] ** 0.5) for shape in ((H, D), (D, H))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.first, approximate="tanh") @ self.second + x


class Deep(nn.Module):
    """Four layers, in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        widths = (D, H, D, H, D)
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Scaled(Gated):
    """With a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(D).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class TwoHeads(nn.Module):
    """As many weights as an MLP, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.one(x)) * self.other(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Gated(), TwoHeads(), Transposed()])
        self.head = nn.Linear(D, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x=F.layer_norm(x, (D,)))
        return self.head(x)


class Summed(nn.Module):
    """No function of rows, so that no kernel of rows takes it in, as it may a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-2)


def replaced(module: nn.Module, **options: Any) -> Any:
    return replace_mlp(module, always=True, cpu="llvm", bins=(32,), **options)


@pytest.mark.slow
def test_mlps_are_replaced_and_restored() -> None:
    torch.manual_seed(1)
    module = Model().half().eval()
    keys, x = list(module.state_dict()), torch.randn(3, 5, D).half()
    done = replaced(module)
    assert list(done.parts) == ["parts.0", "parts.2"]
    assert "two layers that a kernel computes" in done.left["parts.1"]
    assert list(module.state_dict()) == keys
    with torch.no_grad():
        module.parts[0].a.weight.mul_(0.5)  # weights are read when it is called
        got, many = module(x), module(x.repeat(3, 1, 1))
        done.restore()
        eager, exact = module(x), module.double()(x.double())
    error, allowed = (got - exact).abs().max(), 2 * (eager - exact).abs().max()
    assert got.shape == eager.shape and not torch.equal(got, eager)
    assert error <= allowed + 1e-6 * exact.abs().max()
    torch.testing.assert_close(many[:3], eager, rtol=1e-2, atol=1e-2)  # more rows than the bin


@pytest.mark.slow
def test_four_layers_are_replaced() -> None:
    torch.manual_seed(1)
    module = nn.Sequential(Summed(), Deep()).half().eval()
    x = torch.randn(2, 7, D).half()
    done = replaced(module)
    assert list(done.parts) == ["1"]
    with torch.no_grad():
        got = module(x)
        done.restore()
        eager, exact = module(x), module.double()(x.double())
    error, allowed = (got - exact).abs().max(), 2 * (eager - exact).abs().max()
    assert not torch.equal(got, eager) and error <= allowed + 1e-6 * exact.abs().max()


def test_buffers_that_are_not_read_may_have_another_type() -> None:
    module = Gated().half().eval()
    module.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
    replaced(module)
    with torch.no_grad():
        assert module(torch.randn(2, D).half()).shape == (2, D)


def test_calls_that_no_kernel_is_for() -> None:
    module = Gated().half().eval()
    x = torch.randn(4, D).half()
    replaced(module)
    with pytest.raises(RefusedError, match=r"found a call that records gradients.*no_grad\(\)"):
        module(x)
    with torch.no_grad():
        with pytest.raises(RefusedError, match=r"shape \[4, 128\]; limit: rows of 64 elements"):
            module(torch.randn(4, H).half())
        with pytest.raises(RefusedError, match=r"found a tensor of torch\.float32 on cpu; limit"):
            module(x.float())
        with pytest.raises(RefusedError, match="found 2 inputs and none by name; limit: x alone"):
            module(x, x)
        with pytest.raises(RefusedError, match="found 0 inputs and y by name; limit: x alone"):
            module(y=x)
        with pytest.raises(RefusedError, match=r"found an input of strides \[1, 4\]; limit: row-m"):
            module(torch.randn(D, 4).half().t())
        for each in [part for part in module.modules() if isinstance(part, nn.Linear)][:1]:
            each.weight = nn.Parameter(each.weight.t().contiguous(), requires_grad=False)
        with pytest.raises(
            RefusedError, match=r"found a weight of shape \[64, 128\]; limit: \[128"
        ):
            module(torch.randn(4, D).half())
        with pytest.raises(RefusedError, match="found a module in training mode"):
            module.train()(x)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: Gated().half(), {}, "the module in training mode; limit: modules in eval"),
        (lambda: Gated().half().eval(), {"cpu": ""}, "found parameters on cpu; limit: a Hopper"),
        (lambda: nn.Linear(D, D).eval(), {}, "found no module with the two or three weights"),
        (lambda: TwoHeads().half().eval(), {}, "beside two layers of matrix products; limit"),
        (lambda: Scaled().half().eval(), {"always": True}, "a tensor that is the module's own; li"),
        (lambda: Gated().double().eval(), {}, r"found torch\.float64; limit: float"),
    ],
)
def test_models_that_are_refused(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError, match=text):
        replace_mlp(make(), **({"cpu": "llvm"} | options))
