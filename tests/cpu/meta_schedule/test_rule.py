"""Our ScheduleRule in TVM's own ``PostOrderApply``, beside the rules of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpu.meta_schedule.loggers import drop_nameless_handlers
from cpu.meta_schedule.planted import NoteBuilder, PlantedRunner
from cpu.meta_schedule.test_search import SPEC, TASKS, model_with_others, module, task
from crossfuse.bench.problem import TAG, name_of
from crossfuse.hardware import tvm_target
from crossfuse.lower.extract import lower
from crossfuse.meta_schedule.builder import import_intrinsics
from crossfuse.meta_schedule.task import ScheduleKernels, post_order_apply
from crossfuse.schedule.planned import note
from crossfuse.workload import prim_func, resolve

ms = pytest.importorskip("tvm.s_tir.meta_schedule")
tvm = pytest.importorskip("tvm")

H100 = tvm_target("nvidia-h100")


def designs(mod: Any, rules: list[Any]) -> list[Any]:
    space = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=[], mutator_probs={})
    context = ms.TuneContext(mod=mod, target=H100, space_generator=space)
    return list(context.generate_design_space())


def rectifier() -> Any:
    from tvm import te

    x = te.placeholder((256, 256), "float16", name="x")
    func = te.create_prim_func([x, te.compute(x.shape, lambda i, j: -x[i, j], "neg")])
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "cuda", "cuda-tensorcore"])
def test_designs_are_the_best_of_each_family_whatever_rules_follow(kind: str) -> None:
    import_intrinsics()  # which rules of tensor cores look for
    others = ms.ScheduleRule.create(kind) if kind else []
    found = designs(module(), [ScheduleKernels(TASKS, designs=2), *others])
    assert len(found) == 2 * len(task().space.groups)
    wanted = {str(note(each.trace)): each for each in task().designs(2)}
    assert {str(note(each.trace)) for each in found} == set(wanted)
    for each in found[::2]:
        assert lower(each).image == lower(wanted[str(note(each.trace))]).image


def test_other_functions_are_left_to_the_rules_of_the_target() -> None:
    (only,) = designs(rectifier(), [ScheduleKernels(TASKS)])
    root = only.get(only.get_sblock("root"))
    assert dict(root.annotations) == {TAG: name_of(rectifier())}
    rules = ms.ScheduleRule.create("cuda")
    ours = designs(rectifier(), [ScheduleKernels(TASKS), *rules])
    # What TVM samples differs from run to run, what it does is the same.
    alone = kinds(designs(rectifier(), rules))
    assert [[each for each in found if each != "Annotate"] for found in kinds(ours)] == alone


def kinds(schedules: list[Any]) -> list[list[str]]:
    return [[str(each.kind.name) for each in sch.trace.insts] for sch in schedules]


STRATEGIES = {
    "replay-trace": ms.search_strategy.ReplayTrace(),
    "evolutionary": ms.search_strategy.EvolutionarySearch(population_size=8, genetic_num_iters=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_search_with_tvms_own_parts_stores_what_replays(tmp_path: Path, strategy: Any) -> None:
    drop_nameless_handlers()
    runner = PlantedRunner(TASKS, module())
    ms.tune_tir(
        prim_func(resolve(SPEC)),
        H100,
        str(tmp_path / "work"),
        4,
        num_trials_per_iter=4,
        builder=NoteBuilder(tmp_path / "built"),
        runner=runner,
        space=post_order_apply(TASKS, designs=1),
        strategy=strategy,
        cost_model="random",
        seed=1,
    )
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "work"))
    assert len(database.get_all_tuning_records()) == len(runner.times) > 0
    best = database.query_schedule(module(), H100, "main")
    fastest = min(zip(runner.times, runner.asked, strict=True))
    assert json.loads(str(note(best.trace))) == json.loads(fastest[1])
    assert lower(best).image.launches


def test_a_model_with_other_operators_is_tuned_by_both_rules(tmp_path: Path) -> None:
    drop_nameless_handlers()
    database = ms.relax_integration.tune_relax(
        model_with_others(),
        {},
        H100,
        str(tmp_path / "work"),
        4,
        max_trials_per_task=2,
        num_trials_per_iter=2,
        builder=NoteBuilder(tmp_path / "built"),
        runner=PlantedRunner(TASKS, module()),
        space=post_order_apply(TASKS, designs=1),
        strategy="replay-trace",
        cost_model="random",
        seed=1,
    )
    records = database.get_all_tuning_records()
    ours = [each for each in records if note(each.trace) is not None]
    assert len(ours) == 2
    assert len(records) == 4
