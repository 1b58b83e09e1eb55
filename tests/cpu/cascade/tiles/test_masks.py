"""Masks and scores of all kinds, in tiles that do not fit, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.cascade.tiles.forms import Compiled, run, scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference

pytestmark = pytest.mark.cpu

CASES = {
    "full": Masked(),
    "causal": Masked(causal=True),
    "causal, fewer keys than rows": Masked(rows=11, keys=6, causal=True),
    "window": Masked(causal=True, window=3),
    "window that ends before the first row": Masked(rows=12, keys=5, causal=True, window=2),
    "blocks": Masked(rows=12, keys=12, block=5),
    "softcap": Masked(cap=2.0, causal=True),
    "slopes": Masked(alibi=True, causal=True),
    "lengths": Masked(heads=4, lengths=True),
    "documents": Masked(documents=True, causal=True),
    "table": Masked(table=True),
    "bias": Masked(bias=True),
    "shared heads": Masked(heads=4, share=2, causal=True),
    "shared heads, one query": Masked(heads=6, share=3, rows=1, lengths=True),
    "everything": Masked(
        heads=4, share=2, causal=True, window=7, cap=3.0, alibi=True, lengths=True, table=True
    ),
    "one key": Masked(keys=1),
    "float32": Masked(causal=True, dtype="float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_masked_attention_is_what_numpy_computes(name: str) -> None:
    case = CASES[name]
    compute = Compiled(scheduled(function(case), rows=4, elements=3))
    for seed, size in ((0, 1.0), (1, 40.0)):
        given = inputs(case, seed, size)
        out = compute(given)["out"].astype(np.float64)
        exact, separate = (reference(case, given, each) for each in (np.float64, np.float32))
        ulp = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-20
        allowed = 2 * np.abs(separate - exact).max() + ulp * np.abs(exact) + 1e-30
        assert np.all(np.isfinite(out))
        assert np.all(np.abs(out - exact) <= allowed)


def test_rows_without_keys_are_zero() -> None:
    case = CASES["lengths"]
    given = inputs(case)
    out = run(scheduled(function(case), rows=4, elements=4), given)["out"].astype(np.float32)
    assert given["length"][0] == 0
    assert not out[0].any()
    assert out[1:].any()


@pytest.mark.parametrize("cluster", [2, 3])
@pytest.mark.parametrize("name", ["causal", "lengths", "everything", "one key"])
def test_masked_attention_merges(name: str, cluster: int) -> None:
    """CTAs whose keys are all masked bring nothing."""
    case = CASES[name]
    given = inputs(case)
    out = run(scheduled(function(case), rows=4, elements=2, cluster=cluster), given)["out"]
    exact, separate = (reference(case, given, each) for each in (np.float64, np.float32))
    allowed = 2 * np.abs(separate - exact).max() + 2.0**-8 * np.abs(exact)
    assert np.all(np.abs(out.astype(np.float64) - exact) <= allowed)
