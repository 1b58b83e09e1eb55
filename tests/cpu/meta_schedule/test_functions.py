"""Functions without a spec are held against float64 too: of ``tune_relax``, of any PrimFunc."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.meta_schedule.loggers import drop_nameless_handlers
from cpu.meta_schedule.test_measure import STAND_IN
from cpu.meta_schedule.test_rule import kinds, rectifier
from cpu.meta_schedule.test_search import model_with_others
from crossfuse.bench.job import Job, Timing
from crossfuse.bench.problem import (
    function_problem,
    is_function,
    keep,
    name_of,
    tag,
    tag_of,
)
from crossfuse.hardware import device, tvm_target
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.builder import GpuRunner, NvccBuilder
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.plugs import plugs
from crossfuse.meta_schedule.records import KeepRecords, Record, read_records
from crossfuse.meta_schedule.task import Tasks, post_order_apply
from crossfuse.workload import prim_func, resolve

pytest.importorskip("torch")
pytest.importorskip("xgboost")
ms = pytest.importorskip("tvm.s_tir.meta_schedule")

H100 = tvm_target("nvidia-h100")
HOW = Conditions(job=Job("", "ours", calls=2), timeout=120.0, measurer=STAND_IN)
CHAIN = "gemm_chain:M=64,K=64,N=256,L=64,dtype=float16,act=relu"


def tune(folder: Path, tasks: Tasks, parts: dict[str, Any]) -> tuple[list[Any], tuple[Record, ...]]:
    """Tune a model of a chain and another function; what the runner and the callback were told."""
    seen: list[tuple[str, Timing]] = []
    runner = GpuRunner(HOW, lambda path, name, timing: seen.append((name, timing)))
    drop_nameless_handlers()
    try:
        ms.relax_integration.tune_relax(
            model_with_others(CHAIN),
            {},
            H100,
            str(folder / "work"),
            4,
            max_trials_per_task=2,
            num_trials_per_iter=2,
            builder=NvccBuilder(tasks, directory=folder / "built"),
            runner=runner,
            measure_callbacks=[
                *ms.MeasureCallback.create("default"),
                KeepRecords(folder / "records.jsonl"),
            ],
            seed=1,
            **parts,
        )
    finally:
        runner.close()
    return seen, read_records(folder / "records.jsonl").records


def ours(tasks: Tasks) -> dict[str, Any]:
    return plugs(tasks=tasks, others=ms.search_strategy.ReplayTrace())


def tvms(tasks: Tasks) -> dict[str, Any]:
    space = post_order_apply(tasks, designs=1)
    return {"space": space, "strategy": "replay-trace", "cost_model": "random"}


@pytest.mark.parametrize("parts", [ours, pytest.param(tvms, marks=pytest.mark.nightly)])
def test_all_functions_of_a_model_are_checked(tmp_path: Path, parts: Any) -> None:
    tasks = Tasks(device("nvidia-h100"))
    seen, records = tune(tmp_path, tasks, parts(tasks))
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(seen) == len(lines) == 4
    # TVM's search may propose a schedule twice, which is one candidate.
    assert len(records) == len({json.loads(each)["id"] for each in lines})
    assert len(tasks.functions) == 2
    assert {name for name, _ in seen} == {each.candidate.spec for each in records}
    assert {name for name, _ in seen} == set(tasks.functions)
    for _, timing in seen:
        assert timing.status == "ok", timing.message
        assert timing.worst_before is not None
        assert timing.worst_before <= 1
    assert {each.check for each in records} == {"passed"}
    assert [each.microseconds for each in records] == pytest.approx([7.5] * len(records))


@pytest.fixture
def measured() -> Iterator[Callable[[str], Any]]:
    """What one runner, whose processes take seconds to start, says of a library."""
    runner = GpuRunner(HOW)

    def result(path: str) -> Any:
        (future,) = runner.run([ms.runner.RunnerInput(path, "cuda", [])])
        return future.result()

    yield result
    runner.close()


def chain_library(folder: Path, workload: Any) -> Path:
    func = prim_func(resolve(CHAIN))
    tasks = Tasks(device("nvidia-h100"))
    task = tasks.of(module_of(func))
    assert task is not None
    sch = task.schedule(int(task.space.order[0]))
    builder = NvccBuilder(func if workload is None else workload, directory=folder)
    (found,) = builder.build([ms.builder.BuilderInput(sch.mod, H100)])
    assert found.error_msg is None, found.error_msg
    return Path(str(found.artifact_path))


def module_of(func: Any) -> Any:
    from tvm import IRModule

    return IRModule({"main": func.with_attr("global_symbol", "main")})


@pytest.mark.slow
def test_a_function_may_be_the_workload_and_wrong_kernels_have_no_time(
    tmp_path: Path, measured: Callable[[str], Any]
) -> None:
    path = chain_library(tmp_path, None)
    assert measured(str(path)).error_msg is None
    for suffix in (".so", ".json"):
        path.with_suffix(suffix).rename(path.parent / f"wrong-kernel{suffix}")
    wrong = measured(str(path.parent / "wrong-kernel.so"))
    assert wrong.run_secs is None
    assert "element-error" in str(wrong.error_msg)


def test_without_the_function_there_is_no_time(
    tmp_path: Path, measured: Callable[[str], Any]
) -> None:
    path = chain_library(tmp_path, Tasks(device("nvidia-h100")))
    (answer,) = {str(measured(str(path)).error_msg)}
    assert answer.startswith("refused: nothing to check it against: no function beside the library")


def test_names_say_what_is_computed(tmp_path: Path) -> None:
    func = prim_func(resolve(CHAIN))
    name = name_of(func)
    assert is_function(name)
    assert name == name_of(module_of(func)) == name_of(func.with_attr("global_symbol", "other"))
    assert name != name_of(prim_func(resolve(CHAIN + ",weights=nk")))
    keep(func, tmp_path, name)
    first, again = (function_problem(name, tmp_path) for _ in range(2))
    assert (first.limits.reference == again.limits.reference).all()
    assert first.weight_bytes == (64 * 256 + 256 * 64) * 2
    assert (first.output, first.dtype) == ((64, 64), "float16")


def test_names_travel_in_traces() -> None:
    from tvm.s_tir import Schedule

    sch = tag(Schedule(rectifier()), name_of(rectifier()))
    again = Schedule(rectifier())
    sch.trace.apply_to_schedule(again, remove_postproc=False)
    assert tag_of(again.mod) == name_of(rectifier())
    assert tag_of(rectifier()) == ""
    assert kinds([again]) == [["GetSBlock", "Annotate"]]


def test_candidates_of_functions_are_traces() -> None:
    from crossfuse.errors import WorkloadRefused

    name = name_of(rectifier())
    assert Candidate.from_json({"spec": name, "family": "trace", "trace": [1]}, "").spec == name
    with pytest.raises(WorkloadRefused, match="found family gemm; limit: family trace"):
        Candidate.from_json({"spec": name, "family": "gemm"}, "a test")
