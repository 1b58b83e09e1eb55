"""Ordinary models leave standard error alone: TVM's C++ has nothing to complain of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossfuse

PLACES = torch.tensor([[2, 0], [1, -1]])


class Put(nn.Module):
    """Values into places of a buffer, some dimensions left out."""

    def __init__(self, *places: Any, shape: tuple[int, ...], accumulate: bool = False) -> None:
        super().__init__()
        self.places, self.shape, self.accumulate = places, shape, accumulate

    def forward(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(x, list(self.places), values, self.accumulate) * 1.0


class Words(nn.Module):
    """An embedding, and the last word of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words)[:, -1] + self.table(words[:, 0])


PUTS = {
    "rows": (Put(PLACES[0], shape=(3, 4)), (2, 4)),
    "places of two dimensions": (Put(PLACES, shape=(3, 4)), (2, 2, 4)),
    "a dimension left out in front": (Put(None, PLACES[0], shape=(3, 4)), (3, 2)),
    "one behind": (Put(PLACES[0], None, shape=(3, 4)), (2, 4)),
    "one between": (Put(PLACES[0], None, PLACES[1], shape=(3, 4, 5)), (2, 4)),
    "a number for all": (Put(None, PLACES[0], shape=(3, 4)), ()),
    "added": (Put(PLACES[0], PLACES[1], shape=(3, 4), accumulate=True), (2,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUTS)
def test_values_are_put_where_torch_puts_them(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    module, shape = PUTS[name]
    given = (torch.randn(module.shape), torch.randn(shape))
    fn = crossfuse.compile_model(module.eval(), given, runs_on="llvm")
    torch.testing.assert_close(fn(*given), module(*given))
    assert capfd.readouterr().err == ""


def test_words_of_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    module, words = Words().eval(), torch.randint(0, 16, (2, 5))
    fn = crossfuse.compile_model(module, (words,), runs_on="llvm")
    with torch.no_grad():
        torch.testing.assert_close(fn(words), module(words))
    assert capfd.readouterr().err == ""


def test_a_norm_that_tvm_has_not_in_bfloat16(capfd: pytest.CaptureFixture[str]) -> None:
    """It is looked at in float32."""
    norm, x = nn.LayerNorm((4, 8)).bfloat16().eval(), torch.randn(2, 3, 4, 8).bfloat16()
    with torch.no_grad():
        fn = crossfuse.compile_model(norm, (x,), runs_on="llvm")
        torch.testing.assert_close(fn(x), norm(x), rtol=0.01, atol=0.01)
    assert "remaining blocks" not in capfd.readouterr().err


class Cache(nn.Module):
    """Rows written into a cache of many more, and every third column of another tensor."""

    def forward(self, cache: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> Any:
        cache, x = cache.clone(), x.clone()
        cache[3:5], x[:, 1:-1:3] = rows, rows.sum()
        return cache * 2, x.relu()


def test_a_few_rows_of_a_large_cache(capfd: pytest.CaptureFixture[str]) -> None:
    """TVM's own reads the rows wherever the cache has some, far behind their end."""
    given = (torch.zeros(1 << 20, 16), torch.randn(2, 16), torch.randn(6, 13))
    fn = crossfuse.compile_model(Cache().eval(), given, runs_on="llvm")
    torch.testing.assert_close(fn(*given), Cache()(*given))
    assert capfd.readouterr().err == ""


def test_an_operator_that_the_importer_fails_on(capfd: pytest.CaptureFixture[str]) -> None:
    """What is tried undecomposed first, and what is refused, ends what it began."""
    with pytest.raises(crossfuse.RefusedError, match="torch-import"):
        crossfuse.compile_model(_Unknown().eval(), (torch.randn(4, 4),), runs_on="llvm")
    assert "remaining blocks" not in capfd.readouterr().err


class _Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(torch.relu(x)).real
