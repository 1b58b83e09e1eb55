"""The cost model: terms that add up, and that grow with what they are about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfuse.planner.cost.estimate import alone, eager, estimate, overlapped
from crossfuse.planner.cost.rates import Fitted, rates_from, rates_of
from crossfuse.planner.cost.terms import TERMS
from crossfuse.planner.families import EAGER
from crossfuse.planner.families.registry import families
from crossfuse.planner.kernels.shape import count, select
from null.planner.test_kernels import CASES, H100, shape, some
from study.compare_spaces import read_measured
from study.fit import Sample, fit, predict, rank_correlation, report
from study.grow import rows_of, without_eager

RATES = rates_of(H100)
MEASURED = Path(__file__).parents[3] / "benchmarks/results/candidates-h100.jsonl"


def samples() -> list[Sample]:
    found = []
    for each in read_measured([MEASURED]):
        given, time = each.candidate, each.microseconds
        if time and not each.disturbed:
            tiles = dict(given.tiles)
            found.append(Sample(given.spec, shape(given.spec), given.family, tiles, time))
    return found


@pytest.mark.parametrize(("text", "family"), CASES)
def test_terms_add_up_and_arrays_are_numbers(text: str, family: str) -> None:
    of, kernels = shape(text), some(text, family)
    if not count(kernels):
        return
    many = estimate(kernels, of, H100, RATES)
    assert set(many.terms) <= set(TERMS)
    total = np.broadcast_to(many.microseconds, (count(kernels),))
    for index in range(count(kernels)):
        one = estimate(select(kernels, index), of, H100, RATES)
        assert total[index] == pytest.approx(float(one.microseconds))
        assert sum(map(float, one.terms.values())) == pytest.approx(float(one.microseconds))
        assert min(map(float, one.terms.values())) >= -1e-9
        assert one.bound in ("hbm", "l2", "ingest", "tensor", "latency")


@pytest.mark.parametrize(("text", "family"), CASES)
@pytest.mark.parametrize("name", ["hbm_read", "l2_read", "l2_write", "sm_ingest"])
def test_faster_streams_never_cost_more(text: str, family: str, name: str) -> None:
    of, kernels = shape(text), some(text, family)
    if not count(kernels):
        return
    of_device = replace(RATES.measured, **{name: 2 * getattr(RATES.measured, name)})
    faster = replace(RATES, measured=of_device)
    before = np.asarray(estimate(kernels, of, H100, RATES).microseconds)
    assert np.all(np.asarray(estimate(kernels, of, H100, faster).microseconds) <= before + 1e-9)


@pytest.mark.parametrize(("text", "family"), CASES)
def test_longer_latencies_never_cost_less(text: str, family: str) -> None:
    of, kernels = shape(text), some(text, family)
    if not count(kernels):
        return
    before = np.asarray(estimate(kernels, of, H100, RATES).microseconds)
    for name in ("start", "store", "exchange", "sums", "column", "copy"):
        fitted = replace(RATES.fitted, **{name: 2 * getattr(RATES.fitted, name)})
        after = estimate(kernels, of, H100, replace(RATES, fitted=fitted)).microseconds
        assert np.all(np.asarray(after) >= before - 1e-9), name


def test_a_large_layer_takes_what_its_weights_take() -> None:
    """Of few rows and much weight, memory is all that counts."""
    of = shape("gated_ffn:M=16,K=16384,N=65536,L=16384")
    kernels = some("gated_ffn:M=16,K=16384,N=65536,L=16384", "l2", 4000)
    times = np.asarray(estimate(kernels, of, H100, RATES).microseconds)
    best = estimate(select(kernels, int(times.argmin())), of, H100, RATES)
    floor = sum(of.weight_bytes) / (RATES.fitted.hbm * RATES.measured.hbm_read)
    assert floor < times.min() < 1.1 * floor
    assert best.bound == "hbm"


def test_streams_overlap_between_the_longest_and_the_sum() -> None:
    rng = np.random.default_rng(0)
    for times in rng.random((50, 4)):
        assert times.max() <= overlapped(*times) <= times.sum()
    assert overlapped(3.0, 0.0, 0.0) == pytest.approx(3.0)


FURTHER = [
    ("gemm:M=64,N=512,K=512,residual=out", 64 * 512 * 2),
    ("gemm_chain:M=100,K=256,N=1024,L=520,residual=in", 100 * 520 * 2),
    ("gated_ffn:M=128,K=512,N=512,L=256,out=float32,residual=out", 128 * 256 * 4),
    ("gated_ffn:M=16,K=512,N=512,L=256,bias=first+last", (2 * 512 + 256) * 2),
    ("gated_ffn:M=16,K=512,N=512,L=256,scale=last", 4),
]


@pytest.mark.parametrize(("text", "read"), FURTHER)
def test_what_epilogues_read_comes_from_memory_once(text: str, read: int) -> None:
    of, bare = shape(text), shape(",".join(each for each in text.split(",") if not added(each)))
    assert of == replace(bare, further=read)
    memory = RATES.fitted.hbm * RATES.measured.hbm_read
    for family in families(of):
        kernels = some(text, family.name)
        assert count(kernels)
        few, many = (estimate(kernels, each, H100, RATES) for each in (bare, of))
        assert many.terms["hbm"] == pytest.approx(few.terms["hbm"] + read / memory)
        assert many.busy["hbm"] == pytest.approx(few.busy["hbm"] + read / memory)
        assert all(np.array_equal(many.terms[e], few.terms[e]) for e in few.terms if e != "hbm")
        first = select(kernels, 0)
        few_alone, many_alone = (alone(first, each, H100, RATES) for each in (bare, of))
        assert many_alone["hbm"] == pytest.approx(few_alone["hbm"] + read / memory)
    longer = eager(of, RATES).microseconds - eager(bare, RATES).microseconds
    assert longer == pytest.approx(read / (RATES.fitted.eager * RATES.measured.hbm_read))


def added(word: str) -> bool:
    return word.partition("=")[0] in ("residual", "bias", "scale")


def test_samples_may_read_different_bytes_besides() -> None:
    """What packaged constants were fitted to stays as it was where nothing is read."""
    known = samples()[::50]
    bytes_read = [0, 1 << 16, 1 << 20] * len(known)
    read = [
        replace(each, shape=replace(each.shape, further=further))
        for each, further in zip(known, bytes_read, strict=False)
    ]
    before, after = predict(known, H100)(RATES), predict(read, H100)(RATES)
    for index, (each, further) in enumerate(zip(known, bytes_read, strict=False)):
        constant = RATES.fitted.eager if each.family == EAGER else RATES.fitted.hbm
        assert after[index] == pytest.approx(
            before[index] + further / (constant * RATES.measured.hbm_read)
        )
        assert further or after[index] == before[index]


def test_constants_that_a_record_lacks_are_as_before_any_fit() -> None:
    bare = rates_from(replace(RATES.measured, fitted={"flag": 1.5, "of another version": 1.0}))
    assert bare.fitted == replace(Fitted(), flag=1.5)


def test_a_fit_finds_the_constants_that_times_were_made_with() -> None:
    """Times of the model itself, from a wrong start."""
    wanted = replace(RATES.fitted, flag=1.3, relaunch=5.0, hbm=0.8, eager_kernel=2.0)
    known = samples()[::3]
    times = predict(known, H100)(replace(RATES, fitted=wanted))
    made = [
        replace(each, microseconds=float(time)) for each, time in zip(known, times, strict=True)
    ]
    found = fit(made, RATES, H100, pull=100.0)
    assert found.spread < 0.01
    for name in ("flag", "relaunch", "hbm", "eager_kernel"):
        assert getattr(found.rates.fitted, name) == pytest.approx(getattr(wanted, name), rel=0.1)


def test_ranks_of_equal_order_correlate() -> None:
    times = np.array([3.0, 1.0, 2.0, 9.0])
    assert rank_correlation(times, times**3) == pytest.approx(1.0)
    assert rank_correlation(times, -times) == pytest.approx(-1.0)


def test_estimates_rank_what_was_measured() -> None:
    """The recorded candidates: loose bounds, so that a change that breaks the model is seen."""
    known = samples()
    measured = np.array([each.microseconds for each in known])
    errors = np.log(predict(known, H100)(RATES) / measured)
    told = report(known, errors)
    assert float(np.sqrt(np.mean(errors**2))) < 0.2
    assert set(told["families"]) == {"gemm", "registers", "dsm", "l2", "global", "eager"}
    rank, first, three = ranking(told)
    assert rank > 0.75
    assert first < 0.13
    assert three < 0.08
    assert RATES.trees is not None
    ours = without_eager(known)
    rows = rows_of([each for each, kept in zip(known, ours, strict=True) if kept], H100, RATES)
    errors[ours] += RATES.trees.sum(rows)
    rank, first, three = ranking(report(known, errors))
    assert rank > 0.93
    assert first < 0.03
    assert three < 0.01


def ranking(told: dict[str, Any]) -> list[float]:
    """Means over the chains: rank correlation, regret of the first choice, of the best of three."""
    chains = told["chains"].values()
    assert len(chains) == 62
    return [float(np.mean([each[key] for each in chains])) for key in ("rank", "top1", "top3")]
