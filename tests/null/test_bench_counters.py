"""Memory traffic of jobs, with an Nsight Compute and a GPU that are stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from crossfuse.bench import counters, variants
from crossfuse.bench import models as ways
from crossfuse.bench.counters import MEMORY, METRICS, count
from crossfuse.bench.job import Counters, Job, Planned, Row, Timing, Variant
from crossfuse.bench.plan import run
from crossfuse.bench.table import progress, report
from crossfuse.measure import timing
from crossfuse.schema import typed
from null.ncu_logs import DENIED, LOG

JOB = Job("gemm:M=8,K=16,N=32", "eager")
FOUND = Counters(
    "ok", "", 272_105_472, 5_120, 301_989_888, 315_000_000, 111.936, ("main_0", "main_1"), 1
)
# Answers for all metrics and for those of the memory; then runs the program as ncu does.
FAKE = """#!{python}
import subprocess, sys
words = sys.argv
option = lambda name: words[words.index(name) + 1]
text = {texts!r}[option("--metrics").count(",") + 1]
open(option("--log-file"), "w").write(text)
sys.exit(subprocess.call(words[words.index("--log-file") + 2:]))
"""
ALONE = LOG.replace(',"l1tex__m_xbar2l1tex_read_bytes.sum","lts__t_bytes.sum"', "")
SEVERAL = LOG.replace("- 1 pass", "- 2 passes").replace("181,403,648", "90,000,000")
QUIET = (sys.executable, "-c", "pass")


def fake(folder: Path, text: str, alone: str = ALONE) -> Path:
    path = folder / "ncu"
    texts = {len(METRICS): text, len(MEMORY): alone}
    path.write_text(FAKE.format(python=sys.executable, texts=texts))
    path.chmod(0o755)
    return path


def test_one_pass_is_one_run(tmp_path: Path) -> None:
    assert count(JOB, 30, ncu=fake(tmp_path, LOG, "no second run"), program=QUIET) == FOUND
    assert FOUND.dram_bytes == 272_110_592


def test_program_gets_the_job(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = (sys.executable, "-c", f"import shutil, sys; shutil.copy(sys.argv[1], {str(seen)!r})")
    assert count(JOB, 30, ncu=fake(tmp_path, LOG), program=program).status == "ok"
    assert typed(Job, json.loads(seen.read_text())) == JOB


def test_memory_is_read_alone_where_all_take_several_passes(tmp_path: Path) -> None:
    assert count(JOB, 30, ncu=fake(tmp_path, SEVERAL), program=QUIET) == FOUND


@pytest.mark.parametrize(
    ("alone", "reason"), [(SEVERAL, "took 2 passes"), ("", "found no word of ncu")]
)
def test_traffic_that_takes_several_passes_is_not_told(
    tmp_path: Path, alone: str, reason: str
) -> None:
    found = count(JOB, 30, ncu=fake(tmp_path, SEVERAL, alone), program=QUIET)
    assert found.status == "refused"
    assert reason in found.message
    assert found.dram_bytes is None
    assert found.l2_to_sm_bytes == FOUND.l2_to_sm_bytes


def test_denied_counters_are_refused_whatever_else_is_said(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import sys; sys.exit('a warning')")
    found = count(JOB, 30, ncu=fake(tmp_path, DENIED), program=program)
    assert found.status == "refused"
    assert "ERR_NVGPUCTRPERM" in found.message


def test_reason_of_the_program_comes_first(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import sys; sys.exit('no such kernel')")
    log = "==ERROR== The application returned an error code (1).\n"
    found = count(JOB, 30, ncu=fake(tmp_path, log), program=program)
    assert (found.status, found.message) == ("failed", "exit code 1. no such kernel")


def test_program_that_hangs_is_killed(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "import time; time.sleep(60)")
    found = count(JOB, 2, ncu=fake(tmp_path, LOG), program=program)
    assert (found.status, found.message) == ("timeout", "no counters in 2 s")


def test_missing_profiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_candidates", lambda: iter([tmp_path / "ncu"]))
    found = count(JOB, 30)
    assert found.status == "refused"
    assert "install Nsight Compute" in found.message


@pytest.mark.parametrize("kind", ["chain", "model"])
@pytest.mark.parametrize(("l2", "flushed"), [("cold", ["flush"]), ("hot", [])])
def test_one_computation_is_marked(
    monkeypatch: pytest.MonkeyPatch, l2: str, flushed: list[str], kind: str
) -> None:
    torch = pytest.importorskip("torch")
    events: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *arguments: events.append(word)

    profiler = SimpleNamespace(start=note("start"), stop=note("stop"))
    cuda = SimpleNamespace(synchronize=note("wait"), profiler=profiler)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(timing, "flusher", lambda device: note("flush"))
    made = Variant(note("call"), pack=lambda weights: ())
    monkeypatch.setattr(variants, "make", lambda name, spec, device: made)
    monkeypatch.setattr(ways, "way", lambda name, built: (note("call"), ""))
    job = JOB if kind == "chain" else replace(JOB, spec="model:bert-base,layers=1,reduce=12")
    counters.compute_once(replace(job, l2=l2), "cpu")
    warm = ["call"] * counters.WARMUPS
    assert events == [*warm, *flushed, "wait", "start", "call", "wait", "stop"]


def test_every_job_with_a_time_is_counted_once() -> None:
    jobs = [JOB, replace(JOB, protocol="stream"), replace(JOB, variant="ours")]
    planned = [Planned("gemm", 8, 1.0, job, 272_110_592 // 2) for job in jobs]
    answer = (
        "import json, sys\n"
        "print('ready', flush=True)\n"
        "for each in map(json.loads, sys.stdin):\n"
        "    eager = each['job']['variant'] == 'eager'\n"
        "    timing = {'status': 'ok', 'microseconds': 3.0 if eager else None}\n"
        "    print(json.dumps(timing if each['measure'] else None), flush=True)\n"
    )
    seen: list[Job] = []

    def counting(job: Job, timeout: float) -> Counters:
        seen.append(job)
        return FOUND

    rows = run(planned, 30, command=(sys.executable, "-c", answer), count=counting)
    assert [job.protocol for job in seen] == ["stream"]
    assert [row.counters for row in rows] == [FOUND, FOUND, None]
    assert [row.dram_over_compulsory for row in rows] == [2.0, 2.0, None]


def test_rows_have_the_traffic_in_json_and_in_a_table() -> None:
    from rich.console import Console

    row = Row(Planned("G1", 8, 1.0, JOB, 136_055_296), Timing("ok", "", 3.0), FOUND)
    found = row.to_json()["counters"]
    assert (found["dram_bytes"], found["dram_over_compulsory"]) == (272_110_592, 2.0)
    assert found["l2_to_sm_bytes"] == 301_989_888
    assert "3.00x floor, 2.00x compulsory bytes" in progress(row, 1, 1)
    bad = Counters("refused", "no [permission]")
    rows = (row, replace(row, planned=replace(row.planned, rows=16), counters=bad))
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        for part in report((*rows, replace(rows[1], planned=replace(row.planned, rows=32)))):
            console.print(part)
    text = capture.get()
    assert "memory traffic" in text
    (line,) = (line for line in text.splitlines() if "272.11" in line)
    assert all(word in line for word in ("eager", "0.01", "2.000x", "301.99", "111.94"))
    assert text.count("counters refused: no [permission]") == 1


def test_rows_without_counters_say_nothing_of_them() -> None:
    row = Row(Planned("G1", 8, 1.0, JOB, 10), Timing("ok", "", 3.0))
    assert "counters" not in row.to_json()
    assert row.dram_over_compulsory is None
