"""Models that outlining refuses, word by word; none may become a wrong function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from crossfuse.errors import WorkloadRefused  # noqa: E402
from crossfuse.relax import import_torch  # noqa: E402
from crossfuse.relax.outline import outline  # noqa: E402
from crossfuse.workload.dtypes import FLOAT_TYPES  # noqa: E402

TYPES = ", ".join(FLOAT_TYPES)
LAYERS = "A @ B or A @ B_gate and A @ B_up, then element-wise, then @ D, and so on"
KNOWN = "matrix products by weights, element-wise operators, casts and reshapes"
ALONE = "outline the feed-forward part alone"
NOTHING = "leave it to a library, there is nothing to fuse"


def reduces(name: str) -> str:
    return f"{name}: found an operator that reduces over an axis; limit: {KNOWN}. Instead: {ALONE}."


def moves(name: str) -> str:
    fault = "an operator that moves elements or depends on their place"
    return f"{name}: found {fault}; limit: {KNOWN}. Instead: {ALONE}."


def layers() -> Any:
    """Layers of fitting widths under short names."""
    parts = {name: nn.Linear(16, 24) for name in ("a", "c", "d")}
    parts |= {name: nn.Linear(16, 16) for name in ("q", "k", "v")}
    parts |= {"b": nn.Linear(24, 16), "norm": nn.LayerNorm(24), "conv": nn.Conv1d(4, 4, 1)}
    module = nn.ModuleDict(parts)
    module.w, module.some_rows = (nn.Parameter(torch.ones(*s)) for s in ((16, 24), (4, 24)))
    return module


MODELS: dict[str, tuple[Callable[..., Any], str]] = {
    "attention": (
        lambda t, m, x: t.nn.functional.scaled_dot_product_attention(
            *(m[name](x)[:, None] for name in "qkv")
        ),
        reduces("relax.nn.attention"),
    ),
    "scores": (
        lambda t, m, x: (m.q(x) @ m.k(x).transpose(1, 2)) @ m.v(x),
        "relax.matmul (lv7): found a right-hand side that is computed by relax.permute_dims; "
        "limit: weights stored as matrices. Instead: prepare the weight outside.",
    ),
    "convolution": (lambda t, m, x: m.conv(x), reduces("relax.nn.conv1d")),
    "norm": (lambda t, m, x: m.b(m.norm(m.a(x))), reduces("relax.nn.layer_norm")),
    "softmax": (lambda t, m, x: m.b(m.a(x).softmax(-1)), reduces("relax.nn.softmax")),
    "flip": (lambda t, m, x: m.b(m.a(x).flip(-1)), moves("relax.flip")),
    "triangle": (lambda t, m, x: m.b(m.a(x).triu()), moves("relax.triu")),
    "slice": (lambda t, m, x: m.b(m.a(x))[:, :2] * 1, moves("relax.strided_slice")),
    "split": (
        lambda t, m, x: m.b(t.cat(m.a(x).chunk(2, -1), -1)),
        "relax.split: found several results; limit: one tensor. "
        "Instead: replace the operator by one with one result.",
    ),
    "two results": (
        lambda t, m, x: (m.b(m.a(x).relu()), x),
        "main: found several results; limit: one output. Instead: return one tensor.",
    ),
    "gates of two values": (
        lambda t, m, x: m.b(m.a((h := m.q(x)).relu()) + m.c(h)),
        "relax.matmul (lv8): found products of different inputs, lv3 and lv2; "
        f"limit: {LAYERS}. Instead: join the inputs, or split the graph.",
    ),
    "products of two layers multiplied": (
        lambda t, m, x: m.b(m.a(m.q(x).relu()) * m.c(x)),
        "relax.matmul (lv8): found products of one layer that are made of different products; "
        f"limit: {LAYERS}. Instead: outline fewer layers at a time.",
    ),
    "an intermediate of three layers used twice": (
        lambda t, m, x: m.b(m.a(h := m.q(x).relu()).relu()) + h,
        "relax.add (gv): found an intermediate used twice, by the next product and by relax.add; "
        "limit: an intermediate that nothing else reads. "
        "Instead: keep that use out of the graph, or leave the model unfused.",
    ),
    "one layer": (
        lambda t, m, x: m.a(x).relu(),
        f"main: found one matrix product; limit: {LAYERS}. Instead: {NOTHING}.",
    ),
    "no layer": (
        lambda t, m, x: x.relu(),
        f"main: found no matrix product; limit: {LAYERS}. Instead: {NOTHING}.",
    ),
    "parallel layers": (
        lambda t, m, x: m.a(x) * m.c(x),
        f"main: found 2 products that do not feed each other; limit: {LAYERS}. Instead: {NOTHING}.",
    ),
    "three gates": (
        lambda t, m, x: m.b(m.a(x) * m.c(x) * m.d(x)),
        f"relax.matmul (lv8): found 3 products of the input; limit: {LAYERS}. "
        "Instead: join their weights, or split the graph.",
    ),
    "intermediate used twice": (
        lambda t, m, x: m.k(h := m.q(x).relu()) + h,
        "relax.add (gv): found an intermediate used twice, by the second product and by relax.add; "
        "limit: an intermediate that nothing else reads. "
        "Instead: keep that use out of the graph, or leave the model unfused.",
    ),
    "two second layers": (
        lambda t, m, x: m.k(h := m.q(x).relu()) * m.v(h),
        "relax.matmul (lv8): found an intermediate used twice, by 2 matrix products; "
        f"limit: {LAYERS}. Instead: outline one of the products.",
    ),
    "skipped layer": (
        lambda t, m, x: m.b(m.a(x).relu()) + m.q(x),
        "relax.matmul (lv8): found a product that the second layer does not read; "
        f"limit: {LAYERS}. Instead: leave that product out.",
    ),
    "changed input": (
        lambda t, m, x: m.b(m.a(2 * x).relu()),
        "relax.matmul (lv2): found an input changed by relax.multiply before the first product; "
        "limit: an input taken as it is. Instead: apply that operator outside the graph.",
    ),
    "computed weight": (
        lambda t, m, x: m.b((x @ (2 * m.w)).relu()),
        "relax.matmul (lv1): found a right-hand side that is computed by relax.multiply; "
        "limit: weights stored as matrices. Instead: prepare the weight outside.",
    ),
    "some rows": (
        lambda t, m, x: m.b(m.a(x) + m.some_rows),
        "p_m_some_rows: found the shape [4, 24]; limit: one value per column, or one for each of "
        "the 8 rows. Instead: broadcast it to all rows beforehand.",
    ),
    "mixed columns": (
        lambda t, m, x: m.a(x).relu().reshape(2, 6, 16) @ m.w,
        "relax.matmul (gv): found a left-hand side reshaped from [2, 4, 24] to [2, 6, 16]; "
        "limit: rows kept whole. Instead: reshape outside the graph.",
    ),
    "turned output": (
        lambda t, m, x: m.b(m.a(x).relu()).transpose(1, 2),
        "relax.permute_dims: found a transposition of [2, 4, 16]; limit: rows that stay rows. "
        "Instead: transpose outside the graph.",
    ),
    "truth": (
        lambda t, m, x: m.b(m.a(x).relu()) > 0,
        f"the output: found bool; limit: {TYPES}. Instead: cast the output outside.",
    ),
    "double": (
        lambda t, m, x: m.b(m.a(x).double().relu().float()),
        "relax.astype: found float64; limit: at most float32, which sums are kept in. "
        "Instead: convert the model to float32 or less.",
    ),
    "half": (
        lambda t, m, x: m.b(m.a(x).half().float().relu()),
        "relax.astype: found a cast to float16 between values of float32; limit: types that lose "
        "no more than these, as only what is stored is rounded. "
        "Instead: leave the model unfused, or round by arithmetic.",
    ),
    "doubling": (
        lambda t, m, x: m.b(doubled(m.a(x), 14)),
        "main: found an expression that repeats its operands 4374 times or more; "
        "limit: 4096 repetitions. Instead: leave the model unfused.",
    ),
}


def doubled(value: Any, times: int) -> Any:
    for _ in range(times):
        value = value * value + value
    return value


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.m, self.function = layers(), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(torch, self.m, x)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_torch_model_is_refused(name: str) -> None:
    function, message = MODELS[name]
    mod = import_torch(Model(function).eval(), [torch.randn(2, 4, 16)]).mod
    with pytest.raises(WorkloadRefused) as caught:
        outline(mod)
    assert str(caught.value) == f"outline: {message}"
