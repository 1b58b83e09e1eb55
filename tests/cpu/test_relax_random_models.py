"""Random small models through Relax: chains and cascades fused, or left with a reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from crossfuse import compile_model  # noqa: E402
from random_models import ROWS, RandomModel, check, in_two  # noqa: E402

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


@pytest.mark.slow
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


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_a_random_model_of_symbolic_rows(seed: int) -> None:
    torch.manual_seed(seed)
    module = RandomModel(seed).half().eval()
    module.steps = [(kind, abs if f is in_two else f, places) for kind, f, places in module.steps]
    given = (torch.randn(8, module.given).half(),)
    shapes = ({0: torch.export.Dim("rows", max=40)},)
    program = torch.export.export(module, given, dynamic_shapes=shapes)
    fn = compile_model(program, always=True, bins=(16, 32), runs_on="llvm")
    for rows in (1, 7, 16, 17, 40):
        x = torch.randn(rows, module.given).half()
        got = fn(x)
        check(got if isinstance(got, tuple) else (got,), module, x)
    assert all(each.name or each.text for each in fn.report.chains)
