"""Databases with broken lines are refused by file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

from cpu.schedule.kernels import matmul
from cpu.schedule.sampled import FUNCTIONS, sampled
from crossfuse.errors import ArtefactRefused
from crossfuse.schedule.planned import RECORDS, WORKLOADS, read_database

ADVICE = (
    "limit: a line that this version of TVM and Crossfuse wrote. Instead: delete the line (of the "
    "workload table only the last one: records count its lines), or tune again in another "
    "directory."
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A database of one record of a ring, and of a second workload without records."""
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    function = FUNCTIONS["ring"].with_attr("global_symbol", "main")
    workload = database.commit_workload(IRModule({"main": function}))
    database.commit_workload(IRModule({"main": matmul.with_attr("global_symbol", "main")}))
    arguments = ms.arg_info.ArgInfo.from_prim_func(function)
    target = tvm.target.Target("llvm")
    trace = sampled("ring").trace
    record = ms.database.TuningRecord(trace, workload, [1.0], target, arguments)
    database.commit_tuning_record(record)
    return tmp_path


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def edit_record(path: Path, change: Callable[[Any], None]) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def refusal(directory: Path, file: str, line: int) -> str:
    """What the refusal found in that line."""
    with pytest.raises(ArtefactRefused) as caught:
        read_database(directory)
    text = str(caught.value)
    start = f"database: {directory / file}, line {line}: found "
    assert text.startswith(start)
    assert text.endswith("; " + ADVICE)
    return text.removeprefix(start).removesuffix("; " + ADVICE)


def test_truncated_line(directory: Path) -> None:
    edit(directory / RECORDS, lambda text: text + text[: len(text) // 2])
    found = refusal(directory, RECORDS, 2)
    assert found.startswith("broken JSON (Unterminated string starting at at line 1, column ")


def test_blank_line(directory: Path) -> None:
    edit(directory / RECORDS, lambda text: text + "\n")
    assert refusal(directory, RECORDS, 2) == "a blank line"


def test_line_of_something_else(directory: Path) -> None:
    edit(directory / RECORDS, lambda text: text + '{"run_secs": 1.0}\n')
    assert refusal(directory, RECORDS, 2) == "JSON that is no pair"


def test_unknown_instruction(directory: Path) -> None:
    edit(directory / RECORDS, lambda text: text.replace('"TransformLayout"', '"ClusterShuffle"'))
    assert refusal(directory, RECORDS, 1) == "unknown instruction 'ClusterShuffle'"


@pytest.mark.parametrize("index", [2, -1, "0"])
def test_record_of_a_workload_that_is_not_there(directory: Path, index: Any) -> None:
    def change(record: Any) -> None:
        record[0] = index

    edit_record(directory / RECORDS, change)
    assert refusal(directory, RECORDS, 1) == f"workload {index} of 2"


def test_record_of_another_workload(directory: Path) -> None:
    def change(record: Any) -> None:
        record[0] = 1

    edit_record(directory / RECORDS, change)
    found = refusal(directory, RECORDS, 1)
    assert found == ("a record that does not fit workload 1: Cannot find a block with the name: H")


def test_record_that_lacks_its_measurements(directory: Path) -> None:
    def change(record: Any) -> None:
        record[1] = record[1][:1]

    edit_record(directory / RECORDS, change)
    found = refusal(directory, RECORDS, 1)
    assert found.startswith("a record that does not fit workload 0: Check failed")


def test_broken_workload(directory: Path) -> None:
    edit(directory / WORKLOADS, lambda text: text.replace('","', '","x', 1))
    assert refusal(directory, WORKLOADS, 1).startswith("no workload: ")


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtefactRefused) as caught:
        read_database(tmp_path / "session")
    assert str(caught.value) == (
        f"database: {tmp_path / 'session'}: found no such directory; limit: the directory of a "
        "tuning session. Instead: make the directory, or pass the work_dir that the session was "
        "given."
    )
