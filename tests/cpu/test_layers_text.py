"""Rows of layers by their text: read, planned, scheduled, compiled and checked."""

from __future__ import annotations

import pytest

import crossfuse
from crossfuse.compiler.compiled import Wanted, choose
from crossfuse.compiler.source import read_source
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import draw, limits, parameters
from crossfuse.errors import WorkloadRefused
from crossfuse.hardware import device
from crossfuse.planner.chain.build import chain_of
from crossfuse.workload import LayersSpec, parse_layers
from crossfuse.workload.tolerances import judge

TEXT = "layers:M=40,widths=64x128x96x64,dtype=float16,act=gelu,bias=true,residual=true"
ODD = "layers:M=17,widths=41x59x27x30,dtype=float16,bias=true"
#: Its last layer is narrower than any tile, so that clusters split its reduction.
NARROW = "layers:M=5,widths=64x128x256x4"
H100 = device("nvidia-h100")


@pytest.mark.parametrize("text", [TEXT, ODD, "layers:M=1,widths=8x8x8,weights=kn,out=float32"])
def test_texts_read_back(text: str) -> None:
    spec = parse_layers(text)
    assert parse_layers(str(spec)) == spec
    assert len(chain_of(spec).products) == len(spec.widths) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "layers:M=16,widths=64",
            "found 1 widths; limit: the columns of the input",
        ),
        ("layers:widths=64x64x64", "found no M"),
        ("layers:M=16,widths=64x0x64", "layers:widths: found 0; limit: a positive integer"),
        ("layers:M=16,widths=64x64x64,N=3", "'N'"),
        ("layers:M=16,widths=64x64x64,weights=nn", "'nn'"),
        ("layers:M=16,widths=64x64x64,act=foo(x)", "foo"),
    ],
)
def test_texts_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(WorkloadRefused, match=message):
        parse_layers(text)


def test_a_text_is_planned_and_scheduled() -> None:
    plan = crossfuse.plan(TEXT, only=("phases",))
    schedule = crossfuse.schedule(TEXT, plan)
    assert schedule.mod.script() == crossfuse.schedule(parse_layers(TEXT), plan).mod.script()
    assert "crossfuse.grid_stage" in schedule.mod.script()


@pytest.mark.slow
@pytest.mark.parametrize("text", [TEXT, ODD, NARROW])
def test_a_text_is_compiled_right(text: str) -> None:
    source = read_source(text)
    assert isinstance(source.layers, LayersSpec) and source.constant_weights
    chosen = choose(source, H100, Wanted())
    assert chosen.option.plan is not None
    assert chosen.option.plan.family in ("phases", "launches")
    inputs = draw(parameters(source.func))
    report = emulate(chosen.lowered.image, inputs, orders=1)
    report.raise_if_wrong()
    judge(limits(source.func, inputs), report.outputs["out"], text)
