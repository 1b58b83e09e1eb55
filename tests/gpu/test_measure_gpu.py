"""Candidates measured on the GPU by the process itself, and a search that ends in a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpu.meta_schedule.loggers import drop_nameless_handlers
from crossfuse.bench.job import Job, Timing
from crossfuse.meta_schedule.build import Conditions
from crossfuse.meta_schedule.candidate import Candidate
from crossfuse.meta_schedule.records import read_records
from crossfuse.meta_schedule.tune import make_bundle, measure_bundle, open_bundle

pytest.importorskip("torch")

SPEC = "gemm_chain:M=64,K=256,N=512,L=256,dtype=bfloat16,act=relu"
HOW = Conditions(job=Job("", "ours", repeats=3, calls=4), timeout=60.0, builders=4)
WAYS = {
    "registers": {"parts": 8},
    "dsm": {"cluster": 4},
    "l2": {},
    "global": {},
    "eager": {},
}


def test_each_family_is_right_and_timed(tmp_path: Path) -> None:
    wanted = [
        Candidate.from_json({"spec": SPEC, "family": family, "tiles": tiles}, "a test")
        for family, tiles in WAYS.items()
    ]
    bundle = tmp_path / "bundle"
    make_bundle(wanted, bundle, HOW, build_there=True)
    measure_bundle(open_bundle(bundle), HOW)
    records = {
        each.candidate.family: each for each in read_records(bundle / "results.jsonl").records
    }
    assert {name: each.status for name, each in records.items()} == dict.fromkeys(WAYS, "ok")
    assert all(each.check == "passed" and each.attempts == 1 for each in records.values())
    # Shapes like this take microseconds; a launch that did nothing would have failed the check.
    assert all(0 < (each.microseconds or 0) < 1000 for each in records.values())


@pytest.mark.parametrize("named", [True, False], ids=["spec", "function"])
def test_a_search_runs_unchanged(tmp_path: Path, named: bool) -> None:
    from tvm.s_tir import meta_schedule as ms

    from crossfuse.hardware import tvm_target
    from crossfuse.meta_schedule.builder import GpuRunner, NvccBuilder
    from crossfuse.schedule.rules.parted_ffn import RegisterTiles, schedule_register_ffn
    from crossfuse.workload import parse, prim_func

    def space(sch: object) -> list[object]:
        func = sch.mod["main"]  # type: ignore[attr-defined]
        tiles = [RegisterTiles(parts=parts) for parts in (4, 8)]
        return [schedule_register_ffn(func, tiles=each, constant_weights=True) for each in tiles]

    drop_nameless_handlers()
    seen: list[Timing] = []
    func = prim_func(parse(SPEC))
    runner = GpuRunner(HOW, lambda path, spec, timing: seen.append(timing))
    try:
        database = ms.tune_tir(
            func,
            tvm_target("nvidia-h100"),
            str(tmp_path),
            max_trials_global=2,
            num_trials_per_iter=2,
            builder=NvccBuilder(SPEC if named else func),
            runner=runner,
            cost_model="random",
            space=ms.space_generator.ScheduleFn(space, [], [], {}),
            strategy="replay-trace",
            seed=0,
        )
    finally:
        runner.close()
    assert {each.status for each in seen} == {"ok"}
    assert all(each.worst_before is not None and each.worst_before <= 1 for each in seen)
    assert len(database) == len(seen)


def test_a_server_of_a_tracker_measures(tmp_path: Path) -> None:
    import json

    pytest.importorskip("tornado")
    from tvm.s_tir.meta_schedule.testing.local_rpc import LocalRPC
    from typer.testing import CliRunner

    from crossfuse.cli import app

    # A server that forks cannot use CUDA once its parent did.
    with LocalRPC(silent=True, no_fork=True) as local:
        there = f"{local.tracker_host}:{local.tracker_port}:{local.tracker_key}"
        words = ["tune", SPEC, "--work-dir", str(tmp_path), "--no-learn", "--json", "--trials", "4"]
        out = CliRunner().invoke(app, [*words, "--rpc", there, "--timeout", "60"])
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["best"]["measured"]
    records = read_records(tmp_path / "records.jsonl").records
    assert {each.status for each in records} == {"ok"}, [each.message for each in records]
    assert {each.check for each in records} == {"passed"}
