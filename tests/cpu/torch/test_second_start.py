"""A second start: what became of a graph comes from the cache, and TVM is not imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch._dynamo.utils import counters  # noqa: E402

nn, F, fx = torch.nn, torch.nn.functional, torch.fx

from crossfuse import cache  # noqa: E402
from crossfuse.cache import Entry, clear, kept, shelf  # noqa: E402
from crossfuse.errors import RefusedError  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.torch import Backend, compile_ahead, reports  # noqa: E402
from crossfuse.torch.graph_cache import graph_key, program_key, recall  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_caches")]

D, H = 64, 128
H100 = device("nvidia-h100")
#: Whether torch writes programs.
AHEAD = hasattr(torch.compiler, "load_compiled_function")


class Beside(nn.Module):
    """Two equal networks, which share a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.ModuleList([nn.Linear(D, H), nn.Linear(H, D)]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        networks = (self.first, self.second)
        return tuple(contract(F.gelu(expand(x))) for expand, contract in networks)


def start(rest: str) -> str:
    """Compile for an H100, up to the first launch; the report."""
    torch.compiler.reset()
    counters.clear()
    module = Beside().half().eval()
    fn = torch.compile(module, backend=Backend(rest=rest, always=True, cpu="build"))
    with torch.no_grad(), pytest.raises(RefusedError, match="argument-device"):
        fn(torch.zeros(16, D).half())
    return reports()[-1].text()


def start_ahead() -> str:
    """Compile ahead, up to the first launch; whether it was found, and the report."""
    torch.compiler.reset()
    # Of classes that have one name in each process.
    module = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)).half().eval()
    x = torch.zeros(16, D).half()
    with torch.no_grad():
        fn = compile_ahead(module, (x,), backend=Backend(always=True, cpu="build"))
        with pytest.raises(RefusedError, match="argument-device"):
            fn(x)
    return f"{fn.found}{fn.reason} {reports()[-1].text()}"


def hits() -> int:
    """Programs that torch had whole, in the last start."""
    return int(counters["aot_autograd"]["autograd_cache_hit"])


#: What another process does, told this file's folder. Torch's keys differ where pytest logs, so its
#: first start is one of torch's too.
SECOND = """
import sys
sys.path.insert(0, sys.argv[1])
import test_second_start as test
if test.AHEAD:
    assert test.start_ahead() == sys.argv[3]
    assert "torch._inductor.compile_fx" not in sys.modules
    assert "torch._inductor.lowering" not in sys.modules
print(test.start("inductor") == sys.argv[2])
print(test.start("inductor") == sys.argv[2], test.hits())
print([name for name in ("tvm", "crossfuse._tvm") if name in sys.modules])
"""


@pytest.mark.slow
def test_a_second_start_imports_no_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    from crossfuse.torch import fuse_graph  # loads TVM, which the second process must not

    first = start("eager")
    assert first.count("2 x crossfuse_gemm_chain, about") == 1
    assert [each.kind for each in kept()].count("library") == 1
    assert start("inductor") == first  # its graph of operators may be another one
    ahead = start_ahead() if AHEAD else "False "
    assert ahead.startswith("False ") and ahead.count(" crossfuse_gemm_chain, about") == AHEAD
    ahead = ahead.replace("False", "True", 1)
    worked_out = []
    whole = fuse_graph.fuse_graph
    monkeypatch.setattr(
        fuse_graph, "fuse_graph", lambda *given: worked_out.append(1) or whole(*given)
    )
    again = subprocess.run(
        [sys.executable, "-c", SECOND, str(Path(__file__).parent), first, ahead],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.stdout == "True\nTrue 1\n[]\n", again.stderr

    # Kernels that are damaged: torch's program is not taken, and all is worked out again.
    assert start("inductor") == first and not worked_out
    for each in kept():
        if each.kind == "library":
            each.path.write_bytes(each.path.read_bytes()[:-1])
    assert start("inductor") == first and len(worked_out) == 1 and hits() == 0
    assert start("inductor") == first and len(worked_out) == 1 and hits() == 1
    assert clear(["program", "graph"])
    assert start("inductor") == first and len(worked_out) == 2 and hits() == 0
    clear(["library", "graph"])
    assert not AHEAD or start_ahead() == ahead  # it has its kernels with it
    # What torch's own caches still have is not taken without its kernels.
    clear()
    assert not AHEAD or start_ahead() == ahead.replace("True", "False", 1)
    assert not AHEAD or start_ahead() == ahead


class Adapted(nn.Module):
    """Layers without gradients of their own behind a scale that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.layers = nn.Sequential(nn.Linear(D, H), nn.SiLU(), nn.Linear(H, D))
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


@pytest.mark.slow
def test_a_second_start_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from crossfuse.torch import fuse_graph

    def train() -> list[tuple[str, tuple[str, ...]]]:
        torch.compiler.reset()
        counters.clear()
        fn = torch.compile(Adapted().half(), backend=Backend(always=True, cpu="build"))
        with pytest.raises(RefusedError, match="argument-device"):
            fn(torch.ones(48, D).half()).sum().backward()  # more rows than single products have
        return [(each.part, each.fused) for each in reports()[-2:]]

    worked_out, whole = [], fuse_graph.fuse_graph
    monkeypatch.setattr(
        fuse_graph, "fuse_graph", lambda *given: worked_out.append(1) or whole(*given)
    )
    parts = [("forward", ()), ("backward", ("crossfuse_gemm_chain",))]
    assert train() == parts and len(worked_out) == 2 and not hits()
    assert train() == parts and len(worked_out) == 2 and hits() == 1
    # The kernel of the backward pass is part of what the program needs.
    clear(["library", "graph"])
    assert train() == parts and len(worked_out) == 4 and not hits()


def test_programs_are_told_apart_by_what_has_gradients() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    x = torch.zeros(2)
    next(iter(graph.nodes)).meta["example_value"] = x
    module = fx.GraphModule(nn.Module(), graph)
    plain = program_key(module, (x,), H100, ())
    assert plain and plain == program_key(module, (x + 1,), H100, ())
    assert plain != program_key(module, (x.clone().requires_grad_(),), H100, ())


def traced(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*given)


def key(function: Callable[..., Any], *given: torch.Tensor, options: Any = (True,)) -> str:
    return graph_key(traced(function, *given).graph, H100, options)


def test_what_a_graph_is_known_by(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table, wide = torch.zeros(4, 8), torch.arange(8.0), torch.arange(8.0).double()
    plain, other = key(lambda x: x * 2 + table, x), torch.ones(8)
    assert plain and plain == key(lambda x: x * 2 + other, x + 1)
    others = {
        "operator": key(lambda x: x / 2 + table, x),
        "constant": key(lambda x: x * 3 + table, x),
        "type of a constant": key(lambda x: x * 2 + wide, x),
        "extents": key(lambda x: x * 2 + table, torch.zeros(5, 8)),
        "strides": key(lambda x: x * 2 + table, torch.zeros(8, 4).t()),
        "type": key(lambda x: x * 2 + table, x.half()),
        "device": key(lambda x: x * 2, x.to("meta")),
        "options": key(lambda x: x * 2 + table, x, options=(False,)),
    }
    others["target"] = graph_key(
        traced(lambda x: x * 2 + table, x).graph, device("nvidia-h200"), (True,)
    )
    for module, name, value in (
        (torch, "__version__", "2.0"),
        (cache, "installed_version", lambda _: "0.1"),
        (cache, "package_hash", lambda: "edited"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            others[name] = key(lambda x: x * 2 + table, x)
    assert len({plain, *others.values()}) == len(others) + 1, others


def test_what_cannot_be_told_in_words_has_no_key() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    graph.output(graph.call_function(lambda x: x, (x,)))
    assert graph_key(graph, H100, ()) == ""
    sparse = fx.Graph()
    sparse.output(sparse.placeholder("x"))
    next(iter(sparse.nodes)).meta["val"] = torch.eye(2).to_sparse()
    assert graph_key(sparse, H100, ()) == ""
    with_symbols = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: x * 2, tracing_mode="symbolic"
    )(torch.zeros(4, 8))
    assert graph_key(with_symbols.graph, H100, ()) == ""


@pytest.mark.parametrize("text", ["", "[]", '{"steps": [{}], "outcomes": [], "untranslated": []}'])
def test_a_record_that_is_none_is_not_followed(text: str) -> None:
    module = traced(lambda x: x * 2, torch.zeros(4))
    before = str(module.graph)
    shelf("graph").write("0", Entry(text.encode(), {"label": "by hand"}))
    assert recall(module, "0") is None and str(module.graph) == before


@pytest.mark.slow
def test_networks_behind_each_other_are_computed_once() -> None:
    seen = []

    class Looking(Backend):
        def fuse(self, module: fx.GraphModule, part: str = "") -> None:
            super().fuse(module, part)
            seen.extend(str(each.target) for each in module.graph.nodes)

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Linear(*each) for each in ((D, H), (H, D), (D, H), (H, D))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c, d = self.layers
            return d(F.relu(c(F.relu(b(F.relu(a(x)))))))

    module = Direct().half().eval()
    with torch.no_grad():
        fn = torch.compile(module, backend=Looking(rest="eager", always=True, cpu="llvm"))
        fn(torch.zeros(16, D).half())
    assert seen.count("crossfuse.run.default") == 2
    assert not [each for each in seen if "mm" in each]
