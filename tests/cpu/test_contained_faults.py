"""A fault of ours leaves the group that it is in, and not the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import crossfuse
from crossfuse.errors import FaultWarning

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cpu


class Rows(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return torch.softmax(x, -1)


@pytest.mark.parametrize(
    ("place", "columns"), [("detect", 40), ("derive", 41), ("ranked_cascade", 42)]
)
@pytest.mark.filterwarnings("default::crossfuse.errors.FaultWarning")
def test_the_model_is_right_and_the_report_says_so(
    place: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("all the input arrays must have the same shape")

    monkeypatch.setattr(f"crossfuse.relax.cascades.kernels.{place}", broken)
    x = torch.randn(3, columns)  # of equal functions only one is looked at
    with pytest.warns(FaultWarning, match="a fault of Crossfuse, ValueError: all the input"):
        model = crossfuse.compile_model(Rows().eval(), example_inputs=(x,), runs_on="llvm")
    np.testing.assert_allclose(np.asarray(model(x)), torch.softmax(x, -1), rtol=1e-5)
    (outcome,) = model.report.cascades
    assert "found a fault of Crossfuse, ValueError" in outcome.reason
    assert "Instead: nothing need be done" in outcome.reason
