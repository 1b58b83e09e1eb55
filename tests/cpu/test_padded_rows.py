"""Rows that are no multiple of 16 bytes: kernels of the Hopper pipeline on padded copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import crossfuse
from cpu.hopper.checkers import emulated
from crossfuse.compiler import read_source
from crossfuse.compiler.compiled import options_of
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import LoweringRefused, PlanRefused, ScheduleRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import buffer_specs, lower
from crossfuse.markers import unpadded_shapes
from crossfuse.planner.choice import not_fusing
from crossfuse.planner.plan import ranked
from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows
from crossfuse.schedule.planned import rank_function
from crossfuse.workload import adversarial_inputs, check, parse, random_inputs
from crossfuse.workload.build import aligned, form_of

CASES = {
    "[n, k]": "gemm_chain:M=40,K=65,N=131,L=65,dtype=float16,act=gelu,weights=nk,bias=first+last",
    "[k, n]": "gemm_chain:M=40,K=65,N=131,L=65,dtype=bfloat16,act=relu",
    "gated": "gated_ffn:M=5,K=33,N=77,L=33,dtype=bfloat16,residual=out",
    "one product": "gemm:M=70,K=129,N=45,dtype=float16,bias=last",
    "intermediate alone": "gemm_chain:M=16,K=64,N=99,L=99,dtype=bfloat16,weights=nk,bias=first",
    "8 bits": "gemm_chain:M=16,K=40,N=72,L=24,dtype=float8_e4m3fn,weights=nk,out=bfloat16",
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right(name: str) -> None:
    spec = parse(CASES[name])
    compiled = crossfuse.compile(CASES[name], target="nvidia-h100", rule="tensor")
    image, inputs = compiled.lowered.image, random_inputs(spec)
    assert {each.name: each.shape for each in image.buffers if not each.output} == spec.inputs
    assert image.launches[0].symbol == "main_pad"
    emulated(spec, image, inputs, orders=1)
    sequential = run_sequential(compiled.schedule, inputs)
    sequential.raise_if_wrong()
    check(spec, inputs, sequential.outputs["out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "families"), [(389, {"dsm", "global", "l2", "registers"}), (390, {"dsm"})]
)
def test_kernels_of_every_family_are_right(columns: int, families: set[str]) -> None:
    """Not only the first choice: parts of a sum lie in rows that no vector of 16 bytes begins."""
    text = f"gated_ffn:M=2,K=66,N=643,L={columns},dtype=bfloat16,act=gelu_tanh"
    spec, left = parse(text), set(families)
    inputs = random_inputs(spec)
    for option in options_of(read_source(text), device("nvidia-h200")):
        if option.plan is None or option.plan.family not in left:
            continue
        left.remove(option.plan.family)
        compiled = crossfuse.compile(text, target="nvidia-h200", plan=option.plan)
        emulated(spec, compiled.lowered.image, inputs, orders=1)
    assert not left


@pytest.mark.slow
def test_adversarial_inputs() -> None:
    spec = parse(CASES["gated"])
    image = crossfuse.compile(CASES["gated"], target="nvidia-h100").lowered.image
    for inputs in dict(adversarial_inputs(spec)).values():
        emulated(spec, image, inputs, orders=1)


@pytest.mark.slow
def test_infinite_rows_meet_no_padding() -> None:
    """Zeros of a wider intermediate would turn this one row's zeros into numbers that are none."""
    spec = parse(CASES["[k, n]"])
    inputs = random_inputs(spec)
    inputs["A"][0, 0], inputs["B"][0] = np.inf, -1
    image = crossfuse.compile(CASES["[k, n]"], target="nvidia-h100").lowered.image
    report = crossfuse.emulate.cuda.emulate(image, inputs, orders=1)
    report.raise_if_wrong()
    assert (report.outputs["out"][0] == 0).all()


def test_copies_that_are_not_made_are_caught() -> None:
    image = crossfuse.compile(CASES["[k, n]"], target="nvidia-h100").lowered.image
    inputs = random_inputs(parse(CASES["[k, n]"]))
    faulty = replace(image, launches=image.launches[1:])
    report = crossfuse.emulate.cuda.emulate(faulty, inputs, orders=1)
    assert "uninitialised-read" in {each.kind for each in report.findings}


def test_a_timeline_stays_as_it_is() -> None:
    compiled = crossfuse.compile(CASES["[k, n]"], target="nvidia-h100")
    image = lower(compiled.schedule, timeline=True).image
    assert [each.shape for each in image.buffers[:4]] == [(40, 65), (65, 131), (131, 65), (40, 65)]
    assert image.buffers[4].dtype == "int64"


def test_rows_of_whole_boxes_stay() -> None:
    for text in ("gemm_chain:M=3,K=64,N=128,L=72", "gemm:M=3,K=64,N=99,weights=nk"):
        assert aligned(form_of(parse(f"{text},dtype=bfloat16"))) is None


def test_fewer_rows_are_refused() -> None:
    func = aligned(form_of(parse(CASES["one product"])))
    assert unpadded_shapes(func) == ((70, 129), (129, 45), (45,))
    assert buffer_specs(func)[0].shape == (70, 129)
    from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm

    schedule = schedule_tiled_gemm(func)
    accept_fewer_rows(schedule)
    with pytest.raises(LoweringRefused, match="found arguments whose rows are padded for TMA"):
        lower(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True], ids=["an MLP", "by columns and rows"])
def test_models_are_right(divided: bool) -> None:
    """Padded columns are divided by padded zeros, and do not matter."""
    torch = pytest.importorskip("torch")
    from tvm import relax

    from crossfuse.relax import FuseChains, import_torch
    from crossfuse.relax.pipeline import serial_kernels
    from crossfuse.runtime.tensors import to_numpy

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(65, 131), torch.nn.Linear(131, 65)
            self.columns = torch.nn.Parameter(torch.rand(131) + 0.5)
            self.rows = torch.nn.Parameter(torch.rand(2, 6, 1) + 0.5)

        def forward(self, x: Any) -> Any:
            hidden = torch.nn.functional.gelu(self.up(x))
            hidden = hidden / self.columns / self.rows if divided else hidden
            return x + self.down(hidden)

    torch.manual_seed(0)
    module, x = Model().half().eval(), torch.randn(2, 6, 65).half()
    imported = import_torch(module, (x,))
    fuse = FuseChains("nvidia-h100", always=True)
    mod = serial_kernels(relax.transform.LegalizeOps()(fuse(imported.mod)))
    assert [each.family for each in fuse.outcomes if each.name]
    import tvm

    machine: Any = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    given = [tvm.runtime.tensor(to_numpy(x)), *map(tvm.runtime.tensor, imported.params.values())]
    with torch.no_grad():
        expected = module(x).numpy()
    np.testing.assert_allclose(machine["main"](*given).numpy(), expected, atol=4e-3)


@pytest.mark.slow
def test_inputs_of_fewer_rows_stay_where_they_are() -> None:
    compiled = crossfuse.compile(
        "gated_ffn:M=64,K=128,N=131,L=64,dtype=bfloat16", target="nvidia-h100", rule="tensor"
    )
    image = compiled.lowered.image
    copied = [each.name for each in image.workspaces if each.name.endswith("_padded")]
    assert copied == ["D_padded"]
    ends = {each.buffer: each.extents for at in image.launches for each in at.tensor_maps}
    assert ends["B_gate"] == ends["B_up"] == (128, 131)


@pytest.mark.slow
@pytest.mark.parametrize("extents", ["N=1023,L=1024", "N=1024,L=1023"])
def test_cublas_is_slower_too(extents: str) -> None:
    def time_of(text: str) -> float:
        source = read_source(f"gemm_chain:M=64,K=1024,{text},dtype=bfloat16,weights=nk")
        func = (source.padded or source).func
        plans = rank_function(func, device("nvidia-h100"))
        told = next(each.microseconds for each in plans if each.family == "eager")
        assert not_fusing(plans) == told
        assert not_fusing(rank_function(func, device("nvidia-h100"), fused=True)) == told
        return told

    plain = time_of("N=1024,L=1024")
    assert 1.1 * plain < time_of(extents) < 4 * plain


UNALIGNED = "gemm_chain:M=40,K=65,N=131,L=65,dtype=bfloat16,weights=nk"


def test_a_plan_of_a_kernel_that_does_not_fit_is_refused() -> None:
    """As of operands that need no padding."""
    for text in (UNALIGNED, UNALIGNED.replace("65", "64").replace("131", "128")):
        assert [each.family for each in ranked(text, only=("gemm", "eager"))] == ["eager"]
        with pytest.raises(PlanRefused, match="found gemm has no kernels of two products"):
            ranked(text, only=("gemm", "eager"), fused=True)


@pytest.mark.slow
def test_a_plan_is_what_compile_builds() -> None:
    """Of extents that TMA does not copy it is of padded copies, and says what they take."""
    plan = crossfuse.plan(UNALIGNED)
    by_itself = crossfuse.compile(UNALIGNED).plan
    assert by_itself is not None
    assert (plan.family, plan.tiles) == (by_itself.family, by_itself.tiles)
    assert plan.terms["padding"] > 2
    assert "m = 40, k = 72, n = 136, l = 65" in plan.explain().text()
    for each in (plan, by_itself, crossfuse.Plan.from_json(plan.to_json())):
        assert isinstance(each, crossfuse.Plan)
        compiled = crossfuse.compile(UNALIGNED, plan=each)
        assert compiled.lowered.image.launches[0].symbol == "main_pad"
    spec = parse(UNALIGNED)
    emulated(spec, compiled.lowered.image, random_inputs(spec), orders=1)


def test_a_padded_plan_is_scheduled() -> None:
    schedule = crossfuse.schedule(UNALIGNED, crossfuse.plan(UNALIGNED))
    assert lower(schedule).image.launches[0].symbol == "main_pad"


@pytest.mark.slow
def test_plans_that_are_not_compiled_say_what_to_do() -> None:
    text = "gemm:M=70,K=129,N=45,dtype=float16"
    plan = crossfuse.plan(text)
    assert plan.family == "eager" and "padding" not in plan.terms
    with pytest.raises(ScheduleRefused) as caught:
        crossfuse.compile(text, plan=plan)
    assert str(caught.value.refusal.instead) == (
        "call the library, plan with only=('gemm',), or compile without a plan, which fuses"
    )
    chosen = crossfuse.plan(text, only=("gemm",))
    assert crossfuse.compile(text, plan=chosen).lowered.image.launches[0].symbol == "main_pad"
    with pytest.raises(ScheduleRefused, match="found m = 70; limit: m = 71, which the plan is of"):
        crossfuse.compile(text, plan=crossfuse.plan(text.replace("70", "71"), only=("gemm",)))
    with pytest.raises(LoweringRefused, match="found arguments whose rows are padded for TMA"):
        crossfuse.compile(text, plan=chosen, fewer_rows=True)
