"""The main job: from a spec or torch module to a loadable, checked library."""

from __future__ import annotations

import json

import numpy as np
import pytest

import crossfuse
from crossfuse.compiler.report import make_report
from crossfuse.errors import LoweringRefused, ScheduleRefused, WorkloadRefused
from crossfuse.runtime import load

FFN = "gated_ffn:M=8,K=32,N=64,L=32,dtype=bfloat16,act=silu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> crossfuse.Compiled:
    return crossfuse.compile(FFN, cluster=4, directory=tmp_path_factory.mktemp("ffn"), name="ffn")


def test_spec_gives_one_cluster_kernel(compiled: crossfuse.Compiled) -> None:
    (launch,) = compiled.lowered.image.launches
    assert launch.cluster == (4, 1, 1)
    assert launch.grid[0] == 4
    assert [each.name for each in compiled.lowered.image.buffers if each.output] == ["out"]


def test_cpu_checks_pass(compiled: crossfuse.Compiled) -> None:
    verdicts = crossfuse.check(compiled, gpu=False)
    assert [each.status for each in verdicts] == ["passed"] * 3, verdicts


def test_library_is_loadable_and_says_what_it_is(compiled: crossfuse.Compiled) -> None:
    kernel = load(compiled.artefact.shared_object, check_device=False)
    assert kernel.name == "ffn"
    assert kernel.manifest.metadata["source"] == FFN
    assert kernel.manifest.metadata["cluster"] == 4


def test_trace_in_the_manifest_replays(compiled: crossfuse.Compiled) -> None:
    import tvm

    trace = json.loads(compiled.artefact.manifest.trace or "")
    fresh = tvm.s_tir.Schedule(compiled.source.func)
    tvm.s_tir.Trace.apply_json_to_schedule(trace, fresh)
    tvm.ir.assert_structural_equal(fresh.mod, compiled.schedule.mod)


def test_report_is_json(compiled: crossfuse.Compiled) -> None:
    report = make_report(compiled)
    assert json.loads(json.dumps(report.to_json()))["launches"][0]["cluster"] == [4, 1, 1]
    assert "CTAs of the cluster, axis x" in report.schedule
    assert report.shared_total <= report.shared_limit


def test_default_cluster_is_one_that_fits() -> None:
    compiled = crossfuse.compile("gemm_chain:M=4,K=24,N=20,L=12,dtype=float16")
    assert compiled.lowered.image.launches[0].cluster_size == 4


def test_torch_module_with_three_dimensional_input() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.workload import chain_module

    module = chain_module(24, 40, "float16")
    compiled = crossfuse.compile(module, example_inputs=(torch.randn(2, 3, 24).half(),), cluster=4)
    assert compiled.source.outlined is not None
    assert compiled.source.outlined.M == 6
    assert all(each.status == "passed" for each in crossfuse.check(compiled, gpu=False))


def test_given_schedule_is_not_rescheduled() -> None:
    from crossfuse.schedule.rules.split_k import schedule_split_k
    from crossfuse.workload import parse, prim_func

    schedule = schedule_split_k(prim_func(parse("gemm:M=16,K=64,N=32")), cluster=2)
    compiled = crossfuse.compile(schedule)
    assert compiled.schedule is schedule
    assert np.prod(compiled.lowered.image.launches[0].cluster) == 2


def test_module_without_inputs_is_refused() -> None:
    pytest.importorskip("torch")
    from crossfuse.workload import gated_ffn_module

    with pytest.raises(WorkloadRefused, match=r"found no example inputs; .*pass example_inputs="):
        crossfuse.compile(gated_ffn_module(16, 32))


def test_unknown_source_is_refused() -> None:
    with pytest.raises(WorkloadRefused, match=r"found a float; limit: a workload id or spec"):
        crossfuse.compile(3.0)


def test_cluster_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ScheduleRefused, match=r"found cluster size 5; .*take one of 1, 2, 4, 8, 16"
    ):
        crossfuse.compile(FFN, cluster=5)


def test_one_reason_of_all_ways_is_the_refusal() -> None:
    """Not that some size of cluster would fit."""
    with pytest.raises(LoweringRefused) as caught:
        crossfuse.compile("gemm:M=16,K=64,N=96,dtype=float32", rule="tensor")
    assert str(caught.value) == (
        "tile-operand: product of 'gemm0_local': found operands of float32 and float32; limit: two "
        "of float16, bfloat16, float8_e4m3fn, float8_e5m2 of one width. Instead: convert the "
        "operands, or leave the stages out for the general lowering."
    )


def test_unknown_target_is_refused() -> None:
    with pytest.raises(crossfuse.RefusedError, match=r"nvidia-h100, nvidia-h200"):
        crossfuse.compile(FFN, target="nvidia-a100")
