"""The backend of torch.compile: what it fuses, what it leaves, what it computes."""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from crossfuse.errors import LoweringRefused, RefusedError, refuse  # noqa: E402
from crossfuse.torch import Backend, Report, crossfuse, reports  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

D, H = 64, 128


class Layer(nn.Module):
    """A pre-norm layer: attention by torch, then a gated FFN, then a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.query, self.project = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.down = nn.Linear(H, D, bias=False)
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, -1)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v))
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.contract(F.gelu(self.expand(x)))


def check(
    module: nn.Module, *inputs: torch.Tensor, rest: str = "eager", dtype: torch.dtype | None = None
) -> Report:
    """The compiled model errs at most twice as much as torch does."""
    dtype = dtype or torch.float16
    module, given = module.to(dtype).eval(), [each.to(dtype) for each in inputs]
    with torch.no_grad():
        backend = Backend(rest=rest, always=True, cpu="llvm")
        got = torch.compile(module, backend=backend)(*given).double()
        eager = module(*given).double()
        exact = module.double()(*(each.double() for each in given))
    error, allowed = (got - exact).abs().max(), 2 * (eager - exact).abs().max()
    assert error <= allowed + 1e-6 * exact.abs().max()
    return reports()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_layer(dtype: str) -> None:
    report = check(Layer(), torch.randn(2, 24, D), dtype=getattr(torch, dtype))
    assert report.fused == ("crossfuse_gated_ffn", "crossfuse_gemm_chain")
    assert "crossfuse_gated_ffn, about" in report.text()


@pytest.mark.slow
def test_inductor_compiles_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    # Releases have other classes of passes there, so that none of them may be needed.
    importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setitem(sys.modules, "torch._inductor.custom_graph_pass", ModuleType("empty"))
    monkeypatch.delitem(sys.modules, "crossfuse.torch.inductor", raising=False)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.contract(F.silu(self.expand(torch.cos(x)))))

    report = check(Small(), torch.randn(16, D), rest="inductor")
    assert report.fused == ("crossfuse_gemm_chain",)


class Function(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(D, H), nn.Linear(H, D)
        self.kn = nn.Parameter(torch.randn(D, H) / D**0.5)
        self.function = forward

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.function(self, *x)


GRAPHS: dict[str, Callable[..., Any]] = {
    "strided input": lambda m, x: m.contract(F.relu(m.expand(x.t().contiguous().t()))),
    "strided output": lambda m, x: m.contract(F.relu(m.expand(x))).t().sum(0),
    "unknown operator between layers of others": lambda m, x: torch.special.i0(
        m.contract(F.relu(m.expand(x)))
    ),
    "dropout": lambda m, x: F.dropout(m.contract(F.relu(m.expand(x))), 0.5, m.training),
    "constants": lambda m, x: m.contract(F.relu(m.expand(x)) * torch.arange(H).to(x.dtype) / H),
    "a number": lambda m, x: m.contract(F.relu(m.expand(x))) * x[0, 0].exp(),
    "three layers": lambda m, x: m.contract(F.relu(m.expand(m.contract(F.relu(x @ m.kn))))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    assert check(Function(GRAPHS[name]), torch.randn(16, D)).fused


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_activations_with_bounds_and_factors(rest: str) -> None:
    # Inductor writes most of them as clamp_min, clamp_max, and sums with a factor.
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.expand(x)
        bounded = F.hardtanh(h, -0.3, 0.6) + F.relu6(4 * h) - F.hardswish(3 * h)
        curved = torch.add(F.selu(h), F.celu(h, 2.0), alpha=2).masked_fill(h > 2, float("-inf"))
        return m.contract(bounded + curved.clamp(min=-3))

    assert len(check(Function(forward), 2 * torch.randn(16, D), rest=rest).fused) == 1


def test_an_intermediate_that_torch_needs_is_left() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(m.expand(x))
        return m.contract(hidden) + torch.special.i0(hidden).sum()

    report = check(Function(forward), torch.randn(48, D))
    assert report.fused == () and report.untranslated == ("aten.i0.default",)
    text = " ".join(report.text().split())
    assert "found an intermediate that the model's results reads too" in text


def test_inputs_that_change_in_place_are_right() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.mul_(2)
        y = m.contract(F.relu(m.expand(x)))
        x.add_(y)
        return x * y

    assert check(Function(forward), torch.randn(16, D)).fused


def test_graphs_on_the_cpu_are_left_to_torch() -> None:
    module = Layer().half().eval()
    x = torch.randn(2, 8, D).half()
    with torch.no_grad():
        got = torch.compile(module, backend=Backend(rest="eager"))(x)
        torch.testing.assert_close(got, module(x))
    assert reports()[-1].text() == ("left to torch: its tensors are on cpu, and kernels need a GPU")


def test_no_graph_is_left_for_its_gradients() -> None:
    module, x = Function(GRAPHS["dropout"]), torch.randn(16, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(module, backend=Backend(rest="eager", cpu="llvm"))(x).sum().backward()
    assert module.expand.weight.grad is not None
    assert [(each.part, each.reason) for each in reports()[-2:]] == [
        ("forward", ""),
        ("backward", ""),
    ]


def test_what_goes_wrong_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("crossfuse.torch.fuse_graph.rewrite", broken)
    module, x = Function(GRAPHS["dropout"]).half().eval(), torch.randn(16, D).half()
    with torch.no_grad(), pytest.warns(UserWarning, match="RuntimeError: no such thing"):
        got = torch.compile(module, backend=Backend(rest="eager", always=True, cpu="llvm"))(x)
    torch.testing.assert_close(got, module(x))


@pytest.mark.usefixtures("fresh_caches")
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_kernel_that_nvcc_refuses_leaves_the_graph_as_it_was(
    monkeypatch: pytest.MonkeyPatch, rest: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        given = {"found": "a riddle", "limit": "CUDA", "instead": "write it so"}
        raise refuse(LoweringRefused, "nvcc", "main", **given)

    collectives, over_ranks = [], Backend.fuse_over_ranks
    monkeypatch.setattr("crossfuse.runtime.artefact.compile_cubin", broken)
    monkeypatch.setattr(
        Backend, "fuse_over_ranks", lambda *given: collectives.append(given) or over_ranks(*given)
    )
    module, x = Function(GRAPHS["dropout"]).half().eval(), torch.randn(16, D).half()
    before = reports()
    with torch.no_grad(), pytest.warns(UserWarning, match="left a graph to torch: .* a riddle"):
        got = torch.compile(module, backend=Backend(rest=rest, always=True, cpu="build"))(x)
    torch.testing.assert_close(got, module(x), rtol=1e-2, atol=1e-2)
    (report,) = (each for each in reports() if not any(each is other for other in before))
    assert not report.outcomes and "found a riddle; limit: CUDA" in report.text()
    # They are ours in the second graph too that inductor is given.
    assert len(collectives) == (2 if rest == "inductor" else 1)


@pytest.mark.usefixtures("fresh_caches")
def test_nvcc_runs_beside_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    from crossfuse.runtime import artefact

    compiling, inner, cubin = Event(), compile_fx.compile_fx_inner, artefact.compile_cubin

    def entered(*given: Any, **known: Any) -> Any:
        compiling.set()
        return inner(*given, **known)

    def late(*given: Any, **known: Any) -> Any:
        assert compiling.wait(60)  # or inductor would wait for what waits for it
        return cubin(*given, **known)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", entered)
    monkeypatch.setattr(artefact, "compile_cubin", late)
    module, x = Function(GRAPHS["dropout"]).half().eval(), torch.randn(16, D).half()
    backend = Backend(always=True, cpu="build")
    with torch.no_grad(), pytest.raises(RefusedError, match="argument-device"):
        torch.compile(module, backend=backend)(x)
    assert reports()[-1].fused == ("crossfuse_gemm_chain",)


def test_chains_stay_when_cascades_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("crossfuse.torch.fuse_graph.may_have_attention", broken)
    with pytest.warns(UserWarning, match="left cascades of a graph to torch: RuntimeError: no s"):
        report = check(Function(GRAPHS["dropout"]), torch.randn(16, D))
    assert report.fused == ("crossfuse_gemm_chain",)
    assert report.text().endswith("left, RuntimeError: no such thing\n    cascades")


def test_torch_finds_it_by_name() -> None:
    assert "crossfuse" in torch.compiler.list_backends(exclude_tags=None)
    module, x = Function(GRAPHS["dropout"]).half().eval(), torch.randn(16, D).half()
    options = {"rest": "eager", "always": True, "cpu": "llvm"}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.compile(module, backend="crossfuse", options=options)(x)
    assert reports()[-1].fused == ("crossfuse_gemm_chain",)


@pytest.mark.slow
def test_a_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    seen, inner = [], compile_fx.compile_fx_inner

    def looking(*given: Any, **known: Any) -> Any:
        seen.append(config.max_autotune)
        return inner(*given, **known)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", looking)
    module, x = Function(GRAPHS["dropout"]).half().eval(), torch.randn(3, D).half()
    tuned = {"mode": "max-autotune-no-cudagraphs"}
    for backend, options in (("crossfuse", {}), ("crossfuse", tuned), (Backend(), tuned)):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(module, backend=backend, **options)(x)
    assert seen == [False, True, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rest": "xla"}, "found 'xla'; limit: 'inductor' or 'eager'"),
        ({"cpu": "numpy"}, "found 'numpy'; limit: '' or 'llvm' or 'build'"),
        ({"fast": True}, "found 'fast'; limit: rest, always, target, cpu, cascades, bins, mode"),
        ({"mode": "fastest"}, "found 'fastest'; limit: '' or 'default' or 'reduce-overhead' or 'm"),
        ({"mode": "default", "rest": "eager"}, "found 'default'; limit: '': nobody compiles"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], text: str) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with pytest.raises(RefusedError, match=text):
        crossfuse(graph, [], options=options)


def test_threads_define_the_operators_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("crossfuse.torch.kernels")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    made = []

    def library(*given: str) -> Any:
        time.sleep(0.1)
        made.append(given)
        return MagicMock()

    monkeypatch.setattr(fresh, "registry", MagicMock(Library=library))
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fresh.define(), range(4)))
    assert made == [("crossfuse", "DEF")] and len(found) == 1


def test_a_kernel_that_is_not_there() -> None:
    from crossfuse.torch.kernels import define

    define()
    with pytest.raises(RefusedError, match="found the key 'nothing'; limit: kernels that this"):
        torch.ops.crossfuse.run([torch.zeros(1)], "nothing")
