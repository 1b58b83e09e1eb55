"""Random small models through Relax: chains and cascades fused, or left with a reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crossfuse import compile_model  # noqa: E402
from random_models import ROWS, RandomModel, check  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
#: Most are for the night.
#: 145 ends with a tanh of small numbers, which TVM alone computes five times as wrong as torch.
SEEDS = [
    *(0, 1, 145),
    *(pytest.param(each, marks=pytest.mark.nightly) for each in range(2, 300) if each != 145),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model(seed: int) -> None:
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    x = torch.randn(ROWS, module.given).half()
    fn = compile_model(module, (x,), always=True, runs_on="llvm")
    got = fn(x)
    check(got if isinstance(got, tuple) else (got,), module, x)
    assert all(each.name or each.text for each in fn.report.chains)
    assert all(each.form or each.reason for each in fn.report.cascades)
