"""Forms in which models write two layers: fused by the backend of torch, or left and why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.errors import WorkloadRefused  # noqa: E402
from crossfuse.torch import Backend, Report, reports  # noqa: E402
from crossfuse.torch.backend import _place  # noqa: E402

pytestmark = pytest.mark.cpu
ROWS, D, H = 16, 32, 64
PLAIN, GATED = "crossfuse_gemm_chain", "crossfuse_gated_ffn"
night = pytest.mark.nightly


class Weights(nn.Module):
    """Weights of two layers, and what a case makes of them."""

    def __init__(self, form: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.down = nn.Linear(H, D, bias=False)
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)
        self.kn, self.nk = (nn.Parameter(torch.randn(*s) / 6) for s in ((D, H), (D, H)))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self, x)


@dataclass(frozen=True)
class Case:
    """A form, the kernels that it becomes, and what is said of layers that are left."""

    form: Callable[[Any, Any], Any]
    fused: tuple[str, ...] = (PLAIN,)
    left: str = ""
    dtype: Any = torch.float16


def between(act: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda m, x: m.contract(act(m.expand(x)))


def quick(x: Any) -> Any:
    return x * torch.sigmoid(1.702 * x)


def erf_gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def tanh_gelu(x: Any) -> Any:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def twice(m: Any, x: Any) -> Any:
    hidden = torch.relu(m.expand(x))
    return m.contract(hidden), m.down(hidden)


def is_result(m: Any, x: Any) -> Any:
    hidden = torch.relu(m.expand(x))
    return m.contract(hidden), hidden


def shared(m: Any, x: Any) -> Any:
    one = m.contract(torch.relu(m.expand(x)))
    return m.contract(torch.relu(m.expand(torch.softmax(one, -1))))


CASES: dict[str, Case] = {
    "gelu of erf, decomposed": Case(between(erf_gelu)),
    "gelu of tanh, decomposed": Case(between(tanh_gelu)),
    "gelu of sigmoid, decomposed": Case(between(quick)),
    "silu, decomposed and gated": Case(
        lambda m, x: m.down((g := m.gate(x)) * torch.sigmoid(g) * m.up(x)), (GATED,)
    ),
    "an activation in float32": Case(between(lambda x: F.silu(x.float()).to(x.dtype))),
    "biases and a residual": Case(lambda m, x: x + m.contract(F.gelu(m.expand(x)) + 0.5)),
    "weights of both orders": Case(lambda m, x: torch.relu(x @ m.kn) @ m.nk.t()),
    "reshapes around": Case(
        lambda m, x: m.contract(F.relu(m.expand(x.view(2, 8, D)))).reshape(-1, 8)
    ),
    "weights of two places": Case(shared, (PLAIN, PLAIN)),
    "an intermediate with two products": Case(twice, (), "an intermediate that .* reads too"),
    "an intermediate that is a result": Case(
        is_result, (), "an intermediate that the model's results reads too"
    ),
    "a softmax between": Case(
        between(lambda x: torch.softmax(x, -1)), (), "no two layers of matrix products"
    ),
    "float64": Case(
        between(torch.relu),
        (),
        "left to torch: aten.t.default of float64, ",
        torch.float64,
    ),
}
#: Parts of these are in other cases.
LATER = (
    *("gelu of erf, decomposed", "gelu of sigmoid, decomposed", "biases and a residual"),
    *("reshapes around", "weights of both orders"),
)


def compiled(module: Any, x: Any) -> tuple[Any, Report]:
    torch.compiler.reset()
    given = {"always": True, "cascades": False, "products": False}  # chains alone
    backend = Backend(rest="eager", cpu="llvm", **given)
    with torch.no_grad():
        got = torch.compile(module, backend=backend)(x)
    return got, reports()[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=night) if each in LATER else each for each in CASES]
)
def test_a_form(name: str) -> None:
    case = CASES[name]
    module = Weights(case.form).to(case.dtype).eval()
    x = torch.randn(ROWS, D).to(case.dtype)
    got, report = compiled(module, x)
    with torch.no_grad():
        eager, exact = module(x), Weights.double(module)(x.double())
    assert (report.reason, report.fused) == ("", case.fused)
    assert re.search(case.left, " ".join(report.text().split())), report.text()
    results = [each if isinstance(each, tuple) else (each,) for each in (got, eager, exact)]
    for one, apart, due in zip(*results, strict=True):
        error, allowed = (one - due).abs().max(), 2 * (apart - due).abs().max()
        assert error <= allowed + 1e-6 * due.abs().max()


def test_graphs_of_several_gpus_and_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses import FakeTensorMode

    graph = torch.fx.Graph()
    with FakeTensorMode():
        for number in range(2):
            node = graph.placeholder(f"x{number}")
            node.meta["val"] = torch.empty(2, device=f"cuda:{number}")
    graph.output(node)
    text = "found tensors on cuda:0, cuda:1; limit: one GPU"
    with pytest.raises(WorkloadRefused, match=text):
        _place(torch.fx.GraphModule(nn.Module(), graph))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "an A100")
    text = r"cuda:0: found an A100 of compute capability 8\.0; limit: 9\.0, a Hopper GPU"
    with pytest.raises(WorkloadRefused, match=text):
        Backend().device_of(torch.device("cuda:0"))
