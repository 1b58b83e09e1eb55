"""Choices by times, and what is kept of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from crossfuse.cache import Entry, shelf
from crossfuse.hardware import device
from crossfuse.measure.choice import Entrant, Measured, faster, measured_choice
from crossfuse.measure.job import LIBRARY, SPEC, Taken, Way
from null.measure.timers import FakeTimer

TARGET = device("nvidia-h100")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def measured(
    times: dict[str, float | str], timer: FakeTimer | None = None, parts: tuple[str, ...] = ("f",)
) -> Measured:
    """The choice among kernels of these names, the planner's first; ``separate`` is not ours."""
    names = [each for each in times if each != "separate"]
    return measured_choice(
        timer or FakeTimer(lambda way: times[way.source]),
        TARGET,
        parts,
        "a test",
        lambda: [
            Entrant(at, each, 1.0, Way(LIBRARY, each))
            if times[each] != "not built"
            else Entrant(at, each, 1.0, None, "nvcc: no")
            for at, each in enumerate(names)
        ],
        lambda: Way(SPEC, "separate") if "separate" in times else None,
    )


def won(found: Measured) -> str:
    return found.best.name if found.best else ""


def test_the_fastest_is_taken() -> None:
    found = measured({"l2": 10.0, "dsm": 8.0, "registers": 9.0, "separate": 12.0})
    assert (won(found), found.fuse) == ("dsm", True)
    assert found.times == (8.0, 12.0)
    text = "l2 10.00 us, dsm 8.00 us, registers 9.00 us, separate kernels 12.00 us; dsm won"
    assert text in found.text


def test_separate_kernels_win() -> None:
    found = measured({"l2": 10.0, "dsm": 8.0, "separate": 7.0})
    assert (won(found), found.fuse) == ("dsm", False)
    assert found.text.endswith("; separate kernels won")


@pytest.mark.parametrize(("other", "fuse"), [(10.0, False), (10.1, False), (10.5, True)])
def test_what_replaces_separate_kernels_is_faster_by_more_than_noise(
    other: float, fuse: bool
) -> None:
    assert measured({"l2": 10.0, "separate": other}).fuse is fuse


def test_the_planner_keeps_its_choice_within_noise() -> None:
    assert won(measured({"l2": 10.0, "dsm": 9.9})) == "l2"


def test_times_that_vary_more_decide_less() -> None:
    assert faster(Taken(9.0, 8.9), Taken(10.0, 9.9))
    assert not faster(Taken(9.0, 7.5), Taken(10.0, 9.9))
    assert not faster(Taken(9.0, 8.9), Taken(10.0, 8.0))


def test_a_kernel_that_fails_hangs_or_is_not_built_loses() -> None:
    found = measured(
        {"l2": "timeout: no answer in 60 s", "dsm": "not built", "global": 30.0, "separate": 20.0}
    )
    assert (won(found), found.fuse) == ("global", False)
    assert "l2 none (timeout: no answer in 60 s), dsm none (nvcc: no)" in found.text


def test_none_runs() -> None:
    times: dict[str, float | str] = {"l2": "crashed: signal 9", "separate": 20.0}
    timer = FakeTimer(lambda way: times[way.source])
    found = measured(times, timer)
    assert (found.best, found.fuse) == (None, False)
    measured(times, timer)
    assert len(timer.asked) == 4  # it may run another time


def test_separate_kernels_that_fail_say_nothing() -> None:
    assert measured({"l2": 10.0, "separate": "failed: out of memory"}, parts=("g",)).fuse is None
    assert measured({"l2": 10.0}, parts=("h",)).fuse is None


def test_once_for_each_content_and_gpu() -> None:
    times: dict[str, float | str] = {"l2": 10.0, "dsm": 8.0}
    one, again = (FakeTimer(lambda way: times[way.source]) for _ in range(2))
    first = measured(times, one)
    assert measured(times, again) == first
    assert (len(one.asked), len(again.asked)) == (2, 0)
    measured(times, again, parts=("f", "other options"))
    other = FakeTimer(lambda way: times[way.source], gpu="NVIDIA H200")
    assert measured(times, other).gpu == "NVIDIA H200"
    assert (len(again.asked), len(other.asked)) == (2, 2)


def test_other_processes_know() -> None:
    program = (
        "from crossfuse._discovery import without_torch\n"
        "without_torch()\n"
        "from null.measure.test_choice import *\n"
        "def never(way): raise SystemExit('asked')\n"
        "print(won(measured({'l2': 10.0, 'dsm': 8.0}, FakeTimer(never))))\n"
    )
    measured({"l2": 10.0, "dsm": 8.0})
    tests = str(Path(__file__).parents[2])
    paths = f"import sys; sys.path[:0] = {[tests, *sys.path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", paths + program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "dsm"


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b'{"gpu": 1}', b'{"gpu": "", "ours": [1], "baseline": null}']
)
def test_a_damaged_entry_counts_as_none(own_cache: Path, damage: bytes) -> None:
    measured({"l2": 10.0})
    (path,) = own_cache.rglob("*.measured")
    shelf("measured").write(path.stem, Entry(damage, {"label": "damaged"}))
    assert won(measured({"l2": 10.0})) == "l2"
