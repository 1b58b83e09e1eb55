"""Of groups that share parts those are fused that save most together."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from crossfuse.relax.choice import _together


def groups(*given: tuple[str, float]) -> list[tuple[frozenset[str], float]]:
    return [(frozenset(parts), gain) for parts, gain in given]


def test_two_pairs_beat_the_one_between_them() -> None:
    assert _together(groups(("ab", 2.0), ("bc", 3.0), ("cd", 2.0))) == {0, 2}


def test_one_that_saves_more_than_both_beside_it() -> None:
    assert _together(groups(("ab", 1.0), ("bc", 3.0), ("cd", 1.0))) == {1}


def test_what_saves_nothing_takes_no_part_away() -> None:
    assert _together(groups(("ab", -1.0), ("bc", 0.5))) == {1}
    assert _together([]) == frozenset()


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_saves_more(seed: int) -> None:
    draw = np.random.default_rng(seed)
    given = groups(
        *(
            ("".join(draw.choice(list("abcdefgh"), draw.integers(1, 4), replace=False)), gain)
            for gain in draw.normal(1, 2, 9)
        )
    )

    def saved(places: frozenset[int] | tuple[int, ...]) -> float:
        parts = [part for each in places for part in given[each][0]]
        free = len(parts) == len(set(parts))
        return sum(given[each][1] for each in places) if free else float("-inf")

    every = (each for count in range(10) for each in combinations(range(9), count))
    assert saved(_together(given)) == pytest.approx(max(map(saved, every)))
