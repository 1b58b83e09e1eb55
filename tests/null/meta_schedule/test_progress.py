"""What is shown while candidates are measured."""

from __future__ import annotations

import io

from rich.console import Console

from crossfuse.bench.job import Job, Timing
from crossfuse.meta_schedule.build import Build
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.records import Progress, Record

SPEC = "gemm:M=8,K=64,N=64"


def record(time: float | None, status: str = "ok", message: str = "") -> Record:
    each = Candidate.from_json({"spec": SPEC, "family": "gemm"}, "a test")
    return Record(each, Build("ok"), Job(SPEC, "ours"), Timing(status, message, time, time))


def shown(records: list[Record], terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, soft_wrap=True)
    with Progress(len(records), console) as progress:
        for each in records:
            progress.add(each)
    assert progress.records == records
    return text.getvalue()


def test_lines_say_what_is_best_so_far() -> None:
    found = [record(5.0), record(6.0), record(4.5), record(None, "wrong", "off at [0, 1]")]
    head = "] gemm:M=8,K=64,N=64,dtype=bfloat16 gemm: "
    assert shown(found, terminal=False).splitlines() == [
        f"[1/4{head}5.00 us, best so far",
        f"[2/4{head}6.00 us",
        f"[3/4{head}4.50 us, best so far (was 5.00)",
        f"[4/4{head}wrong: off at [0, 1]",
    ]


def test_a_terminal_has_a_bar() -> None:
    text = shown([record(5.0), record(4.5)], terminal=True)
    assert "2/2" in text
    assert "best 4.50 us" in text
