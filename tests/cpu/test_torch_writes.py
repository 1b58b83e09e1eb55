"""Models that write to views, and arithmetic of truth values, through `compile_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import crossfuse  # noqa: E402
from crossfuse.errors import WorkloadRefused  # noqa: E402

pytestmark = pytest.mark.cpu

Function = Callable[[Any], Any]


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Results of functions, each of a tensor of its own."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Any) -> tuple[Any, ...]:
        return tuple(each(x * 1.0) for each in self.functions)


def columns_scaled(h: Any) -> Any:
    h[:, ::2].mul_(3.0)
    return h


def rows_moved(h: Any) -> Any:
    h[1:] = h[:-1].clone()
    return h


def last_columns(h: Any) -> Any:
    h[:, -3:].add_(1)
    return h


def one_row(h: Any) -> Any:
    h[2].zero_()
    h[-1] = h[0]
    return h


def flat(h: Any) -> Any:
    h.view(-1)[5:20].fill_(7)
    h.t()[1] = 4.0
    return h


def view_of_a_view(h: Any) -> Any:
    h[:, ::2][1:4].mul_(2)
    h.reshape(3, 3, 8)[:, 1].neg_()
    return h


def columns_added(h: Any) -> Any:
    h[:, 1::2] += h[:, ::2]
    left, right = h.chunk(2, 1)
    left.add_(right)
    return h


def placed(h: Any) -> Any:
    made = torch.zeros(9, 8)
    made[:, :4] = h[:, 4:]
    made[::2, 1] = h[::2, 0]
    made[h > 0] = 0.5
    return made


def diagonal(h: Any) -> Any:
    """Torch's own decomposition of it asserts that it does not write, and does."""
    h.diagonal()[1:].fill_(3)
    return h


def read_before_and_after(h: Any) -> Any:
    before, top = h.sum(), h[0]
    h[0].mul_(2.0).relu_()
    return before + top + h[1]


WRITES = (
    *(columns_scaled, rows_moved, last_columns, one_row, flat, view_of_a_view),
    *(columns_added, placed, diagonal, read_before_and_after),
)
TRUTHS: tuple[Function, ...] = (
    lambda h: (h > 0) * (h < 1),
    lambda h: (h > 0) + (h > 1),
    lambda h: torch.maximum(h > 0, h > 1),
    lambda h: torch.minimum(h > 0, h < 1),
    lambda h: (h > 0) <= (h > 1),
    lambda h: (h > 0).amax(-1),
    lambda h: torch.where((h > 0) * True, h, -torch.inf).softmax(-1),
    lambda h: (h > 0) * 2 + (h > 1) * h,
)


@pytest.mark.slow
@pytest.mark.parametrize("functions", [WRITES, TRUTHS], ids=["writes", "truths"])
def test_as_torch(functions: tuple[Function, ...]) -> None:
    model, x = Model(*functions).eval(), torch.randn(9, 8)
    compiled = crossfuse.compile_model(model, (x,), runs_on="llvm")
    for function, found, expected in zip(functions, compiled(x), model(x), strict=True):
        assert found.dtype == expected.dtype
        where = getattr(function, "__name__", "")
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, err_msg=where)


def test_activations_in_place_are_fused() -> None:
    nn = torch.nn
    layers = [nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)]
    model, x = nn.Sequential(*layers, nn.Linear(64, 32)).half().eval(), torch.randn(16, 32).half()
    compiled = crossfuse.compile_model(model, (x,), always=True, runs_on="llvm")
    assert len(compiled.report.fused) == 1
    with torch.no_grad():
        expected = model(x).numpy()
    np.testing.assert_allclose(compiled(x).numpy(), expected, atol=2e-3)


class Counter(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.seen.add_(x.sum(0))
        return x + self.seen


class Doubled(torch.nn.Module):  # type: ignore[misc,name-defined]
    def forward(self, x: Any) -> Any:
        return x.view(-1).mul_(2)


@pytest.mark.parametrize("model", [Counter(), Doubled()], ids=["a buffer", "an input"])
def test_writes_that_would_be_lost_are_refused(model: Any) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        crossfuse.compile_model(model.eval(), (torch.randn(4, 8),), runs_on="llvm")
    assert str(caught.value) == (
        "torch-import: graph: found a write to an input, a buffer or a parameter of the module; "
        "limit: writes to what the module makes itself. Instead: write to a clone, and return "
        "what shall be kept."
    )


def test_what_tvm_does_not_build_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Traceback\n  frame of C++\nCannot decide min_value")

    monkeypatch.setattr("tvm.relax.build", fails)
    with pytest.raises(WorkloadRefused) as caught:
        crossfuse.compile_model(torch.nn.ReLU().eval(), (torch.randn(4, 8),), runs_on="llvm")
    assert "found a failure of TVM: Cannot decide min_value; limit: operators that TVM builds" in (
        str(caught.value)
    )
