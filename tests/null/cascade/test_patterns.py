"""The fifty-two patterns: derived from their plain definitions, or refused with the reason."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sympy

from cascade_patterns import PATTERNS
from cascade_patterns.pattern import LOGITS, Pattern, draw
from crossfuse.cascade.algebra import stages
from crossfuse.cascade.algebra.exponents import nonnegative
from crossfuse.cascade.algebra.separation import products, sample_rank
from crossfuse.cascade.run import merge_tree, stream, two_pass
from crossfuse.errors import CascadeRefused

FUSED = [each for each in PATTERNS if each.verdict in ("S", "S*", "V", "R")]
RANKED = [each for each in PATTERNS if each.verdict == "R"]
REFUSED = [each for each in PATTERNS if each.verdict == "N"]
LENGTHS = (1, 7, 33, 97)
#: By the names of stages, results and rows.
Results = dict[str, np.ndarray]


def _with_nan(values: np.ndarray, spread: list[bool]) -> np.ndarray:
    """Infinities of the rows that are not spread as NaN."""
    known = np.array(spread).reshape(-1, *[1] * (values.ndim - 1))
    return np.where(known | ~np.isinf(values), values, np.nan)


def agree(found: Results, wanted: Results, spread: list[bool]) -> None:
    for name, array in wanted.items():
        scale = np.max(np.abs(np.where(np.isfinite(array), array, 0)), initial=1.0)
        got, due = (_with_nan(each, spread) for each in (found[name], array))
        np.testing.assert_allclose(got, due, rtol=1e-9, atol=1e-11 * scale, err_msg=name)


def test_all_patterns_are_there() -> None:
    assert {each.number for each in PATTERNS} == set(range(1, 53))


@pytest.mark.parametrize("pattern", FUSED, ids=lambda each: each.id)
def test_streams_as_two_passes_do(pattern: Pattern) -> None:
    derivation = stages.derive(pattern.cascade)
    rng = np.random.default_rng(pattern.number)
    for length in (each for each in LENGTHS if each >= pattern.least):
        data = draw(pattern, rng, length)
        wanted = two_pass(pattern.cascade, data)
        # Of zeros, of what underflows to zeros, and of one element, separate passes divide by 0:
        # infinities that they sum are no number, and the sum that is divided is infinite.
        spread = [each not in ("zero", "tiny") and length > 1 for each in pattern.rows.split() * 2]
        assert not any(np.isnan(each[spread]).any() for each in wanted.values())
        for tile in (1, 7, 32, length):
            agree(stream(derivation, data, tile), wanted, spread)
        third, fifth = length // 3, length // 5
        for parts in ([third, 0, length - third - fifth, fifth], [0, 0, length, 0]):
            agree(merge_tree(derivation, data, parts, tile=7), wanted, spread)


@pytest.mark.parametrize("pattern", FUSED, ids=lambda each: each.id)
def test_is_derived_in_two_seconds(pattern: Pattern) -> None:
    start = time.process_time()
    derivation = stages._derive(pattern.cascade)
    assert time.process_time() - start < 2
    assert derivation.exact == (pattern.number != 38)
    assert [each.stage for each in derivation.steps] == [
        each.name for each in pattern.cascade.stages
    ]


@pytest.mark.parametrize("pattern", RANKED, ids=lambda each: each.id)
def test_rank_is_as_marked(pattern: Pattern) -> None:
    name, rank = pattern.rank
    stages = pattern.cascade.stages
    results = {
        each.symbol: sympy.Dummy(each.name, nonnegative=nonnegative(each.term) or None, real=True)
        for each in stages
    }
    term = pattern.cascade.stage(name).term.xreplace(results)
    used = [each for each in results.values() if each in term.free_symbols]
    elements = [each for each in pattern.cascade.elements if each in term.free_symbols]
    assert len(products(term, elements, used)) == rank
    assert sample_rank(term, elements, used) == rank


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda each: each.id)
def test_is_refused_with_the_reason(pattern: Pattern) -> None:
    with pytest.raises(CascadeRefused) as caught:
        stages.derive(pattern.cascade)
    assert caught.value.refusal.rule == pattern.refusal[0]
    for part in pattern.refusal:
        assert part in str(caught.value)


def test_what_is_outside_is_no_cascade() -> None:
    outside = [each.number for each in PATTERNS if each.verdict == "outside"]
    assert outside == [46, 47]
    assert all(each.cascade is None for each in PATTERNS if each.verdict == "outside")
    assert LOGITS.split()[-1] == "masked"
