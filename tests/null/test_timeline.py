"""From stamps of CTAs to a table of events."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from crossfuse.bench.timeline import Event, KernelTimeline, summarise
from crossfuse.cli import app

NAMES = (("begin", "stored 0", "end"),)


def stamps(start: int) -> np.ndarray:
    """Three CTAs; the last one has no tile."""
    rows = [[0, 10_000, 12_000], [500, 14_000, 15_000], [1_000, -start, 2_000]]
    return np.array(rows, dtype=np.int64) + start


def test_times_count_from_the_first_cta() -> None:
    (found,) = summarise(["main"], NAMES, [stamps(10**18)])
    assert found == KernelTimeline(
        "main",
        None,
        (
            Event("begin", 0.0, 0.5, 1.0, 3),
            Event("stored 0", 10.0, 12.0, 14.0, 2),
            Event("end", 2.0, 12.0, 15.0, 3),
        ),
    )


def test_the_last_round_is_taken_and_the_gap_before_it() -> None:
    rounds = [stamps(10**18), stamps(10**18 + 15_800)]
    (found,) = summarise(["main"], NAMES, rounds)
    assert found.gap == pytest.approx(0.8)
    assert found.events[0].first == 0.0


def test_kernels_of_a_function_follow_each_other() -> None:
    names = (NAMES[0], ("begin", "stored 0", "end"))
    rounds = [stamps(10**18 + 20_000 * number) for number in range(4)]
    first, second = summarise(["main_0", "main_1"], names, rounds)
    assert (first.kernel, second.kernel) == ("main_0", "main_1")
    assert first.gap == second.gap == pytest.approx(5.0)


def test_an_event_that_nobody_reached_is_left_out() -> None:
    here = stamps(10**18)
    here[:, 1] = 0
    (found,) = summarise(["main"], NAMES, [here])
    assert [each.name for each in found.events] == ["begin", "end"]


def test_the_command_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["timeline", "S3", "--m", "16"])
    assert result.exit_code == 2
