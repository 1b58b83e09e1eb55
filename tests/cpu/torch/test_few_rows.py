"""Single products of few rows in torch's graphs: which become kernels, and what these compute."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from cpu.torch.decoder import graph_of  # noqa: E402
from crossfuse.emulate.cuda import emulate  # noqa: E402
from crossfuse.emulate.llvm import draw, limits, parameters  # noqa: E402
from crossfuse.hardware import device  # noqa: E402
from crossfuse.lower.extract import lower  # noqa: E402
from crossfuse.measure.job import GRAPH, LIBRARY, Way  # noqa: E402
from crossfuse.relax.chains.groups import last_products, with_own_operators  # noqa: E402
from crossfuse.relax.chains.kernels import ChainKernels  # noqa: E402
from crossfuse.relax.chains.products import FewRows, find_products  # noqa: E402
from crossfuse.relax.graph import read_graph  # noqa: E402
from crossfuse.torch import Backend, Report, reports  # noqa: E402
from crossfuse.torch.translate import translate  # noqa: E402
from crossfuse.workload.tolerances import judge  # noqa: E402
from null.measure.timers import FakeTimer  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

#: Of which family `skinny` is planned on an H200, from one row to four.
D, H = 2048, 512
TARGET = "nvidia-h200"


class Step(nn.Module):
    """Products of one row as a decoder has them, with what stands in front of and behind them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(D, H, bias=bias), nn.Linear(D, H, bias=False)
        self.out = nn.Linear(H, D, bias=bias)
        self.gate, self.up = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.head = nn.Linear(D, 2 * H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (D,))
        mixed = torch.softmax(self.queries(h), -1) * torch.cumsum(self.keys(h), -1)
        mixed = torch.stack(mixed.chunk(4, -1), -2).flatten(-2)  # heads, joined to rows
        x = x + self.out(mixed)
        return self.head(F.rms_norm(x + F.pad(F.silu(self.gate(x)) * self.up(x), (0, D - H)), (D,)))


def check(module: Any, *inputs: Any, dtype: Any = torch.bfloat16, **options: Any) -> Report:
    """The compiled model errs at most twice as much as torch does."""
    options = {"rest": "eager", "cpu": "llvm", "target": TARGET, **options}
    if isinstance(module, nn.Module):
        module = module.to(dtype).eval()
    given = [each.to(dtype) for each in inputs]
    with torch.no_grad():
        got = torch.compile(module, backend=Backend(**options), dynamic=False)(*given).double()
        eager = module(*given).double()
        wide = module.double() if isinstance(module, nn.Module) else module
        exact = wide(*(each.double() for each in given))
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
    return reports()[-1]


def products_of(report: Report) -> list[tuple[str, ...]]:
    names = ("crossfuse_gemm", "crossfuse_gated_gemm")
    return [each.products for each in report.outcomes if each.name.startswith(names)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    [
        ((1, 1, D), True, torch.bfloat16),
        ((3, D), False, torch.float16),
        ((2, 2, D), True, torch.bfloat16),
    ],
    ids=str,
)
def test_a_step_of_few_rows(shape: tuple[int, ...], bias: bool, dtype: Any) -> None:
    torch.manual_seed(0)
    report = check(Step(bias), torch.randn(shape), dtype=dtype)
    found = [each for one in products_of(report) for each in one]
    biased = ["addmm", "addmm_1"] if bias else []
    plain = ["mm", *(f"mm_{place}" for place in range(1, 6 - len(biased)))]
    assert sorted(found) == [*biased, *plain], report.text()


class Router(nn.Module):
    """Scores of float32, of rows and weights that are stored in two bytes."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, D) * D**-0.5)
        self.up, self.cast = nn.Linear(D, H, bias=False), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (D,))
        wide = self.weight.float() if self.cast else self.weight.float() + 1
        scores = F.linear(h.float(), wide).sigmoid()
        return self.up(h).float().cumsum(-1)[..., :64] * scores


@pytest.mark.parametrize("cast", [True, False])
def test_routers_multiply_in_float32_what_is_stored_in_two_bytes(cast: bool) -> None:
    """A weight that is more than cast is computed, and stays with torch."""
    torch.manual_seed(0)
    report = check(Router(cast), torch.randn(2, D), always=True)
    assert products_of(report) == [("mm", "mm_1") if cast else ("mm_1",)], report.text()


@pytest.mark.slow
def test_what_follows_belongs_to_the_last_product_that_it_needs() -> None:
    def function(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return torch.add(x @ down.t(), F.silu(x @ gate.t()) * (x @ up.t()), alpha=0.5)

    weights = [torch.randn(H, D).bfloat16() for _ in range(3)]
    found = translate(graph_of(function, [torch.randn(1, D).bfloat16(), *weights]).graph)
    graph = read_graph(found.module["main"])
    every = list(find_products(graph))
    last = last_products(graph, {each.products[-1] for each in every})
    groups = [with_own_operators(graph, each, last) for each in every]
    behind = [[graph.operator(each).removeprefix("relax.") for each in one.after] for one in groups]
    first, gate, up = behind
    assert first == [] and gate[-1] != "multiply"
    assert "multiply" in up and up[-1] == "add"
    report = check(function, torch.randn(1, D), *weights)
    assert report.fused == ("crossfuse_gemm", "crossfuse_gemms")


def test_results_are_read_through_views() -> None:
    """A linear layer of three axes views the rows that what is before it makes."""

    def function(x: Any, gate: Any, up: Any, down: Any) -> Any:
        h = F.rms_norm(x.float(), (D,)).to(x.dtype)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    weights = [torch.randn(4 * D, D), torch.randn(4 * D, D), torch.randn(D, 4 * D)]
    given = [each.bfloat16() for each in (torch.randn(1, 1, D), *weights)]
    module = graph_of(function, given)
    Backend(rest="eager", cpu="llvm", target=TARGET).fuse(module)
    assert [each.products for each in reports()[-1].outcomes if each.name] == [
        ("mm_2",),
        ("mm", "mm_1"),
    ]
    targets = [each.target for each in module.graph.nodes]
    assert targets.count(torch.ops.crossfuse.run.default) == 2
    assert torch.ops.aten.mm.default not in targets


class Embedded(nn.Module):
    """Products of rows of a table, as the first layer of a decoder without a norm there has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, D)
        self.queries, self.keys = (nn.Linear(D, H, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x.long())
        return self.queries(x).cumsum(-1) + torch.softmax(self.keys(x), -1)


def test_rows_of_a_table() -> None:
    """TVM has two operators for it, the second a reshape: kernels begin behind both."""
    report = check(Embedded(), torch.tensor([[3], [5], [7]]))
    assert report.fused == ("crossfuse_gemms",), report.text()


def test_a_product_that_another_kernel_looks_at_stays() -> None:
    """A norm in front of two layers belongs to their kernel, with the bias in front of it."""

    def function(x: Any, before: Any, bias: Any, gate: Any, up: Any, down: Any) -> Any:
        h = F.rms_norm(F.linear(x, before) + bias.exp(), (D,))
        return F.linear(F.silu(h @ gate) * (h @ up), down)

    rows = torch.randn(4, D)
    report = check(function, rows, torch.randn(D, D), rows, *torch.randn(3, D, D) / 45)
    assert report.fused == ("crossfuse_rows_chain",)
    left = next(each for each in report.outcomes if each.products == ("mm",))
    assert left.text == "crossfuse_rows_chain reads more of it than its result"


def test_the_option_leaves_them_to_torch() -> None:
    report = check(nn.Linear(D, D), torch.randn(1, D), products=False)
    assert report.outcomes == () and report.fused == ()
    report = check(nn.Linear(D, D), torch.randn(1, D), products=True)
    assert report.fused == ("crossfuse_gemm",)
    assert report.text().startswith("crossfuse_gemm, about 3.6 of 5.7 us; gemm:M=1,K=2048,N=2048,")


def test_more_rows_and_unknown_ones_are_not_looked_at() -> None:
    assert check(nn.Linear(D, H), torch.randn(33, D)).outcomes == ()
    x = torch.randn(3, D)
    torch._dynamo.mark_dynamic(x, 0)
    backend = Backend(rest="eager", cpu="llvm", target=TARGET)
    with torch.no_grad():
        torch.compile(nn.Linear(D, H), backend=backend)(x)
    assert reports()[-1].outcomes == ()


@pytest.mark.parametrize(
    ("weight", "function", "said"),
    [
        (torch.randn(D, H), torch.matmul, "stored as [n, k]' leaves 0"),
        (torch.randn(503, D), F.linear, "'CTAs divide the columns' leaves 0"),
        (torch.randn(H, 2000), F.linear, "'steps divide the reduction' leaves 0"),
        (torch.randn(D, H).t(), F.linear, "strides [1, 512], 0 elements from its start; limit: we"),
        (
            torch.randn(H * D + 1).bfloat16()[1:].view(H, D),
            F.linear,
            "[2048, 1], 1 elements from its start",
        ),
        (torch.randn(2 * H, D), lambda x, w: F.linear(x, w[:H]), "no two layers"),
        (torch.randn(H, D), lambda x, w: F.linear(x, w + 1), "no two layers"),
    ],
    ids=["[k, n]", "odd columns", "odd reduction", "strided", "misplaced", "a part", "computed"],
)
def test_others_stay_with_torch(weight: Any, function: Any, said: str) -> None:
    width = weight.shape[0] if function is torch.matmul else weight.shape[1]
    report = check(function, torch.randn(1, width), weight)
    assert report.fused == ()
    assert said in " ".join(report.text().split())


def test_rows_that_begin_elsewhere_are_copied() -> None:
    """Kernels load 16 bytes at once; a part of a row is contiguous wherever it begins."""

    for width, count in ((D + 3, 1), (D + 8, 0)):
        start = width - D
        module = graph_of(
            lambda x, w, start=start: F.linear(x[:, start:], w),
            [torch.randn(1, width).bfloat16(), torch.randn(D, D).bfloat16()],
        )
        Backend(rest="eager", cpu="llvm", target=TARGET).fuse(module)
        targets = [each.target for each in module.graph.nodes]
        assert targets.count(torch.ops.aten.clone.default) == count
        assert targets.count(torch.ops.crossfuse.run.default) == 1


def test_wide_numbers_stay_with_torch() -> None:
    report = check(F.linear, torch.randn(1, D), torch.randn(H, D), dtype=torch.float32)
    assert report.fused == () and "leaves 0" in " ".join(report.text().split())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_is_right(rows: int, dtype: Any) -> None:
    """By the emulator, on rows with a large element; with bias, activation and residual."""

    def function(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return residual + F.silu(F.linear(x, weight, bias))

    given = [torch.randn(shape).to(dtype) for shape in ((rows, D), (H, D), (H,), (rows, H))]
    translation = translate(graph_of(function, given).graph)
    kernels = ChainKernels(translation.module, device(TARGET), False, kinds=(FewRows(),))
    (found,) = kernels.candidates(read_graph(translation.module["main"]))
    func = found.planned.outlined.func.with_attr("global_symbol", "main")
    call = kernels.kernel(found.planned)
    image = lower(kernels.module[call.function], device(TARGET)).image
    known = draw(parameters(func))
    known["A"][:, 7] = 100
    report = emulate(image, known)
    report.raise_if_wrong()
    judge(limits(func, known), report.outputs["out"], "product")


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "fused"), [(5.0, True), (19.0, False)])
def test_measurements_go_before_estimates(
    ours: float, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(way: Way) -> float:
        if way.kind == LIBRARY:
            return ours
        # What it is held against are the nodes that it would replace.
        run = torch.load(way.source, weights_only=False)
        made = run(*(torch.randn(each.shape).bfloat16() for each in way.given))
        return 6.0 * (len(made) if isinstance(made, tuple) else 1)

    def built(functions: Mapping[int, Any], target: Any, folder: Path) -> dict[int, Path]:
        return {place: folder / str(place) for place in functions}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("crossfuse.relax.choice._built", built)
    timer = FakeTimer(answer, "NVIDIA H200", TARGET)
    monkeypatch.setattr("crossfuse.measure.timer.find_timer", lambda index: timer)
    backend = Backend(target=TARGET, measure=True, rest="eager", cpu="build")
    fn = torch.compile(Projections().bfloat16().eval(), backend=backend)
    with torch.no_grad():
        try:
            fn(torch.randn(1, D).bfloat16())
        except Exception:  # kernels of a GPU do not run here
            assert fused
    *alone, outcome = reports()[-1].outcomes
    assert {(each.microseconds, each.eager_microseconds) for each in alone} == {(ours, 6.0)}
    assert len(alone) == 3
    assert (outcome.microseconds, outcome.eager_microseconds) == (ours, 18.0)
    assert bool(outcome.name) == fused and not any(each.name for each in alone)
    kinds = [each.kind for each in timer.asked]
    assert kinds.count(LIBRARY) == 12 and kinds.count(GRAPH) == 3


# Products of one operand.


class Projections(nn.Module):
    """Queries, keys and values of rows that a norm makes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(D, H, bias=True)
        self.keys, self.values = (nn.Linear(D, H // 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (D,))
        return torch.cat([self.queries(h), self.keys(h).cumsum(-1), self.values(h).cumsum(-1)], -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [((1, 1, D), {}), ((3, 1, D), {"early": True}), ((2, D), {"rest": "inductor"})],
    ids=str,
)
def test_products_of_one_operand_are_one_kernel(shape: Any, options: Any) -> None:
    torch.manual_seed(0)
    report = check(Projections(), torch.randn(shape), **options)
    assert report.fused == ("crossfuse_gemms",), report.text()
    rows = shape[0]
    text = " ".join(report.text().split())
    assert f"gemm:M={rows},K=2048,N=512 + 128 + 128,dtype=bfloat16 of one operand" in text
    names = [each.products for each in report.outcomes]
    assert names == [("addmm",), ("mm",), ("mm_1",), ("addmm", "mm", "mm_1")]
    *alone, together = report.outcomes
    assert together.microseconds < sum(each.microseconds for each in alone)
    assert together.microseconds < together.eager_microseconds


@pytest.mark.slow
def test_one_that_waits_for_another_is_left_out() -> None:
    def function(x: Any, q: Any, k: Any, v: Any) -> Any:
        keys = F.linear(x, k)
        return F.linear(x, q).softmax(-1) + F.linear(x, v) * keys.cumsum(-1), keys.sin()

    def both(*given: Any) -> Any:
        return torch.cat([each.sum(-1, keepdim=True) for each in function(*given)], -1)

    report = check(both, torch.randn(1, D), *(torch.randn(H, D) for _ in range(3)))
    together = [each.products for each in report.outcomes if len(each.products) > 1]
    assert together == [("mm", "mm_1")]
    assert report.fused == ("crossfuse_gemm", "crossfuse_gemms")


@pytest.mark.slow
def test_a_kernel_of_several_results_is_kept(tmp_path: Any, monkeypatch: Any) -> None:
    """A second trace takes it, and what it calls, from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backend = Backend(rest="eager", cpu="build", target=TARGET)
    module, x = Projections().bfloat16().eval(), torch.randn(1, D).bfloat16()
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad(), pytest.raises(Exception, match="limit: a CUDA device"):
            torch.compile(module, backend=backend)(x)
        assert reports()[-1].fused == ("crossfuse_gemms",)
        monkeypatch.setattr("crossfuse.torch.fuse_graph.fuse_graph", None)


def test_equal_layers_are_written_and_planned_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many functions are made of three layers as of two, and each says what became of it."""
    made: list[str] = []
    outlined, ranked = FewRows.outlined, FewRows.ranked
    monkeypatch.setattr(
        FewRows, "outlined", lambda self, static: made.append("written") or outlined(self, static)
    )
    monkeypatch.setattr(
        FewRows, "ranked", lambda self, *of: made.append("planned") or ranked(self, *of)
    )

    class Layers(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            # No tiles divide 40 columns.
            self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(count))
            self.odd = nn.ModuleList(nn.Linear(D, 40) for _ in range(count))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one, other in zip(self.layers, self.odd, strict=True):
                x = torch.softmax(one(x), -1)
                x = x + torch.cumsum(other(x), -1).sum(-1, keepdim=True)
            return x

    counts = []
    for layers in (2, 3):
        torch.compiler.reset()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(layers)))
        report = check(Layers(layers), torch.randn(1, D))
        assert report.fused == ("crossfuse_gemm",) * layers
        left = [each.text for each in report.outcomes if not each.name]
        assert len(left) == layers and all("CTAs divide the columns" in each for each in left)
        counts.append((made.count("written"), made.count("planned")))
        made.clear()
    assert counts[0] == counts[1] and counts[0][0] > 0
