"""Chains read off functions, against the specs and chains that the functions were made from."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cpu.planner.texts import TEXTS
from cpu.study.programs import random_program, shuffled
from crossfuse.planner.chain.build import chain_of
from crossfuse.workload import ids, lookup, parse, prim_func
from crossfuse.workload.expression import NAMED
from study.extract.chain import chain_from

#: Random functions. Seeds 545, 605, 677 and 724 are refused: quotients that TVM leaves as they are.
CASES = 40 * (10 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 1)


@pytest.mark.parametrize("name", [each for each in ids() if each[0] in "GSC"])
def test_functions_of_the_suites_have_the_chains_of_their_specs(name: str) -> None:
    spec = lookup(name)
    assert chain_from(prim_func(spec)) == chain_of(spec)


@pytest.mark.parametrize("text", TEXTS)
def test_functions_have_the_chains_of_their_specs(text: str) -> None:
    spec = parse(text)
    func = prim_func(spec)
    assert chain_from(func) == chain_of(spec)
    assert chain_from(shuffled(np.random.default_rng(0), func)) == chain_of(spec)


@pytest.mark.parametrize(
    "act", [*NAMED, "exp(x)/(1+x*x)", "sqrt(abs(x))/2", "erf(x)*erf(x)+tanh(1)"]
)
def test_functions_take_as_long_as_in_the_text(act: str) -> None:
    spec = parse(f"gated_ffn:M=8,K=4,N=6,L=10,dtype=float16,act={act}")
    assert chain_from(prim_func(spec)) == chain_of(spec)


@pytest.mark.parametrize("part", range(8))
def test_random_functions_have_the_chains_that_they_were_made_from(part: int) -> None:
    """Views of any shape, permuted blocks and parameters, names without a meaning."""
    for seed in range(part, CASES, 8):
        case = random_program(np.random.default_rng(seed))
        assert chain_from(case.func) == case.chain, seed


def test_random_functions_cover_what_chains_may_be() -> None:
    chains = [random_program(np.random.default_rng(seed)).chain for seed in range(40)]
    assert {len(each.products) for each in chains} == {1, 2, 3, 4}
    assert any("b" in each.extents for each in chains)
    assert any(len(product.rights) == 2 for each in chains for product in each.products[1:])
    assert any(len(product.further) > 2 for each in chains for product in each.products)
    batched = [
        [("b" in each.tensor(right).dims) for right in product.rights]
        for each in chains
        for product in each.products
        if "b" in each.extents
    ]
    assert any(all(each) for each in batched) and any(not any(each) for each in batched)
