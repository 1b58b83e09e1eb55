"""``ms.tune_tir`` with the builder and the runner, unchanged; and TVM's own RPC runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpu.meta_schedule.loggers import drop_nameless_handlers
from cpu.meta_schedule.test_measure import FULL, STAND_IN, candidate
from crossfuse.bench.job import Job, Timing
from crossfuse.hardware import tvm_target
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.builder import GpuRunner, NvccBuilder
from crossfuse.meta_schedule.records import KeepRecords, read_records, record_of, workload_module
from crossfuse.workload import parse, prim_func

pytest.importorskip("torch")

ms = pytest.importorskip("tvm.s_tir.meta_schedule")
HOW = Conditions(job=Job("", "ours", calls=2), timeout=120.0, measurer=STAND_IN)


def some_schedules(sch: Any) -> list[Any]:
    """A space of two."""
    from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn

    func = sch.mod["main"]
    return [
        schedule_register_ffn(func, tiles=RegisterTiles(parts=parts), constant_weights=True)
        for parts in (2, 4)
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory):
    """A search over a few schedules, and what the runner was told."""
    folder = tmp_path_factory.mktemp("tuned")
    seen: list[tuple[str, Timing]] = []
    runner = GpuRunner(HOW, lambda path, spec, timing: seen.append((spec, timing)))
    drop_nameless_handlers()
    database = ms.tune_tir(
        prim_func(parse(FULL)),
        tvm_target("nvidia-h100"),
        str(folder),
        max_trials_global=4,
        num_trials_per_iter=2,
        builder=NvccBuilder(FULL, directory=folder / "built"),
        runner=runner,
        cost_model="random",
        space=ms.space_generator.ScheduleFn(
            some_schedules, postprocs=[], mutator_probs={}, sch_rules=[]
        ),
        strategy="replay-trace",
        measure_callbacks=[
            *ms.MeasureCallback.create("default"),
            KeepRecords(folder / "records.jsonl", FULL),
        ],
        seed=0,
    )
    yield folder, seen, database
    runner.close()


@pytest.mark.slow
def test_a_search_measures_and_stores(tuned) -> None:
    from crossfuse.lower.extract import lower

    folder, seen, _ = tuned
    assert seen
    assert {spec for spec, _ in seen} == {FULL}
    assert {timing.status for _, timing in seen} == {"ok"}
    database = ms.database.JSONDatabase(work_dir=str(folder))
    best = database.query_schedule(workload_module(FULL), tvm_target("nvidia-h100"), "main")
    assert lower(best).image.launches
    records = database.get_all_tuning_records()
    assert [float(record.run_secs[0]) for record in records] == pytest.approx(
        [7.5e-6] * len(records)
    )


def test_records_have_the_traces(tuned) -> None:
    folder, _, _ = tuned
    kept = read_records(folder / "records.jsonl").records
    assert kept
    assert {(each.status, each.candidate.family) for each in kept} == {("ok", "trace")}
    assert [each.microseconds for each in kept] == pytest.approx([7.5] * len(kept))


@pytest.mark.parametrize(
    ("built", "ran", "status", "message"),
    [
        (None, "timeout: no answer in 30 s", "timeout", "no answer in 30 s"),
        ("refused: tiles: too wide", "the same", "build-refused", "tiles: too wide"),
        (None, "RPCRunner: An exception", "failed", "RPCRunner: An exception"),
    ],
)
def test_records_tell_failures_apart(
    built: str | None, ran: str, status: str, message: str
) -> None:
    path = "main.so" if built is None else None
    results = ms.builder.BuilderResult(path, built), ms.runner.RunnerResult(None, ran)
    record = record_of(candidate("trace", trace=[1]), *results)
    assert (record.status, record.message, record.microseconds) == (status, message, None)


def built(mod: Any, target: Any, **options: Any) -> Any:
    (result,) = NvccBuilder(**options).build([ms.builder.BuilderInput(mod, target)])
    return result


def test_what_does_not_compile_is_a_result(tmp_path: Path) -> None:
    unscheduled = workload_module(FULL)
    result = built(unscheduled, tvm_target("nvidia-h100"), directory=tmp_path)
    assert result.artifact_path is None
    assert str(result.error_msg).startswith("refused: ")


@pytest.mark.slow
def test_a_library_without_a_workload_is_not_timed(tmp_path: Path) -> None:
    sch = some_schedules(ms_schedule())[0]
    target = tvm_target("nvidia-h100")
    result = built(sch.mod, target, directory=tmp_path)
    runner = GpuRunner(HOW)
    try:
        arguments = ms.arg_info.ArgInfo.from_prim_func(sch.mod["main"])
        (future,) = runner.run(
            [ms.runner.RunnerInput(str(result.artifact_path), "cuda", arguments)]
        )
        answer = future.result()
    finally:
        runner.close()
    assert answer.run_secs is None
    assert "nothing to check it against" in str(answer.error_msg)


def ms_schedule() -> Any:
    from tvm.s_tir import Schedule

    return Schedule(workload_module(FULL))
