"""Mixtures of experts in torch's graphs, as a decoder of few tokens has them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from crossfuse.torch import Backend, Report, inductor, reports  # noqa: E402
from crossfuse.torch.short_sorts import sort_short  # noqa: E402
from crossfuse.torch.translate import part_of  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]
E, TOP, K, N = 16, 4, 256, 64


class Mixture(nn.Module):
    """A router, and the network of each expert for the tokens that are its own.

    `way` says in which form torch is told to multiply by the weights of a pair's expert.
    """

    def __init__(
        self,
        way: str = "weights first",
        normalised: bool = True,
        width: int = N,
        bias: bool = False,
        alternate: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.normalised, self.alternate = way, normalised, alternate
        self.router = nn.Parameter(torch.randn(E, K) * 0.1)
        turned = way in ("stored transposed", "transposed first")
        shapes = [(E, 2 * width, K), (E, K, width)]
        shapes = [(e, k, n) for e, n, k in shapes] if turned else shapes
        self.gate_up, self.down = (nn.Parameter(torch.randn(each) * 0.06) for each in shapes)
        given = (torch.randn(E, columns) for columns in (2 * width, K))
        self.biases = nn.ParameterList(given) if bias else (None, None)

    def multiply(
        self, x: torch.Tensor, weights: torch.Tensor, bias: Any, places: torch.Tensor
    ) -> torch.Tensor:
        chosen = weights[places]
        if self.way in ("weights first", "transposed first"):
            chosen = chosen.transpose(1, 2) if self.way == "transposed first" else chosen
            made = torch.bmm(chosen, x.unsqueeze(-1)).squeeze(-1)
        else:
            chosen = chosen if self.way == "stored transposed" else chosen.transpose(1, 2)
            made = torch.bmm(x.unsqueeze(1), chosen).squeeze(1)
        return made if bias is None else made + bias[places]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x, self.router).float().softmax(-1)
        share, places = scores.topk(TOP, -1)
        if self.normalised:
            share = share / share.sum(-1, keepdim=True)
        share, places = share.to(x.dtype).reshape(-1), places.reshape(-1)
        rows = x.repeat_interleave(TOP, 0)
        if self.way == "other rows":
            rows = x.repeat(TOP, 1)
        of_gate, of_down = self.biases
        both = self.multiply(rows, self.gate_up, of_gate, places)
        gate, up = (both[:, ::2], both[:, 1::2]) if self.alternate else both.chunk(2, -1)
        made = self.multiply(F.silu(gate) * (up + 1), self.down, of_down, places)
        return x + (made * share.unsqueeze(-1)).view(len(x), TOP, K).sum(1).to(x.dtype)


def compiled(model: Any, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Report]:
    backend = Backend(cpu="llvm", target="nvidia-h200", **options)
    with torch.no_grad():
        return torch.compile(model, backend=backend, dynamic=False)(x), reports()[-1]


def check(model: nn.Module, tokens: int, dtype: Any = torch.bfloat16, **options: Any) -> Report:
    """The compiled model errs at most twice as much as torch does, where both route alike."""
    model = model.to(dtype).eval()
    x = torch.randn(tokens, K).to(dtype)
    got, report = compiled(model, x, **options)
    with torch.no_grad():
        eager = model(x).double()
        exact = model.double()(x.double())
    off, limit = ((each - exact).abs().amax(-1) for each in (got.double(), eager))
    assert (off <= 2 * limit + 1e-6).all()
    return report


def experts_of(report: Report) -> list[tuple[str, ...]]:
    return [each.products for each in report.outcomes if each.name.startswith("crossfuse_experts")]


@pytest.mark.parametrize(
    ("way", "tokens", "dtype"),
    [
        ("weights first", 1, torch.bfloat16),
        ("weights first", 3, torch.float16),
        ("rows first", 2, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("normalised", [True, False])
def test_experts_become_two_kernels(way: str, tokens: int, dtype: Any, normalised: bool) -> None:
    report = check(Mixture(way, normalised), tokens, dtype, rest="eager")
    assert experts_of(report) == [("bmm",), ("bmm_1",)]


def test_sorted_scores_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows, a router's largest scores are the first of all of them, sorted."""
    monkeypatch.setattr(inductor, "launched_together", lambda _: {"combo_kernels": True})
    report = check(Mixture(), 3)
    assert experts_of(report) == [("bmm",), ("bmm_1",)]
    (second,) = (each for each in report.outcomes if each.name == "crossfuse_experts1")
    assert f"places[3, {E}] factor[3, {E}]" in second.text


@pytest.mark.parametrize("way", ["stored transposed", "transposed first", "rows first"])
@pytest.mark.parametrize(
    ("width", "bias", "alternate"),
    [(N, False, False), (K // 2, True, True), (K, True, False), (K, False, True)],
)
def test_weights_and_biases_are_read_as_they_lie(
    way: str, width: int, bias: bool, alternate: bool
) -> None:
    """Square ones too, whose extents do not say how they lie."""
    model = Mixture(way, width=width, bias=bias, alternate=alternate)
    report = check(model, 2, rest="eager")
    assert experts_of(report) == [("bmm",), ("bmm_1",)]
    texts = [each.text for each in report.outcomes if each.name.startswith("crossfuse_experts")]
    assert all(("bias[" in each) == bias for each in texts)
    shape = f"B[{E}, {K}, {2 * width}]" if way != "rows first" else f"B[{E}, {2 * width}, {K}]"
    assert shape in texts[0]


class ByPlaces(nn.Module):
    """Experts chosen by a matrix of places, as models write it by hand."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        shapes = [(E, 2 * N, K), (E, K, N)]
        shapes = [(e, k, n) for e, n, k in shapes] if way == "columns" else shapes
        self.gate_up, self.down = (nn.Parameter(torch.randn(each) * 0.06) for each in shapes)
        self.register_buffer("places", torch.randint(E, (3, TOP)))
        self.register_buffer("share", torch.rand(3, TOP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.gate_up[self.places], self.down[self.places]
        if self.way == "products":
            gate, up = (first @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
            made = (second @ (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        else:
            of_first, of_second = {
                "rows": ("td,tknd->tkn", "tkn,tkdn->tkd"),
                "columns": ("td,tkdn->tkn", "tkn,tknd->tkd"),
            }[self.way]
            gate, up = torch.einsum(of_first, x, first).chunk(2, -1)
            made = torch.einsum(of_second, F.silu(gate) * up, second)
        return x + (made * self.share[..., None]).sum(1)


@pytest.mark.parametrize("way", ["rows", "columns", "products"])
def test_places_of_several_experts_a_token(way: str) -> None:
    """A matrix of the product may have all experts of a token, whose row is one."""
    report = check(ByPlaces(way), 3, rest="eager")
    assert experts_of(report) == [("bmm",), ("bmm_1",)]


def test_biases_of_other_experts_follow_the_product() -> None:
    """One that other places choose is no bias of the products."""
    weights, bias = torch.randn(E, 32, K).bfloat16(), torch.randn(E, 32).bfloat16()

    def chosen(x: torch.Tensor, places: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights[places], x.unsqueeze(-1)).squeeze(-1) + bias[others]

    given = torch.randn(3, K).bfloat16(), torch.tensor([1, 0, 5]), torch.tensor([0, 2, 5])
    backend = Backend(cpu="llvm", target="nvidia-h200", rest="eager")
    with torch.no_grad():
        got = torch.compile(chosen, backend=backend, dynamic=False)(*given)
        torch.testing.assert_close(got, chosen(*given), rtol=2e-2, atol=1e-1)
    (outcome,) = (each for each in reports()[-1].outcomes if "experts" in each.name)
    assert "bias[" not in outcome.text


def test_rows_in_another_order_are_stored_first() -> None:
    report = check(Mixture("other rows"), 3, rest="eager")
    (first,) = (each for each in report.outcomes if each.name == "crossfuse_experts")
    assert f"from A[{3 * TOP}, {K}]" in first.text


@pytest.mark.parametrize("bounded", [False, True])
def test_places_from_the_last_expert(bounded: bool) -> None:
    weights = torch.randn(E, 32, K).bfloat16()

    def chosen(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        at = places.clamp(0, E - 1) if bounded else places
        return torch.bmm(weights[at], x.unsqueeze(-1)).squeeze(-1)

    x, places = torch.randn(3, K).bfloat16(), torch.tensor([-1, 0, -E])
    if bounded:
        places = torch.tensor([-7, E + 3, 5])
    backend = Backend(cpu="llvm", target="nvidia-h200", rest="eager")
    with torch.no_grad():
        got = torch.compile(chosen, backend=backend, dynamic=False)(x, places)
        torch.testing.assert_close(got, chosen(x, places), rtol=2e-2, atol=1e-1)
    assert len(experts_of(reports()[-1])) == 1


# The largest of few numbers.


def _largest(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    most, places = x.topk(3, -1)
    least, others = torch.topk(x, 2, dim=-1, largest=False)
    unordered = torch.topk(x, 4, -1, True, False)[0]
    return most, places, least, others, unordered.sum(-1)


@pytest.mark.parametrize("row", [[1.0] * 8, [float("-inf")] * 8, [float("nan"), *range(7)]])
def test_few_numbers_are_sorted_as_torch_chooses_them(row: list[float]) -> None:
    x = torch.stack([torch.tensor(row), torch.arange(8.0), torch.randn(8)])
    module = make_fx(_largest, tracing_mode="fake")(x)
    sort_short(module)
    targets = [each.target for each in module.graph.nodes]
    assert torch.ops.aten.topk.default not in targets
    for got, due in zip(module(x), _largest(x), strict=True):
        if got.dtype == torch.int64:  # of equal numbers any
            got, due = x.gather(-1, got), x.gather(-1, due)
        torch.testing.assert_close(got, due, equal_nan=True)


@pytest.mark.parametrize("choose", [lambda x: x.topk(2, 0), lambda x: x.repeat(1, 128).topk(2, -1)])
def test_others_are_left_to_torch(choose: Any) -> None:
    module = make_fx(lambda x: tuple(choose(x)), tracing_mode="fake")(torch.randn(3, 8))
    sort_short(module)
    assert torch.ops.aten.topk.default in [each.target for each in module.graph.nodes]


# Parts of a tensor.


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, *_, last = x.split(3, -1)
    one, _, three = x.split_with_sizes([1, 2, 1], 0)
    return first, last, one, three, *x.chunk(2, 1)


def test_parts_are_slices() -> None:
    x = torch.arange(32.0).reshape(4, 8)
    module = make_fx(_parts, tracing_mode="fake")(x)
    found = [each for node in module.graph.nodes if (each := part_of(node)) is not None]
    made = [torch.narrow(x, e.axis, e.begin, e.end - e.begin) for e in found]
    taken = list(_parts(x))
    assert all(any(torch.equal(each, other) for other in made) for each in taken)
