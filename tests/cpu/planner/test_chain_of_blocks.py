"""Chains of functions whose blocks were read, against those of the specs they were made from."""

from __future__ import annotations

import pytest

from cpu.planner.texts import TEXTS
from crossfuse import _tvm as ir
from crossfuse.blocks.chain import read_layers
from crossfuse.errors import PlanRefused
from crossfuse.planner.chain.build import chain_of, chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.workload import LayersSpec, WorkloadSpec, ids, lookup, parse, parse_layers, prim_func
from crossfuse.workload.expression import NAMED


def chain_read(spec: WorkloadSpec | LayersSpec) -> Chain:
    return chain_of_blocks(read_layers(ir.Schedule(prim_func(spec))))


@pytest.mark.parametrize("name", [each for each in ids() if each[0] in "GSC"])
def test_functions_of_the_suites_have_the_chains_of_their_specs(name: str) -> None:
    spec = lookup(name)
    assert chain_read(spec) == chain_of(spec)


@pytest.mark.parametrize("text", TEXTS)
def test_functions_have_the_chains_of_their_specs(text: str) -> None:
    spec = parse(text)
    assert chain_read(spec) == chain_of(spec)


@pytest.mark.parametrize(
    "text",
    [
        "layers:M=40,widths=64x128x96x64,dtype=float16,act=gelu,bias=true,residual=true",
        "layers:M=1,widths=8x8x8,weights=kn,out=float32",
    ],
)
def test_rows_of_layers_have_the_chains_of_their_specs(text: str) -> None:
    spec = parse_layers(text)
    assert chain_read(spec) == chain_of(spec)


@pytest.mark.parametrize(
    "act", [*NAMED, "exp(x)/(1+x*x)", "sqrt(abs(x))/2", "erf(x)*erf(x)+tanh(1)"]
)
def test_functions_take_as_long_as_in_the_text(act: str) -> None:
    spec = parse(f"gated_ffn:M=8,K=4,N=6,L=10,dtype=float16,act={act}")
    assert chain_read(spec) == chain_of(spec)


def test_products_of_another_algebra_are_refused_as_in_a_spec() -> None:
    spec = parse("gemm:M=8,K=4,N=6,combine=max")
    with pytest.raises(PlanRefused) as of_spec:
        chain_of(spec)
    with pytest.raises(PlanRefused) as of_blocks:
        chain_read(spec)
    assert str(of_blocks.value) == str(of_spec.value)
    assert str(of_spec.value) == (
        "chain: combine: found max; limit: sums of products of a left and a right operand. "
        "Instead: leave it to kernels of threads."
    )
