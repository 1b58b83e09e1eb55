"""The process that times: what hangs, dies or fails in it has no time, and harms no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import Gpu, device
from crossfuse.measure import timer
from crossfuse.measure.job import LIBRARY, Way
from crossfuse.measure.timer import Timer, find_timer, timing
from null.measure.timers import FakeTimer

#: The source says what happens; times count what this process has timed.
PROGRAM = """
import json, os, signal, sys, time
print("ready", flush=True)
seen = 0
for line in sys.stdin:
    seen += 1
    what = json.loads(line)["way"]["source"]
    if what == "hang":
        time.sleep(60)
    if what == "die" or (what == "die beside others" and seen > 1):
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "fail":
        print(json.dumps({"status": "failed", "message": "RuntimeError: CUDA"}), flush=True)
    elif what == "babble":
        print(json.dumps({"time": 3}), flush=True)
    else:
        print(json.dumps({"status": "ok", "microseconds": float(seen), "minimum": 0.5}), flush=True)
"""


@pytest.fixture
def made() -> Iterator[Timer]:
    made = Timer(0, "a GPU", "nvidia-h100", (sys.executable, "-c", PROGRAM), seconds=2.0)
    yield made
    made.close()


def way(source: str) -> Way:
    return Way(LIBRARY, source)


def test_one_process_times_many(made: Timer) -> None:
    assert [made.time(way("fine")).microseconds for _ in range(3)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hang", "timeout: no answer in 2 s"),
        ("die", "crashed: signal 11"),
        ("fail", "RuntimeError: CUDA"),
        ("babble", "crashed: an answer that is none"),
    ],
)
def test_what_fails_has_no_time_and_the_next_has_a_new_process(
    made: Timer, what: str, message: str
) -> None:
    assert made.time(way("fine")).microseconds == 1.0
    found = made.time(way(what))
    assert found.microseconds is None
    assert found.message.startswith(message)
    assert made.time(way("fine")).microseconds == 1.0


def test_what_fails_beside_others_is_timed_by_itself(made: Timer) -> None:
    made.time(way("fine"))
    assert made.time(way("die beside others")).microseconds == 1.0


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "find_gpus", tuple)
    with pytest.raises(EnvironmentRefused, match="found no CUDA device; limit: torch and a GPU of"):
        find_timer()
    monkeypatch.setattr(timer, "find_gpus", lambda: (Gpu("Old", (8, 0), (12, 8)),))
    with pytest.raises(EnvironmentRefused, match="found Old"):
        find_timer()


def test_kernels_are_measured_on_the_gpu_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTimer(lambda way: 1.0)
    monkeypatch.setattr(timer, "find_timer", lambda index: fake)
    found = "found NVIDIA H100 80GB HBM3, which is nvidia-h100"
    with pytest.raises(EnvironmentRefused, match=found), timing(device("nvidia-h200")):
        pass
    with timing(device("nvidia-h100")) as same:
        assert same is fake
    assert fake.closed == 2
