"""Hangs, crashes, wrong results and nonsense cost one candidate; the others are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from crossfuse.bench.job import Job
from crossfuse.errors import ArtefactRefused
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.records import Record, append, read_records
from crossfuse.meta_schedule.tune import make_bundle, measure_all, measure_bundle, open_bundle
from null.meta_schedule.peers import BUILDER, MEASURER, program

HOW = Conditions(
    job=Job("", "ours", calls=2),
    timeout=2.0,
    builders=2,
    gpu="a stand-in",
    builder=program(BUILDER),
    measurer=program(MEASURER),
)


def candidates(*families: str, rows: int = 16) -> list[Candidate]:
    spec = f"gemm_chain:M={rows},K=64,N=128,L=64"
    made = []
    for number, family in enumerate(families):
        value = {"spec": spec, "family": family, "tiles": {"number": number}}
        value |= {"trace": [1]} if family == "trace" else {}
        made.append(Candidate.from_json(value, "a test"))
    return made


def measured(wanted: list[Candidate], folder: Path, **options) -> dict[str, Record]:
    found: list[Record] = []
    measure_all(wanted, folder, HOW, found.append, **options)
    return {each.candidate.id: each for each in found}


def test_bad_candidates_cost_themselves_alone(tmp_path: Path) -> None:
    wanted = candidates("gemm", "l2", "gemm", "global", "trace", "dsm", "gemm")
    found = measured(wanted, tmp_path)
    statuses = [found[each.id].status for each in wanted]
    assert statuses == ["ok", "timeout", "ok", "crashed", "crashed", "build-refused", "ok"]
    # A crash beside others is tried again alone; a hang is not: it costs its seconds once.
    assert [found[each.id].attempts for each in wanted] == [1, 1, 1, 2, 1, 0, 1]
    assert "signal 11" in found[wanted[3].id].message
    assert "no JSON" in found[wanted[4].id].message


def test_a_wrong_result_beside_others_is_looked_at_alone(tmp_path: Path) -> None:
    """The stand-in is wrong wherever another one was measured before."""
    wanted = candidates("gemm", "registers", "gemm")
    found = measured(wanted, tmp_path)
    again = found[wanted[1].id]
    assert (again.status, again.attempts, again.microseconds) == ("ok", 2, 11.0)
    first, last = found[wanted[0].id].message, found[wanted[2].id].message
    assert again.message.endswith("; beside others it was wrong at first: off at [0, 3]")
    assert first != last
    assert last == again.message.partition(";")[0]


def test_an_answer_that_is_no_timing_is_a_record(tmp_path: Path) -> None:
    how = replace(HOW, measurer=program(MEASURER.replace("10.0 + seen", "'ten'")))
    found: list[Record] = []
    measure_all(candidates("gemm"), tmp_path, how, found.append)
    (record,) = found
    assert record.status == "crashed"
    assert "an answer that is none: Damaged: microseconds: 'ten'" in record.message


def test_each_workload_is_prepared_and_a_broken_one_is_said(tmp_path: Path) -> None:
    wanted = [each for rows in (16, 13, 8, 4) for each in candidates("gemm", "gemm", rows=rows)]
    found = measured(wanted, tmp_path)
    statuses = [found[each.id].status for each in wanted]
    assert statuses == ["ok", "ok", "failed", "failed", "ok", "ok", "ok", "ok"]
    assert found[wanted[2].id].message == "while it was prepared: no such shape"
    # Each begins anew.
    assert [found[wanted[k].id].microseconds for k in (0, 1, 4, 5)] == [11.0, 12.0, 11.0, 12.0]


def test_stop_leaves_the_rest(tmp_path: Path) -> None:
    done: list[Record] = []
    wanted = [each for rows in (16, 8) for each in candidates("gemm", "gemm", rows=rows)]
    measure_all(wanted, tmp_path, HOW, done.append, lambda: len(done) >= 3)
    assert len(done) == 3


def test_a_builder_that_dies_is_a_record(tmp_path: Path) -> None:
    broken = Conditions(
        builders=1, builder=program("import sys; sys.exit('ptxas')"), measurer=HOW.measurer
    )
    found: list[Record] = []
    measure_all(candidates("gemm"), tmp_path, broken, found.append)
    (record,) = found
    assert record.status == "build-crashed"
    assert "exit code 1 without an answer. ptxas" in record.message


def test_a_bundle_is_measured_where_it_stopped(tmp_path: Path) -> None:
    wanted = candidates("gemm", "dsm", "global", "gemm")
    folder = tmp_path / "bundle"
    make_bundle(wanted, folder, HOW, build_there=True)
    bundle = open_bundle(folder)
    assert bundle.candidates == tuple(wanted)
    measure_bundle(bundle, HOW, budget=0.0)
    assert len(bundle.missing()) == 4
    measure_bundle(bundle, HOW)
    before = bundle.results.read_text()
    assert len(before.splitlines()) == 4
    assert bundle.missing() == ()
    measure_bundle(bundle, HOW)
    assert bundle.results.read_text() == before
    # A line that was cut off is measured again.
    bundle.results.write_text(before[:-40])
    assert len(bundle.missing()) == 1
    measure_bundle(bundle, HOW)
    assert len(read_records(bundle.results).records) == 4


def test_what_did_not_compile_at_home_is_not_tried_there(tmp_path: Path) -> None:
    tried = []
    folder = tmp_path / "bundle"
    wanted = candidates("gemm", "dsm")
    make_bundle(wanted, folder, HOW, report=lambda each, build: tried.append(build.status))
    assert tried == ["ok", "refused"]
    measure_bundle(open_bundle(folder), HOW)
    found = read_records(folder / "results.jsonl").records
    assert {each.status for each in found} == {"ok", "build-refused"}


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 9}', '{"format_version": 1}'])
def test_what_is_no_bundle(tmp_path: Path, text: str) -> None:
    (tmp_path / "bundle.json").write_text(text)
    with pytest.raises(ArtefactRefused, match="make the bundle again"):
        open_bundle(tmp_path)


INTERRUPTED = """
import signal
import sys
from pathlib import Path
# Who runs the tests in the background has told all processes to ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
from crossfuse._discovery import without_torch
without_torch()  # which takes seconds to load, and is not asked for anything
from null.meta_schedule.test_campaign import HOW
from crossfuse.meta_schedule.tune import measure_bundle, open_bundle
def report(record):
    print(record.status, flush=True)
try:
    measure_bundle(open_bundle(Path({folder!r})), HOW, report)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_keeps_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    make_bundle(candidates("gemm", "l2", "gemm"), folder, HOW, build_there=True)
    program = INTERRUPTED.format(here=str(Path(__file__).parents[2]), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ok\n"
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert rest == "interrupted\n"
    assert process.returncode == 0
    (record,) = read_records(folder / "results.jsonl").records
    assert record.status == "ok"
    assert len(open_bundle(folder).missing()) == 2


def test_appending_does_not_disturb_what_is_there(tmp_path: Path) -> None:
    found = list(measured(candidates("gemm", "gemm"), tmp_path).values())
    path = tmp_path / "again.jsonl"
    for each in found:
        append(path, each)
    assert list(read_records(path).records) == found
