"""``ms.tune_tir`` and ``tune_relax`` with our search, unchanged: planted times, no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.meta_schedule.loggers import drop_nameless_handlers
from cpu.meta_schedule.planted import NoteBuilder, PlantedRunner
from crossfuse.hardware import device, tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.builder import import_intrinsics
from crossfuse.meta_schedule.plugs import plugs
from crossfuse.meta_schedule.records import workload_module
from crossfuse.meta_schedule.search import KernelCost, KernelFeatures
from crossfuse.meta_schedule.task import (
    FusedSpace,
    MutateKernel,
    Task,
    Tasks,
    VerifyLowered,
    task_of,
)
from crossfuse.planner.tune.cost_model import NAMES, CostModel
from crossfuse.schedule.planned import note
from crossfuse.workload import prim_func, resolve

pytest.importorskip("xgboost")
ms = pytest.importorskip("tvm.s_tir.meta_schedule")

H100 = device("nvidia-h100")
SPEC = "G4:M=64"
TASKS = Tasks(H100)


@pytest.fixture(scope="module", autouse=True)
def _intrinsics() -> None:
    import_intrinsics()  # once, before the time of any context is measured


def module(text: str = SPEC) -> Any:
    return workload_module(str(resolve(text)))


def task(text: str = SPEC) -> Task:
    found = TASKS.of(module(text))
    assert found is not None
    return found


def tune(folder: Path, trials: int, runner: Any, name: str = "built", **given: Any) -> Any:
    parts = {**plugs(), **given}
    drop_nameless_handlers()
    return ms.tune_tir(
        prim_func(resolve(SPEC)),
        tvm_target("nvidia-h100"),
        str(folder / "work"),
        trials,
        num_trials_per_iter=4,
        builder=NoteBuilder(folder / name),
        runner=runner,
        seed=1,
        **parts,
    )


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory):
    """A search in which one family hangs, and a second one in the same folder."""
    folder = tmp_path_factory.mktemp("tuned")
    first = PlantedRunner(TASKS, module(), broken="global")
    model = CostModel()
    tune(folder, 8, first, **plugs(model=model))
    second = PlantedRunner(TASKS, module(), broken="global")
    tune(folder, 4, second, "again")
    return folder, first, second, model


@pytest.mark.slow
def test_hung_candidates_cost_nothing_else(tuned) -> None:
    folder, first, second, _ = tuned
    assert len(first.times) == 8
    assert len(second.times) == 4
    assert None in first.times
    records = ms.database.JSONDatabase(work_dir=str(folder / "work")).get_all_tuning_records()
    failed = [each for each in records if float(each.run_secs[0]) > 1]
    assert len(records) == 12
    assert len(failed) == [*first.times, *second.times].count(None)


def test_nothing_is_measured_twice_over_two_searches(tuned) -> None:
    _, first, second, _ = tuned
    assert len({*first.asked, *second.asked}) == 12


def test_the_model_learns_what_was_measured(tuned) -> None:
    assert len(tuned[3]) == 8


def test_the_best_record_replays_and_lowers(tuned) -> None:
    folder, first, second, _ = tuned
    database = ms.database.JSONDatabase(work_dir=str(folder / "work"))
    best = database.query_schedule(module(), tvm_target("nvidia-h100"), "main")
    times = [
        (time, said)
        for time, said in zip(
            [*first.times, *second.times], [*first.asked, *second.asked], strict=True
        )
        if time is not None
    ]
    assert json.loads(str(note(best.trace))) == json.loads(min(times)[1])
    assert lower(best).image.launches


def test_designs_are_the_best_of_each_family() -> None:
    space = FusedSpace(TASKS, designs=1)
    context = ms.TuneContext(mod=module(), target=tvm_target("nvidia-h100"), space_generator=space)
    designs = context.generate_design_space()
    said = [json.loads(str(note(each.trace)))["family"] for each in designs]
    assert said == [each.family for each in task().space.groups]


@pytest.mark.slow
def test_mutations_are_neighbours_that_lower() -> None:
    mutator = MutateKernel(TASKS, seed=3)
    context = ms.TuneContext(mod=module(), target=tvm_target("nvidia-h100"))
    mutator._initialize_with_tune_context(context)
    start = int(task().space.order[0])
    trace = task().schedule(start).trace
    assert mutator.apply(ms_schedule().trace) is None
    reached = set()
    for _ in range(4):
        found = mutator.apply(trace)
        sch = ms_schedule()
        found.apply_to_schedule(sch, remove_postproc=False)
        point = task().point(sch.trace)
        assert point in task().space.moves(start).values()
        assert lower(sch).image.launches
        reached.add(point)
    assert len(reached) > 1
    again = mutator.clone()
    again._initialize_with_tune_context(context)
    assert task().point(again.apply(trace)) in reached


def test_a_schedule_that_does_not_lower_is_turned_down() -> None:
    check = VerifyLowered(H100)
    sch = ms_schedule()
    assert check.apply(sch)
    sch.annotate(sch.get_sblock("root"), "crossfuse.plan", "{}")
    assert not check.apply(sch)
    assert check.reason
    assert check.apply(task().schedule(int(task().space.order[0])))
    assert not check.reason


def test_scores_and_features_of_candidates(tmp_path: Path) -> None:
    context = ms.TuneContext(mod=module(), target=tvm_target("nvidia-h100"))
    order = task().space.order
    schedules = [task().schedule(int(order[each])) for each in (0, 200)] + [ms_schedule()]
    arguments = ms.arg_info.ArgInfo.from_prim_func(task().func)
    candidates = [ms.MeasureCandidate(each, arguments) for each in schedules]
    cost = KernelCost(TASKS)
    scores = cost.predict(context, candidates)
    assert scores[0] > scores[1] > scores[2] == 0
    rows = KernelFeatures(TASKS).extract_from(context, candidates)
    assert [each.numpy().shape for each in rows] == [(1, len(NAMES))] * 3
    assert not rows[2].numpy().any()
    results = [ms.runner.RunnerResult([each], None) for each in (5e-5, 1e-5, 1e-3)]
    cost.update(context, candidates, results)
    cost.save(str(tmp_path / "model.json"))
    other = KernelCost(TASKS)
    other.load(str(tmp_path / "model.json"))
    assert len(other.model) == 2
    assert np.allclose(other.predict(context, candidates), cost.predict(context, candidates))


@pytest.mark.parametrize(
    "text", ["G4:weights=nk", "G4:weights=kn", "S3:M=16", "gemm:M=64,K=64,N=64"]
)
def test_a_function_says_how_its_weights_lie(text: str) -> None:
    spec = resolve(text)
    assert task_of(prim_func(spec), H100).space.shape.k_major == (spec.weights == "nk")


def model_with_others(text: str = SPEC) -> Any:
    """A chain, and a rectifier that is none."""
    from tvm import relax, te

    func = prim_func(resolve(text))
    builder = relax.BlockBuilder()
    chain = builder.add_func(func.without_attr("global_symbol"), "chain")
    values = [
        relax.Var(f"v{number}", relax.TensorType([int(n) for n in each.ty.shape], each.ty.dtype))
        for number, each in enumerate(func.params)
    ]
    with builder.function("main", values[:-1]):
        with builder.dataflow():
            out = builder.emit(relax.call_tir(chain, values[:-1], out_ty=values[-1].ty))
            found = builder.emit_output(
                builder.call_te(lambda x: te.compute(x.shape, lambda i, j: -x[i, j], "neg"), out)
            )
        builder.emit_func_output(found)
    return builder.finalize()


@pytest.mark.slow
def test_a_model_with_other_operators_is_tuned(tmp_path: Path) -> None:
    drop_nameless_handlers()
    target = tvm_target("nvidia-h100")
    parts = plugs(others=ms.search_strategy.ReplayTrace())
    runner = PlantedRunner(TASKS, module())
    database = ms.relax_integration.tune_relax(
        model_with_others(),
        {},
        target,
        str(tmp_path / "work"),
        6,
        max_trials_per_task=3,
        num_trials_per_iter=3,
        builder=NoteBuilder(tmp_path / "built"),
        runner=runner,
        seed=1,
        **parts,
    )
    records = database.get_all_tuning_records()
    ours = [each for each in records if note(each.trace) is not None]
    assert len(ours) == 3
    assert len(records) > 3


def ms_schedule() -> Any:
    from tvm.s_tir import Schedule

    return Schedule(module())
