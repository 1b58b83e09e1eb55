"""TVM's own tracker and RPC runner take what the builder makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpu.meta_schedule.test_measure import FULL, candidate
from crossfuse.cli import app
from crossfuse.hardware import device, tvm_target
from crossfuse.measure.job import LIBRARY, Job, Request, Way
from crossfuse.meta_schedule.builder import NvccBuilder
from crossfuse.meta_schedule.candidate import schedule_candidate
from crossfuse.meta_schedule.records import read_records, workload_module
from crossfuse.meta_schedule.rpc import PROTOCOL, RpcSession, Tracker

pytest.importorskip("tornado")
tvm = pytest.importorskip("tvm")
ms = pytest.importorskip("tvm.s_tir.meta_schedule")


@pytest.fixture(scope="module")
def rpc() -> Iterator[Any]:
    """The configuration of a tracker with one server, on this machine."""
    from tvm.s_tir.meta_schedule.testing.local_rpc import LocalRPC

    with LocalRPC(silent=True) as local:
        yield ms.runner.RPCConfig(local.tracker_host, local.tracker_port, local.tracker_key, 1, 60)


def build(mod: Any, target: Any) -> str:
    (result,) = NvccBuilder(FULL).build([ms.builder.BuilderInput(mod, target)])
    assert result.error_msg is None
    return str(result.artifact_path)


@pytest.mark.slow
def test_a_module_for_the_cpu_is_timed_by_a_server(rpc: Any) -> None:
    module = workload_module(FULL)
    path = build(module, tvm.target.Target("llvm"))
    runner = ms.runner.RPCRunner(rpc, ms.runner.EvaluatorConfig(1, 1, 0))
    arguments = ms.arg_info.ArgInfo.from_prim_func(module["main"])
    (future,) = runner.run([ms.runner.RunnerInput(path, "cpu", arguments)])
    result = future.result()
    assert result.error_msg is None
    assert [float(each) > 0 for each in result.run_secs] == [True]


def test_a_server_loads_a_cluster_kernel(rpc: Any) -> None:
    """As far as a machine without a GPU goes: the function is there and names what it lacks."""
    each = candidate("registers", tiles={"parts": 4})
    path = build(schedule_candidate(each, device("nvidia-h100")).mod, tvm_target("nvidia-h100"))
    session = rpc.connect_server()
    session.upload(path, "kernel.so")
    module = session.load_module("kernel.so")
    assert module["main"]
    assert module.entry_name == "main"
    with pytest.raises(Exception, match="argument-count"):
        module["main"]()


def tracker(rpc: Any) -> Tracker:
    return Tracker(rpc.tracker_host, rpc.tracker_port, rpc.tracker_key)


def served(rpc: Any, spec: str, library: str, folder: Path) -> dict[str, Any]:
    """What the process that measures answers, on the server's CPU."""
    serve = RpcSession(tracker(rpc), 60, "cpu").load()
    job = Job(spec, "ours", protocol=PROTOCOL, repeats=3)
    request = Request(job, Way(LIBRARY, library), str(folder))
    assert serve(asdict(replace(request, measure=False))) is None
    found: dict[str, Any] = serve(asdict(request))
    return found


def test_results_of_a_server_are_checked(rpc: Any, tmp_path: Path) -> None:
    path = build(workload_module(FULL), tvm.target.Target("llvm"))
    found = served(rpc, FULL, path, tmp_path)
    assert found["status"] == "ok", found["message"]
    assert 0 < found["minimum"] <= found["microseconds"]
    assert 0 < found["worst_before"] == found["worst_after"] <= 1
    # The same tensors, another activation.
    wrong = served(rpc, FULL.replace("act=relu", "act=gelu"), path, tmp_path)
    assert (wrong["status"], wrong["microseconds"]) == ("wrong", None)
    assert "element-error" in wrong["message"]


@pytest.mark.slow
def test_the_command_measures_behind_a_tracker(rpc: Any, tmp_path: Path) -> None:
    """On a server without a GPU every kernel is refused there, which is a record."""
    words = ["tune", FULL, "--work-dir", str(tmp_path), "--no-learn", "--json", "--trials", "2"]
    out = CliRunner().invoke(app, [*words, "--jobs", "2", "--rpc", str(tracker(rpc))])
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["records"] == 2
    for each in read_records(tmp_path / "records.jsonl").records:
        assert each.build.status == "ok", each.build.message
        assert (each.job.protocol, each.gpu) == (PROTOCOL, f"rpc {tracker(rpc)}")
        assert each.status in ("ok", "refused", "failed"), each.message
