"""Searches find what is planted, repeat by their seed, and measure nothing twice."""

from __future__ import annotations

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.planner.tune.kernel_space import Move
from crossfuse.planner.tune.strategy import STRATEGIES, Annealing, make_strategy
from null.planner.tune.planted import Planted, drive, space, truth

SPECS = ("G4", "S3:M=128", "gemm:M=256,K=768,N=3072")
LEARNING = ("evolution", "annealing")


def found(name: str, text: str, trials: int, seed: int = 0) -> tuple[int, Planted]:
    measure = Planted(text)
    best = drive(make_strategy(name, space(text), seed=seed), measure, trials)
    assert best is not None
    return best, measure


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("name", LEARNING)
def test_the_best_is_nearly_found_in_few_trials(name: str, text: str) -> None:
    times = truth(text)
    near = sum(times[found(name, text, 64, seed)[0]] <= 1.05 * times.min() for seed in range(3))
    assert near >= 2


@pytest.mark.parametrize("text", SPECS)
def test_learning_beats_chance(text: str) -> None:
    times = truth(text)
    chance = min(times[found("random", text, 48, seed)[0]] for seed in range(3))
    for name in LEARNING:
        assert max(times[found(name, text, 48, seed)[0]] for seed in range(3)) <= chance * 1.02


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_measured_twice_and_seeds_repeat(name: str) -> None:
    _, one = found(name, "G4", 40, 3)
    _, again = found(name, "G4", 40, 3)
    assert len(set(one.asked)) == len(one.asked) == 40
    assert one.asked == again.asked
    if name != "model":
        assert found(name, "G4", 40, 4)[1].asked != one.asked


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_small_space_is_used_up(name: str) -> None:
    small = space("G4", ("dsm",))
    strategy = make_strategy(name, small)
    times = {each: 1.0 + each for each in range(len(small))}
    best = drive(strategy, lambda points: [times[each] for each in points], 500, batch=7)
    assert best == 0
    assert len(strategy.measured) == len(small)
    assert strategy.propose(1) == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_does_not_work_is_never_the_best(name: str) -> None:
    broken = space("G4").order[:30]
    measure = Planted("G4", [int(each) for each in broken])
    best = drive(make_strategy(name, space("G4")), measure, 64)
    assert best is not None
    assert best not in measure.broken


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_works_at_all(name: str) -> None:
    strategy = make_strategy(name, space("G4"))
    assert drive(strategy, lambda points: [None] * len(points), 24) is None
    assert len(strategy.measured) == 24


def test_measurements_of_others_are_known() -> None:
    strategy = make_strategy("evolution", space("G4"))
    known = [int(each) for each in space("G4").order[:5]]
    strategy.observe(known, [9.0, 8.0, None, 7.0, 6.0])
    assert strategy.best == known[4]
    assert not set(strategy.propose(32)) & set(known)


def test_a_search_stops_when_it_is_told() -> None:
    measure = Planted("G4")
    strategy = make_strategy("random", space("G4"))
    drive(strategy, measure, 100, batch=8, stop=lambda: len(measure.asked) >= 16)
    assert len(measure.asked) == 16


def test_directions_that_gain_are_expected_to_gain() -> None:
    search = make_strategy("annealing", space("G4"))
    assert isinstance(search, Annealing)
    move = Move("l2", "columns", "up")
    assert search.expected(move, 0.2) == 0.2
    measure = Planted("G4")
    drive(search, measure, 64)
    learned = [each for each in search._gains.values() if each[1] > 1]
    assert learned


def test_an_unknown_search_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"evolution, annealing, random, model"):
        make_strategy("tabu", space("G4"))
