"""Products of one operand of more rows in torch's graphs, such as queries, keys and values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from cpu.torch.test_few_rows import check  # noqa: E402
from crossfuse.torch import Report  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_dynamo")]
K = 512


class Heads(nn.Module):
    """Products that make queries, keys and values, and what is made of these."""

    def __init__(self, bias: bool, *columns: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(K, each, bias=bias) for each in columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [each(x) for each in self.parts]
        return torch.cat([torch.softmax(each, -1) for each in made], -1)


def kernels(report: Report) -> list[tuple[str, ...]]:
    return [each.products for each in report.outcomes if each.name.startswith("crossfuse")]


@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    [((64, K), False, torch.bfloat16), ((2, 100, K), True, torch.float16)],
)
def test_they_are_one_launch(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    report = check(Heads(bias, 256, 64, 64), torch.randn(shape), dtype=dtype)
    names = [("mm", "mm_1", "mm_2"), ("addmm", "addmm_1", "addmm_2")]
    assert kernels(report) == [names[bias]]


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (64, (256,), torch.bfloat16),
        (2048, (64, 64), torch.bfloat16),
        (64, (64, 64), torch.float32),
    ],
)
def test_others_are_left_to_a_library(
    rows: int, columns: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert kernels(check(Heads(False, *columns), torch.randn(rows, K), dtype=dtype)) == []


def test_the_option_leaves_them() -> None:
    report = check(Heads(False, 256, 64, 64), torch.randn(64, K), products=False)
    assert kernels(report) == []
