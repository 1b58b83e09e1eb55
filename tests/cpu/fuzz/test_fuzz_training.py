"""Functions of rows and their gradients by autograd, of rows that separate kernels bear.

Rows are far from 0, nearly or exactly equal, very large, very small, or have one outlier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from cpu.fuzz.functions import TRAINED, TRAINED_QUICK, Function, Rows  # noqa: E402
from cpu.fuzz.test_fuzz_functions import LENGTH, ROWS, errors, tensors  # noqa: E402
from crossfuse import compile_model  # noqa: E402
from torch_functions import Of  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

KINDS = (
    *("usual", "1e4 +- 1", "1e4 +- 1e-2", "all 100.3", "zeros", "1e-3", "1e-30", "denormals"),
    *("1e13", "1e30", "1e35", "50", "alternating", "an outlier of 1e4", "an outlier of 1e30"),
)
#: Exponents of what 50 apart are rounded as far as they are from 0, see `test_fuzz_functions`.
UNITS = 64
#: Products of several sums, of which some are infinite from 1e30 on where others are 0.
BEYOND = ("largest of weighted scores", "noise")
NAMES = [
    pytest.param(each, id=each, marks=() if each in TRAINED_QUICK else pytest.mark.nightly)
    for each in TRAINED
]


def drawn(seed: int, dtype: Any) -> Rows:
    rng = np.random.default_rng(seed)

    def normal() -> Any:
        return rng.standard_normal((ROWS, LENGTH))

    signs = np.where(np.arange(LENGTH) % 2, 1, -1)
    rows = [normal(), 1e4 + normal(), 1e4 + 1e-2 * normal(), 0 * normal() + 100.3, 0 * normal()]
    rows += [scale * normal() for scale in (1e-3, 1e-30, 1e-40, 1e13, 1e30, 1e35, 50)]
    rows += [signs * (1e3 + normal()), normal(), normal()]
    rows[-2][:, 17], rows[-1][:, 17] = 1e4, 1e30
    count = ROWS * len(KINDS)
    shape = (count, LENGTH)
    at = rng.integers(0, LENGTH, count)
    return Rows(
        x=torch.from_numpy(np.concatenate(rows)).to(dtype),
        y=torch.from_numpy(rng.standard_normal(shape)).to(dtype),
        w=torch.from_numpy(np.eye(LENGTH)[at]).to(dtype),
        v=torch.from_numpy(rng.uniform(0.1, 2, shape)).to(dtype),
        t=torch.from_numpy(rng.uniform(0.01, 2, (count, 1))).to(dtype),
        seen=torch.from_numpy(rng.random(shape) < 0.6),
        at=torch.from_numpy(at),
    )


def wide(given: list[Any]) -> list[Any]:
    return [each.double() if each.is_floating_point() else each for each in given]


def gradient(function: Function, given: list[Any], cotangent: Any) -> Any:
    """A graph of the gradient by x, of what is given of the result and the tensors."""

    def pulled(cotangent: Any, x: Any, *rest: Any) -> Any:
        return torch.func.vjp(lambda x: function(Rows(x, *rest)), x)[1](cotangent)[0]

    return make_fx(pulled)(cotangent, *given)


def check(named: str, graph: Any, exact: Any, given: list[Any]) -> None:
    """Each kind of rows errs at most twice as much as with separate kernels, and is a number."""
    fn = compile_model(Of(graph).eval(), tuple(given), always=True, runs_on="llvm")
    dtype, due = given[0].dtype, exact(*wide(given))
    # Of 16 bits some roundings that functions ask for are left to kernels of their own.
    assert dtype != torch.float32 or any(each.form for each in fn.report.cascades)
    with np.errstate(all="ignore"):
        got, apart = fn(*given), graph(*given)
    known = due.isfinite() & apart.isfinite() & (due.abs() <= torch.finfo(dtype).max)
    if named not in BEYOND:
        gone = (known & ~got.isfinite()).reshape(len(KINDS), -1).any(1)
        assert not gone.any(), [kind for kind, none in zip(KINDS, gone, strict=True) if none]
    due = torch.where(known, due, torch.nan)
    size = errors(torch.zeros_like(due), due)
    unfused, fused = errors(apart, due), errors(got, due)
    allowed = 2 * unfused + UNITS * torch.finfo(dtype).eps * size + 1e-37
    held = torch.where(size == 0, dtype == torch.float32, unfused <= 0.3 * size)
    lost = ~(fused <= allowed) & held
    assert not lost.any(), [
        f"{kind}: {float(one):.2g} of {float(of):.2g}, separate kernels {float(other):.2g}"
        for kind, bad, one, other, of in zip(KINDS, lost, fused, unfused, size, strict=True)
        if bad
    ]


DTYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, dtype: Any) -> None:
    def forward(*given: Any) -> Any:
        return TRAINED[name](Rows(*given))

    check(name, forward, forward, tensors(drawn(0, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str, dtype: Any) -> None:
    function, given = TRAINED[name], tensors(drawn(0, dtype))
    shape = function(Rows(*given)).shape
    rng = np.random.default_rng(1)
    cotangent = torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype)
    graph = gradient(function, given, cotangent)
    exact = gradient(function, wide(given), cotangent.double())
    check(name, graph, exact, [cotangent, *given])
