"""Norms in front of products of few rows: which are made inside of them, and what these compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from cpu.torch.decoder import graph_of  # noqa: E402
from crossfuse.errors import WorkloadRefused  # noqa: E402
from crossfuse.relax.chains.products import made_inside, viewed_rows  # noqa: E402
from crossfuse.relax.graph import Graph, read_graph  # noqa: E402
from crossfuse.relax.operators import PRODUCT  # noqa: E402
from crossfuse.relax.outline import outline_product  # noqa: E402
from crossfuse.relax.scaled_rows import ScaledRows  # noqa: E402
from crossfuse.torch import Backend, reports  # noqa: E402
from crossfuse.torch.translate import translate  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]

D, H = 256, 512


def rms(x: Any, gain: Any) -> Any:
    """As transformers writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def found(
    norm: Callable[..., Any], dtype: Any = torch.bfloat16, rows: int = 2
) -> ScaledRows | None:
    """How the rows of a product behind a norm are made."""
    given = [torch.randn(shape).to(dtype) for shape in ((1, rows, D), (D,), (H, D))]
    made = translate(graph_of(lambda x, g, w: F.linear(norm(x, g), w), given).graph)
    graph: Graph = read_graph(made.module["main"])
    (product,) = (each for each in graph.makers if graph.operator(each) == PRODUCT)
    return made_inside(graph, viewed_rows(graph, graph.arguments(product)[0]))


SCALED: dict[str, Callable[..., Any]] = {
    "of transformers": rms,
    "of torch": lambda x, g: F.rms_norm(x, (D,), g),
    "without gain": lambda x, g: F.rms_norm(x, (D,)),
    "gains from one": lambda x, g: rms(x, 1 + g),
    "of squares of squares": lambda x, g: x * x.pow(2).square().square().mean(-1, keepdim=True),
    "divided by a sum": lambda x, g: x / (x.abs().sum(-1, keepdim=True) + 1),
    "of an activation": lambda x, g: F.silu(x) * x.square().mean(-1, keepdim=True).rsqrt(),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "two sums": lambda x, g: (x - x.mean(-1, keepdim=True)) / x.square().mean(-1, keepdim=True),
    "a difference": lambda x, g: x - x.mean(-1, keepdim=True),
    "a softmax": lambda x, g: torch.softmax(x, -1),
    "a maximum": lambda x, g: x / x.amax(-1, keepdim=True),
    "a factor inside": lambda x, g: torch.tanh(x * x.square().mean(-1, keepdim=True)),
    "a factor twice": lambda x, g: (x * x.mean(-1, keepdim=True)) * x.mean(-1, keepdim=True),
    "sums over tokens": lambda x, g: x * x.mean(1, keepdim=True),
    "no sum": lambda x, g: x * g,
    "the sum alone": lambda x, g: x.mean(-1, keepdim=True) * g,
    "wider rows": lambda x, g: rms(x.float().cumsum(-1), g).bfloat16(),
}


@pytest.mark.parametrize("name", SCALED)
def test_rows_that_a_sum_scales(name: str) -> None:
    assert found(SCALED[name]) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows(name: str) -> None:
    assert found(OTHERS[name]) is None


def test_more_rows_stay() -> None:
    assert found(rms, rows=16) is not None
    assert found(rms, rows=17) is None


def test_numbers_that_could_be_too_large_stay() -> None:
    assert found(rms, torch.float16) is None


class Block(nn.Module):
    """Norms in front of several products, and of gate and up; `read` reads one elsewhere too."""

    def __init__(self, read: bool = False) -> None:
        super().__init__()
        self.read = read
        self.first, self.second = (nn.Parameter(torch.rand(D) + 0.5) for _ in range(2))
        self.queries, self.keys = nn.Linear(D, D), nn.Linear(D, D // 2, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(D, 2 * D, bias=False),
            nn.Linear(D, 2 * D, bias=False),
            nn.Linear(2 * D, D, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = rms(x, self.first)
        mixed = torch.cumsum(self.queries(h), -1) * torch.cumsum(self.keys(h), -1).repeat(1, 1, 2)
        x = x + torch.tanh(mixed / 64) + (h.cumsum(-1) if self.read else 0)
        h = rms(x, self.second)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def check(module: nn.Module, x: torch.Tensor) -> tuple[str, ...]:
    """The compiled module errs at most twice as much as torch; its kernels."""
    module, x = module.bfloat16().eval(), x.bfloat16()
    with torch.no_grad():
        got = torch.compile(module, backend=Backend(**HERE), dynamic=False)(x).double()
        eager, exact = module(x).double(), module.double()(x.double())
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max()
    return reports()[-1].fused


def left(module: nn.Module, x: torch.Tensor) -> list[str]:
    """Operators that torch still computes."""
    weights = dict(module.bfloat16().named_parameters())
    graph = graph_of(
        lambda x, *given: torch.func.functional_call(
            module, dict(zip(weights, given, strict=True)), (x,)
        ),
        [x.bfloat16(), *weights.values()],
    )
    Backend(**HERE).fuse(graph)
    return [str(each.target) for each in graph.graph.nodes if each.op == "call_function"]


HERE = {"rest": "eager", "cpu": "llvm", "target": "nvidia-h200"}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "scale"), [(1, 1.0), (3, 1e4), (8, 1e-2)])
def test_norms_are_in_the_kernels_that_read_them(rows: int, scale: float) -> None:
    torch.manual_seed(0)
    kernels = check(Block(), scale * torch.randn(1, rows, D))
    assert {"crossfuse_gemms", "crossfuse_gated_gemm"} <= set(kernels)


@pytest.mark.slow
def test_a_norm_that_others_read_stays_apart() -> None:
    torch.manual_seed(0)
    kernels = check(Block(read=True), torch.randn(1, 2, D))
    assert {"crossfuse_gemms", "crossfuse_gated_gemm"} <= set(kernels)
    counts = [
        sum("rsqrt" in each for each in left(Block(read), torch.randn(1, 2, D)))
        for read in (False, True)
    ]
    assert counts == [0, 1]


def test_the_product_before_a_norm_is_not_lost() -> None:
    """It ends in the cast that the norm begins with, which the head's kernel would take too."""
    shapes = ((1, 1, D), (1, 1, H), (D, H), (H, D), (D,))
    graph = graph_of(
        lambda x, h, down, head, gain: F.linear(rms(x + F.linear(h, down), gain), head),
        [torch.randn(each).bfloat16() for each in shapes],
    )
    Backend(**HERE).fuse(graph)
    assert len(reports()[-1].fused) == 2


def test_other_sums_are_refused() -> None:
    """What stands behind a product is element-wise, whatever its rows are made of."""
    given = [torch.randn(each).bfloat16() for each in ((2, D), (H, D))]
    made = translate(graph_of(lambda x, w: F.linear(x, w).sum(-1, keepdim=True), given).graph)
    graph = read_graph(made.module["main"])
    (result,) = (each for each in graph.makers if graph.operator(each) == "relax.sum")
    inner, _ = graph.reach(result, ())
    module, _ = graph.subgraph(inner, result)
    with pytest.raises(WorkloadRefused, match=r"relax\.sum: found an operator that"):
        outline_product(module)


def test_rows_of_what_constants_make() -> None:
    """As embeddings are scaled by a number that is a tensor."""

    def scaled(x: Any, gain: Any, weight: Any) -> tuple[Any, Any]:
        x = x * torch.scalar_tensor(16.0).bfloat16()
        return x, F.linear(rms(x, gain), weight)

    given = [torch.randn(each).bfloat16() for each in ((1, 1, D), (D,), (H, D))]
    graph = graph_of(scaled, given)
    Backend(**HERE).fuse(graph)
    assert (reports()[-1].reason, reports()[-1].fused) == ("", ("crossfuse_gemm",))
