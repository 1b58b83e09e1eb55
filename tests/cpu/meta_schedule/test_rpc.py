"""TVM's own tracker and RPC runner take what the builder makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cpu.meta_schedule.test_measure import FULL, candidate
from crossfuse.hardware import device, tvm_target
from crossfuse.meta_schedule.builder import NvccBuilder
from crossfuse.meta_schedule.database import workload_module
from crossfuse.meta_schedule.scheduled import schedule_candidate

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
