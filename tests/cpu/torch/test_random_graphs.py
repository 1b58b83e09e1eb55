"""Random small models through the backend: as torch computes them, or left with a reason."""

from __future__ import annotations

from collections import deque

import pytest

torch = pytest.importorskip("torch")

from crossfuse.torch import Backend, reports  # noqa: E402
from random_models import ROWS, RandomModel, check  # noqa: E402

pytestmark = pytest.mark.cpu

#: Most are for the night.
SEEDS = [*range(8), *(pytest.param(each, marks=pytest.mark.nightly) for each in range(8, 300))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed: int) -> None:
    torch.compiler.reset()
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    x = torch.randn(ROWS, module.given).half()
    with torch.no_grad():
        backend = Backend(rest="eager", always=True, cpu="llvm")
        got = torch.compile(module, backend=backend)(x)
    check(got, module, x)
    report = reports()[-1]
    assert not report.reason
    assert all(each.name or each.text for each in report.outcomes)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(60))
def test_a_random_model_of_symbolic_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    backend = Backend(rest="eager", always=True, cpu="llvm", bins=(ROWS,))
    fn = torch.compile(module, backend=backend, dynamic=True)
    monkeypatch.setattr("crossfuse.torch.report._REPORTS", deque())
    for rows in (ROWS, 6, 30):  # all of a bin, some of it, more than it has
        x = torch.randn(rows, module.given).half()
        with torch.no_grad():
            got = fn(x)
        check(got, module, x)
    (report,) = reports()  # compiled once
    assert not report.reason
