"""Functions of rows in a compiled model: errors of fused kernels are at most twice torch's own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cpu.fuzz.functions import FUNCTIONS, PLACED, QUICK, Function, Rows  # noqa: E402
from crossfuse import compile_model  # noqa: E402

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

#: Elements of a row, and rows of each kind; errors are held against the largest of a kind.
LENGTH, ROWS = 96, 3
PLACES = tuple(
    (about, spread) for about in (0.0, 1.0, 1e2, 1e4, 1e5) for spread in (1e-3, 1.0, 1e3)
)
#: Elements that are all the same.
LEVELS = (0.1, 100.3, 0.0)
#: Results below this are made of probabilities that are.
FAINT = 1e-20
#: Orders of the elements, in which separate kernels may sum as well.
ORDERS = 3
NAMES = [
    pytest.param(each, id=each, marks=() if each in QUICK else pytest.mark.nightly)
    for each in FUNCTIONS
]


class Of(torch.nn.Module):
    """A function of tensors as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(Rows(*given))


def drawn(seed: int, dtype: Any) -> Rows:
    rng = np.random.default_rng(seed)

    def rows() -> Any:
        found = [about + spread * rng.standard_normal((ROWS, LENGTH)) for about, spread in PLACES]
        found += [np.full((ROWS, LENGTH), level) for level in LEVELS]
        return torch.from_numpy(np.concatenate(found)).to(dtype)

    count = ROWS * (len(PLACES) + len(LEVELS))
    shape = (count, LENGTH)
    return Rows(
        x=rows(),
        y=rows(),
        w=torch.from_numpy(rng.uniform(0.1, 2, shape)).to(dtype),
        v=torch.from_numpy(rng.standard_normal(shape)).to(dtype),
        t=torch.from_numpy(rng.uniform(0.01, 2, (count, 1))).to(dtype),
        seen=torch.from_numpy(rng.random(shape) < 0.6),
        at=torch.from_numpy(rng.integers(0, LENGTH, count)),
    )


def tensors(rows: Rows) -> list[Any]:
    return [getattr(rows, each.name) for each in fields(rows)]


def errors(got: Any, exact: Any) -> Any:
    """Of each kind the largest error, by the norm of a row; none where it is no number."""
    apart = (got.double() - exact).reshape(len(exact), -1)
    return (
        torch.where(exact.reshape(apart.shape).isfinite(), apart, 0)
        .norm(dim=1)
        .reshape(-1, ROWS)
        .amax(1)
    )


def separate(model: Of, given: list[Any], moved: bool) -> list[Any]:
    """What torch's kernels give, with elements in several orders."""
    found, rng = [model(*given)], np.random.default_rng(5)
    for _ in range(ORDERS if moved else 0):
        order = torch.from_numpy(rng.permutation(LENGTH))
        along = [each.dim() == 2 and each.shape[1] == LENGTH for each in given]
        rows = [e[:, order] if a else e for e, a in zip(given, along, strict=True)]
        result = model(*rows)
        found.append(result[:, order.argsort()] if result.dim() == 2 else result)
    return found


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="float32"),
        pytest.param(torch.bfloat16, id="bfloat16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_as_exact_as_torch(name: str, dtype: Any) -> None:
    given = tensors(drawn(0, dtype))
    model = Of(FUNCTIONS[name]).eval()
    fn = compile_model(model, tuple(given), always=True, runs_on="llvm")
    assert any(each.form for each in fn.report.cascades)
    exact = model(*(each.double() if each.is_floating_point() else each for each in given))
    with np.errstate(all="ignore"):
        unfused = torch.stack(
            [errors(each, exact) for each in separate(model, given, name not in PLACED)]
        ).amax(0)
    size = errors(torch.zeros_like(exact), exact)
    # A probability of e**-60 has the rounding of its exponent, which kernels multiply by log2(e).
    units = torch.where(size < FAINT, 64, 4)
    allowed = 2 * unfused + units * torch.finfo(dtype).eps * size + 1e-37
    # Where separate kernels have no digit there is nothing to hold to; nor where elements of 16
    # bits are all the same, by the luck of a rounding.
    held = torch.where(size == 0, dtype == torch.float32, unfused <= 0.3 * size)
    lost = (errors(fn(*given), exact) > allowed) & held
    kinds = [f"{about:g} +- {spread:g}" for about, spread in PLACES] + [f"{e:g}" for e in LEVELS]
    assert not lost.any(), [kind for kind, bad in zip(kinds, lost.tolist(), strict=True) if bad]
