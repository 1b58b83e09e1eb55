"""Records of the primitives in MetaSchedule's database and in its worker processes."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tvm
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenPoolExecutor

from cpu.schedule import ranks
from cpu.schedule.sampled import CASES, FUNCTIONS, sampled
from crossfuse.schedule.planned import read_database

TARGET = "llvm"
#: In front of the cases of functions over several GPUs.
ACROSS = "across "


def named(case: str) -> str:
    return case.replace(" ", "_").replace("-", "_")


def commit(database: Any, case: str) -> Any:
    """Commit the schedule of a case, under a name of its own, and return its module."""
    across = case.removeprefix(ACROSS)
    function = FUNCTIONS[case] if across == case else ranks.CASES[across][0]
    function = function.with_attr("global_symbol", "main").with_attr("case", named(case))
    schedule = sampled(case) if across == case else ranks.scheduled(across)
    workload = database.commit_workload(IRModule({"main": function}))
    arguments = ms.arg_info.ArgInfo.from_prim_func(function)
    target = tvm.target.Target(TARGET)
    record = ms.database.TuningRecord(schedule.trace, workload, [1.0], target, arguments)
    database.commit_tuning_record(record)
    replayed = tvm.s_tir.Schedule(workload.mod)
    schedule.trace.apply_to_schedule(replayed, remove_postproc=False)
    return replayed.mod


def test_records_reopen_in_a_process_that_only_imports_tvm(tmp_path: Path) -> None:
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    cases = [*CASES, *(ACROSS + each for each in ranks.CASES)]
    expected = {named(case): commit(database, case) for case in cases}
    del database
    output = tmp_path / "modules.jsonl"
    program = Path(__file__).with_name("reopen_database.py")
    subprocess.run([sys.executable, program, tmp_path, output], check=True, timeout=120)
    modules = [tvm.ir.load_json(line) for line in output.read_text().splitlines()]
    assert len(modules) == len(expected)
    for module in modules:
        tvm.ir.assert_structural_equal(module, expected[str(module["main"].attrs["case"])])


def test_read_database_gives_the_records(tmp_path: Path) -> None:
    first = read_database(tmp_path)
    module = commit(first, "ring")
    again = read_database(tmp_path)
    assert len(again) == 1
    (record,) = again.get_all_tuning_records()
    target = tvm.target.Target(TARGET)
    found = again.query_schedule(record.workload.mod, target, "main")
    tvm.ir.assert_structural_equal(found.mod, module)


def test_worker_processes_have_the_primitives_and_the_pipeline() -> None:
    def in_worker() -> tuple[list[str], bool]:  # local, so that it is sent by value
        from tvm.s_tir import Schedule
        from tvm.tirx import compilation_pipeline

        names = ("cluster_bind", "dsm_reduce", "dsm_shuffle", "verify_cluster", "rank_reduce")
        pipeline = compilation_pipeline.PIPELINE_MAP["s_tir"]
        found = [name for name in names if callable(getattr(Schedule, name, None))]
        return found, hasattr(pipeline, "crossfuse_wraps")

    assert "crossfuse" in [each.name for each in entry_points(group="tvm.backends")]
    pool = PopenPoolExecutor(max_workers=1, timeout=60)
    names, wrapped = pool.submit(in_worker).result()
    assert len(names) == 5
    assert wrapped
