"""A job that hangs, dies or babbles becomes a row; the worker process itself answers in JSON."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from crossfuse.bench import environment, worker
from crossfuse.bench.job import Planned
from crossfuse.bench.plan import measured, run
from crossfuse.errors import EnvironmentRefused
from crossfuse.hardware import Gpu, find_gpus
from crossfuse.measure.job import Job, Request, Timing
from crossfuse.measure.timer import WORKER

JOB = Job("gemm:M=8,K=16,N=32", "eager")
HOPPER = Gpu("NVIDIA H100", (9, 0), (13, 0))


def fake(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


# What a worker reads: a job that is to be prepared, then the same to be measured.
SERVE = """
import json, os, signal, subprocess, sys, time
print("ready", flush=True)
def requests():
    for line in sys.stdin:
        request = json.loads(line)
        yield request["job"], request["measure"]
def answer(value):
    print(json.dumps(value), flush=True)
"""
LOOP = """
for job, measure in requests():
    answer({"status": "ok", "message": job["variant"], "microseconds": 3.0} if measure else None)
"""
ECHO = SERVE + LOOP
# Answers for eager; anything else ends as its name says.
MOODY = f"""{SERVE}
for job, measure in requests():
    if job["variant"] == "ours":
        time.sleep(60)
    if job["variant"] == "compile":
        sys.exit("the GPU fell off [the bus]")
    if job["variant"] == "autotune" and measure:
        os.kill(os.getpid(), signal.SIGSEGV)
    answer({{"status": "ok"}} if measure else None)
"""
# A worker with a child that would live on; the child's id is the job's spec file.
PARENT = """{serve}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, file=open({path!r}, "w"), flush=True)
time.sleep(60)
"""
# Notes when it has its job and when it may measure, as seconds.
PATIENT = f"""{SERVE}
begun = time.time()
for job, measure in requests():
    free = time.time()
    time.sleep(0.3 if measure else 0)
    message = f"{{begun}} {{free}} {{time.time()}}"
    answer({{"status": "ok", "message": message}} if measure else None)
"""


def run_job(job: Job, timeout: float, command: tuple[str, ...]) -> Timing:
    (timing,) = measured([job], timeout, command)
    return timing


def test_answer_of_the_worker_is_the_timing() -> None:
    timing = run_job(JOB, 30, fake(ECHO))
    assert timing == Timing("ok", "eager", 3.0, seconds=timing.seconds)
    assert 0 < timing.seconds < 30


def test_bad_jobs_do_not_stop_the_others() -> None:
    variants = ("ours", "compile", "autotune", "eager")
    planned = [Planned("gemm", 8, 1.0, Job(JOB.spec, each)) for each in variants]
    seen = []
    rows = run(planned, 2, report=seen.append, command=fake(MOODY))
    assert [row.timing.status for row in rows] == ["timeout", "crashed", "crashed", "ok"]
    assert list(rows) == seen
    assert rows[0].timing.message == "no answer in 2 s"
    assert rows[1].timing.message == "exit code 1 without an answer. the GPU fell off [the bus]"
    assert rows[2].timing.message == "signal 11 without an answer"


@pytest.mark.parametrize("protocol", ["graph", "stream"])
def test_the_next_jobs_prepare_while_one_measures(protocol: str) -> None:
    """But where launches are timed they would be in the way."""
    job = Job(JOB.spec, "eager", protocol=protocol)
    timings = list(measured([job] * 5, 30, fake(PATIENT)))
    notes = [[float(each) for each in timing.message.split()] for timing in timings]
    for (_, _, end), (begun, free, _) in pairwise(notes):
        assert end <= free
        assert (begun < end) == (protocol == "graph")


def test_nobody_prepares_any_more_when_the_run_is_broken_off(tmp_path: Path) -> None:
    note = tmp_path / "children"
    program = f"{SERVE}print(os.getpid(), file=open({str(note)!r}, 'a'), flush=True){LOOP}"
    timings = measured([JOB] * 5, 30, fake(program))
    next(timings)
    timings.close()
    assert not any(_alive(int(each)) for each in note.read_text().split())


def test_timeout_kills_the_children_too(tmp_path: Path) -> None:
    note = tmp_path / "child"
    assert run_job(JOB, 3, fake(PARENT.format(serve=SERVE, path=str(note)))).status == "timeout"
    child = int(note.read_text())
    for _ in range(100):
        if not _alive(child):
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_worker_that_does_not_start_is_a_row(tmp_path: Path) -> None:
    timing = run_job(JOB, 5, (str(tmp_path / "nothing"),))
    assert timing.status == "crashed"
    assert timing.message.startswith("the worker does not start")


@pytest.mark.parametrize("answer", ["[]", "{", '{"status": "ok", "color": "red"}', "null"])
def test_nonsense_is_no_answer(answer: str) -> None:
    program = f"print('ready'); input(); print('null'); input(); print({answer!r}, flush=True)"
    assert run_job(JOB, 30, fake(program)).status == "crashed"


@pytest.mark.skipif(bool(find_gpus()), reason="there is a GPU")
def test_real_worker_says_that_there_is_no_gpu() -> None:
    timing = run_job(JOB, 60, WORKER)
    assert timing.status == "refused"
    assert "found no CUDA device" in timing.message


def test_prints_of_libraries_do_not_reach_the_answer() -> None:
    program = (
        "import os\n"
        "from crossfuse.bench import worker\n"
        "def answer(self, request):\n"
        "    print('AUTOTUNE mm'); os.system('echo from a child')\n"
        "    return worker.Timing('ok', request.job.variant)\n"
        "worker.Session.answer = answer\n"
        "worker.main()\n"
    )
    assert run_job(JOB, 60, fake(program)).message == "eager"


def test_exceptions_of_a_job_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object, **named: object) -> None:
        raise ValueError("no such kernel image")

    session, request = worker.Session("cpu"), Request(JOB)
    monkeypatch.setattr(worker, "measure_variant", broken)
    assert session.answer(request) == Timing("failed", "ValueError: no such kernel image")
    monkeypatch.setattr(worker, "make_problem", broken)
    found = session.answer(request)
    assert found == Timing("failed", "while it was prepared: ValueError: no such kernel image")


@pytest.mark.parametrize(
    ("gpus", "torch", "found"),
    [
        ((), True, "no CUDA device"),
        ((Gpu("NVIDIA A100", (8, 0), (13, 0)),), True, "NVIDIA A100 (8.0)"),
        ((HOPPER,), False, "no torch"),
    ],
)
def test_machine_without_what_it_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], torch: bool, found: str
) -> None:
    monkeypatch.setattr(environment, "find_gpus", lambda: gpus)
    monkeypatch.setattr(environment, "find_spec", lambda name: object() if torch else None)
    with pytest.raises(EnvironmentRefused) as caught:
        environment.require_gpu()
    assert caught.value.refusal.found == found


def test_machine_with_hopper_and_torch_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_gpus", lambda: (HOPPER,))
    monkeypatch.setattr(environment, "find_spec", lambda name: object())
    environment.require_gpu()


def test_record_has_versions_and_commit() -> None:
    found = environment.record()
    assert found["crossfuse"]
    assert {"python", "nvcc", "torch", "gpu"} <= set(found["versions"])
    assert len(found["commit"]) == 40 or found["commit"] == "unknown"
    assert os.linesep not in found["commit"]
