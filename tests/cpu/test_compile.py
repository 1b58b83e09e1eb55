"""The main job: from a spec or torch module to a loadable, checked library."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import crossfuse
from crossfuse.compiler import compiled as choosing
from crossfuse.compiler.compiled import Wanted, choose
from crossfuse.compiler.options import Option
from crossfuse.compiler.report import choice_text, make_report
from crossfuse.compiler.source import read_source
from crossfuse.errors import (
    ArtefactRefused,
    LoweringRefused,
    ScheduleRefused,
    WorkloadRefused,
    refuse,
)
from crossfuse.hardware import device
from crossfuse.lower.image import start_early
from crossfuse.markers import CONSTANT
from crossfuse.runtime import load
from crossfuse.workload import parse, prim_func

H100 = device("nvidia-h100")
FFN = "gated_ffn:M=16,K=64,N=256,L=128,dtype=bfloat16,act=silu"
SMALL = "gated_ffn:M=8,K=32,N=64,L=32,dtype=bfloat16,act=silu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> crossfuse.Compiled:
    return crossfuse.compile(FFN, directory=tmp_path_factory.mktemp("ffn"), name="ffn")


@pytest.mark.slow
def test_a_spec_gives_the_kernel_of_its_plan(compiled: crossfuse.Compiled) -> None:
    plan = crossfuse.plan(FFN)
    assert compiled.plan == plan
    (launch,), (kernel,) = compiled.lowered.image.launches, plan.kernels
    assert (launch.cluster_size, launch.grid[0]) == (kernel.cluster, kernel.ctas) == (4, 16)
    assert [each.name for each in compiled.lowered.image.buffers if each.output] == ["out"]
    assert launch.tensor_maps


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
    assert report.choice.startswith("planned: registers, ")
    assert "CTAs of the cluster, axis x" in report.schedule
    assert report.shared_total <= report.shared_limit


def test_what_the_hopper_pipeline_refuses_gets_ordinary_instructions() -> None:
    """Of the first cluster size that fits; the report says why."""
    compiled = crossfuse.compile("gemm_chain:M=4,K=24,N=20,L=12,dtype=float32")
    assert compiled.lowered.image.launches[0].cluster_size == 4
    assert make_report(compiled).choice == (
        "not planned: a kernel of ordinary instructions, since the Hopper pipeline has none: "
        "operands of float32 and float32"
    )
    with pytest.raises(LoweringRefused, match="operands of float32"):
        crossfuse.compile("gemm_chain:M=4,K=24,N=20,L=12,dtype=float32", rule="tensor")


@pytest.mark.slow
def test_threads_are_for_who_asks() -> None:
    compiled = crossfuse.compile(SMALL, rule="threads", cluster=4)
    assert compiled.plan is None
    assert compiled.artefact.manifest.metadata["rule"] == "threads"
    (launch,) = compiled.lowered.image.launches
    assert launch.cluster == (4, 1, 1) and not launch.tensor_maps
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3
    with pytest.raises(ScheduleRefused, match=r"found 'dsm' with rule='threads'; limit: 'auto'"):
        crossfuse.compile(SMALL, rule="threads", placement="dsm")


@pytest.mark.slow
def test_where_not_to_fuse_is_faster_the_report_says_so() -> None:
    chosen = choose(read_source("gemm_chain:M=512,K=4096,N=256,L=4096,dtype=bfloat16"), H100)
    assert chosen.option.plan is not None and chosen.option.plan.family != "eager"
    assert "which is faster: the best fused kernel is compiled" in choice_text(chosen.why)


def early(source: Any, example_inputs: Any = None, constant: bool | None = None) -> bool:
    """Whether a kernel loads weights while the kernel before it may still run."""
    read = read_source(source, example_inputs)
    return CONSTANT in str(choose(read, H100, Wanted(constant_weights=constant)).schedule.mod)


@pytest.mark.slow
def test_sources_say_whether_their_weights_are_constant() -> None:
    """Those of a named workload are, and arguments of a function are not."""
    func = prim_func(parse(SMALL))
    assert early(SMALL) and not early(SMALL, constant=False)
    assert early(func, constant=True) and not early(func)
    assert early("rmsnorm_gemm:tokens=64,K=128,N=128")


@pytest.mark.slow
def test_parameters_of_a_model_are_constant() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.relax import import_torch
    from crossfuse.workload import gated_ffn_module

    class Free(torch.nn.Module):  # type: ignore[misc]
        """All weights are inputs."""

        def forward(self, x: Any, first: Any, second: Any) -> Any:
            return torch.relu(x @ first) @ second

    module, x = gated_ffn_module(64, 128, "bfloat16"), torch.randn(4, 64).bfloat16()
    exported = torch.export.export(module, (x,))
    square = torch.randn(64, 64).bfloat16()
    assert early(module, (x,)) and early(exported) and early(import_torch(module, (x,)).mod)
    assert not early(module, (x,), constant=False)
    assert not early(Free().eval(), (x, square, square))


@pytest.mark.slow
def test_an_exported_program_is_compiled() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.workload import chain_module

    exported = torch.export.export(chain_module(32, 64), (torch.randn(4, 32).bfloat16(),))
    compiled = crossfuse.compile(exported)
    assert compiled.plan is not None
    assert [each.status for each in crossfuse.check(compiled, gpu=False)] == ["passed"] * 3


@pytest.mark.slow
def test_check_takes_what_compile_takes() -> None:
    verdicts = crossfuse.check("softmax:rows=3,cols=64", gpu=False)
    assert [each.status for each in verdicts] == ["passed"] * 3


@pytest.mark.slow
def test_torch_module_with_three_dimensional_input() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.workload import chain_module

    module = chain_module(24, 40, "float16")
    compiled = crossfuse.compile(module, example_inputs=(torch.randn(2, 3, 24).half(),))
    assert compiled.source.outlined is not None
    assert compiled.source.outlined.M == 6
    assert all(each.status == "passed" for each in crossfuse.check(compiled, gpu=False))


def test_given_schedule_is_not_rescheduled() -> None:
    from crossfuse.schedule.rules.threads import schedule_split_k

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
    for inputs in (None, (1,)):
        with pytest.raises(WorkloadRefused, match=r"found a float; limit: a workload id or spec"):
            crossfuse.compile(3.0, example_inputs=inputs)


@pytest.mark.parametrize(
    ("kind", "advice"), [("matmull", "choose one"), ("sofmax", "write 'softmax'"), ("layer", "")]
)
def test_unknown_kinds_are_told_all_that_compile(kind: str, advice: str) -> None:
    limit = "gated_ffn, gemm_chain, gemm, gated_gemm, conv_chain, .*, moment_of_inertia, layers"
    with pytest.raises(
        WorkloadRefused, match=rf"found '{kind}'; limit: one of {limit}. .*{advice}"
    ):
        crossfuse.compile(f"{kind}:rows=4,cols=64")


def test_example_inputs_that_would_be_ignored_are_refused() -> None:
    x = np.zeros((16, 64))
    for source in ("gemm:M=16,K=64,N=16", prim_func(parse("gemm:M=16,K=64,N=16"))):
        with pytest.raises(WorkloadRefused, match=r"found 1 of them for .*limit: those of a torch"):
            crossfuse.compile(source, example_inputs=(x,))


@pytest.mark.parametrize("rows", ["m", 0])
def test_extents_that_are_no_sizes_are_refused(rows: Any) -> None:
    from tvm import te, tirx

    extent = tirx.Var("m", "int32") if rows == "m" else rows
    x = te.placeholder((extent, 64), "float16", name="X")
    w = te.placeholder((64, 32), "float16", name="W")
    k = te.reduce_axis((0, 64), name="k")

    def product(i: Any, j: Any) -> Any:
        return te.sum(x[i, k].astype("float32") * w[k, j].astype("float32"), axis=k)

    func = te.create_prim_func([x, w, te.compute((extent, 32), product, name="Y")])
    with pytest.raises(WorkloadRefused, match=rf"'X': found float16\[{rows}, 64\]; limit: extents"):
        crossfuse.compile(func)


def test_calls_that_the_module_was_not_compiled_for_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.workload import chain_module

    x = torch.zeros(2, 8, 32, dtype=torch.bfloat16)
    kernel = crossfuse.compile(chain_module(32, 64), example_inputs=(x,))
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((), "none"),
        ((None,), "a NoneType"),
        ((np.zeros((2, 8, 32)),), "a ndarray"),
        ((x.float(),), r"float32\[2, 8, 32\]"),
        ((x.reshape(8, 2, 32),), r"bfloat16\[8, 2, 32\]"),  # as many elements, but another shape
        ((x, x), r"bfloat16\[2, 8, 32\], bfloat16\[2, 8, 32\]"),
    ]
    for inputs, found in wrong:
        with pytest.raises(ArtefactRefused, match=rf"found {found}; limit: CUDA tensors of torch"):
            kernel(*inputs)
    with pytest.raises(ArtefactRefused, match=r"found cpu:0; limit: a CUDA device"):
        kernel(x)


def test_cluster_that_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ScheduleRefused, match=r"found cluster size 5; .*take one of 1, 2, 4, 8, 16"
    ):
        crossfuse.compile(SMALL, rule="threads", cluster=5)


def test_one_reason_of_all_ways_is_the_refusal() -> None:
    """Not that some size of cluster would fit."""
    with pytest.raises(LoweringRefused) as caught:
        crossfuse.compile("gemm:M=16,K=64,N=96,dtype=float32", rule="tensor")
    assert str(caught.value) == (
        "tile-operand: product of 'gemm0_local': found operands of float32 and float32; limit: two "
        "of float16, bfloat16, float8_e4m3fn, float8_e5m2 of one width. Instead: convert the "
        "operands, or leave the stages out for the general lowering."
    )


def refusals(count: int) -> list[tuple[str, str]]:
    """Rules and findings of ways that fail, the longest finding first; two of each rule."""
    return [
        (f"rule{rule}", f"{'x' * 20 * rule} of {size} CTAs")
        for rule in range(count, 0, -1)
        for size in (16, 8)
    ]


@pytest.mark.parametrize("count", [2, 40])
def test_the_shortest_reason_of_each_rule_is_told(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def way(rule: str, found: str) -> Option:
        def make() -> Any:
            raise refuse(ScheduleRefused, rule, "tile", found=found, limit="", instead="")

        return Option(make)

    options = [way(*each) for each in refusals(count)]
    monkeypatch.setattr(choosing, "options_of", lambda *_: options)
    with pytest.raises(ScheduleRefused) as caught:
        choose(read_source("gemm:M=16,K=64,N=16"), device("nvidia-h100"))
    found = caught.value.refusal.found
    first = f"rule1: {'x' * 20} of 8 CTAs; rule2: {'x' * 40} of 8 CTAs"
    if count == 2:
        assert found == first
        return
    # What is too long for a screen is named without its finding.
    assert found.startswith(f"{first}; rule3: ")
    assert found.endswith(f"; and {', '.join(f'rule{each}' for each in range(6, 41))}")


def test_unknown_target_is_refused() -> None:
    with pytest.raises(crossfuse.RefusedError, match=r"nvidia-h100, nvidia-h200"):
        crossfuse.compile(FFN, target="nvidia-a100")


@pytest.mark.slow
def test_kernels_that_start_early() -> None:
    """Products of constant weights wait where they have to, others before all that they load."""
    text = "gemm:M=16,N=64,K=64,dtype=bfloat16,weights=nk"
    for constant, waits in ((True, False), (False, True)):
        made = crossfuse.compile(text, early=True, constant_weights=constant)
        assert [each.early for each in made.artefact.manifest.launches] == [True]
        assert ("  crossfuse_await_kernel_before();" in made.lowered.image.cuda) == waits
        assert made.kernel.as_first().buffers == made.kernel.buffers
    plain = crossfuse.compile("softmax:rows=16,cols=64,dtype=bfloat16").lowered.image
    early = crossfuse.compile("softmax:rows=16,cols=64,dtype=bfloat16", early=True).lowered.image
    assert not plain.launches[0].early and early == start_early(plain)
