"""Specs: defaults, canonical text, shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.errors import WorkloadRefused
from crossfuse.workload import WorkloadSpec, parse
from crossfuse.workload.dtypes import FLOAT_TYPES
from crossfuse.workload.expression import NAMED
from crossfuse.workload.spec import COMBINERS, LAYOUTS, PRODUCTS, RESIDUALS, SINGLE

EXAMPLE = "gated_ffn:M=128,K=4096,N=11008,L=4096,dtype=bfloat16,act=silu"


@st.composite
def specs(draw: st.DrawFn) -> WorkloadSpec:
    kind = draw(st.sampled_from(("gated_ffn", "gemm_chain", "gemm", "gated_gemm")))
    single = kind in SINGLE
    extent = st.integers(1, 40000)
    types = st.sampled_from(sorted(FLOAT_TYPES))
    values = {name: draw(extent) for name in ("M", "K", "N")}
    values |= {"combine": draw(st.sampled_from(COMBINERS))} if kind == "gemm" else {}
    places = ("first", "last") if single else PRODUCTS
    values |= {} if single else {"L": draw(extent)}
    return WorkloadSpec(
        kind,
        **values,
        dtype=draw(types),
        out=draw(types),
        weights=draw(st.sampled_from(LAYOUTS)),
        bias=draw(st.sampled_from(("", *places))),
        scale=draw(st.sampled_from(("", *places))),
        residual=draw(st.sampled_from(("", *RESIDUALS))),
        act=draw(st.sampled_from([*NAMED, "max(x,0.1*x)", "x*sigmoid(1.7*x)", "x-(-x)**3"])),
    )


@given(specs())
def test_the_text_of_a_spec_reads_back_to_it(spec: WorkloadSpec) -> None:
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


def test_the_example_is_canonical() -> None:
    assert str(parse(EXAMPLE)) == EXAMPLE


@pytest.mark.parametrize(
    ("text", "act", "weights", "out"),
    [
        ("gated_ffn:M=1,K=2,N=3,L=4", "silu", "nk", "bfloat16"),
        ("gemm_chain:M=1,K=2,N=3,L=4,dtype=f16", "relu", "kn", "float16"),
        ("gemm:M=1,K=2,N=3,dtype=e4m3,out=f32", "identity", "kn", "float32"),
        ("gated_gemm:M=1,K=2,N=3", "silu", "nk", "bfloat16"),
    ],
)
def test_defaults_depend_on_the_kind(text: str, act: str, weights: str, out: str) -> None:
    spec = parse(text)
    assert (spec.act, spec.weights, spec.out) == (act, weights, out)


@pytest.mark.parametrize(
    ("text", "inputs", "output"),
    [
        (
            "gated_ffn:M=2,K=3,N=5,L=7",
            {"A": (2, 3), "B_gate": (5, 3), "B_up": (5, 3), "D": (7, 5)},
            (2, 7),
        ),
        (
            "gemm_chain:M=2,K=3,N=5,L=7,weights=kn",
            {"A": (2, 3), "B": (3, 5), "D": (5, 7)},
            (2, 7),
        ),
        ("gemm:M=2,K=3,N=5,weights=nk", {"A": (2, 3), "B": (5, 3)}, (2, 5)),
    ],
)
def test_inputs_come_in_the_order_of_parameters(
    text: str, inputs: dict[str, tuple[int, ...]], output: tuple[int, int]
) -> None:
    spec = parse(text)
    assert list(spec.inputs.items()) == list(inputs.items())
    assert spec.output == output


@pytest.mark.parametrize(
    ("text", "further"),
    [
        (
            "gated_ffn:M=2,K=3,N=5,L=7,bias=first+last,scale=first",
            "scale0_gate:float32[1] bias0_gate:bfloat16[5] scale0_up:float32[1] "
            "bias0_up:bfloat16[5] bias1:bfloat16[7]",
        ),
        (
            "gemm_chain:M=2,K=3,N=5,L=7,dtype=f16,out=f32,bias=last,scale=last,residual=in",
            "scale1:float32[1] bias1:float16[7] residual:float16[2, 7]",
        ),
        (
            "gemm:M=2,K=3,N=5,dtype=e4m3,out=f32,bias=last,residual=out",
            "bias0:bfloat16[5] residual:float32[2, 5]",
        ),
        (
            "gemm:M=2,K=3,N=5,dtype=f32,bias=first,residual=in",
            "bias0:float32[5] residual:float32[2, 5]",
        ),
    ],
)
def test_what_epilogues_read_follows_the_weights(text: str, further: str) -> None:
    spec = parse(text)
    count = 1 + len(spec.weight_operands)
    found = [f"{each.name}:{each.dtype}{list(each.shape)}" for each in spec.operands[count:]]
    assert " ".join(found) == further
    assert list(spec.inputs) == [each.name for each in spec.operands]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("gemm:M=2,K=3,N=5,bias=first", "gemm:M=2,K=3,N=5,dtype=bfloat16,bias=last"),
        ("gemm:M=2,K=3,N=5,residual=in", "gemm:M=2,K=3,N=5,dtype=bfloat16,residual=out"),
        (
            "gemm:M=2,K=3,N=5,residual=in,out=f32,scale=last",
            "gemm:M=2,K=3,N=5,dtype=bfloat16,out=float32,scale=last,residual=in",
        ),
        (
            "gemm_chain:M=2,K=3,N=5,L=7,bias=last+first",
            "gemm_chain:M=2,K=3,N=5,L=7,dtype=bfloat16,act=relu,bias=first+last",
        ),
    ],
)
def test_epilogues_have_one_spelling(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


def test_commas_inside_parentheses_belong_to_the_activation() -> None:
    spec = parse("gemm_chain:M=1,K=2,N=3,L=4,act=max(x,min(x,1)),dtype=f32")
    assert (spec.act, spec.dtype) == ("max(x,min(x,1.0))", "float32")


def test_a_written_expression_takes_the_name_of_an_equal_one() -> None:
    spec = parse("gemm_chain:M=1,K=2,N=3,L=4,act= max( x, 0 ) ")
    assert spec.act == "relu"
    assert spec == parse("gemm_chain:M=1,K=2,N=3,L=4")


def test_a_spec_made_in_python_is_checked_like_a_text() -> None:
    with pytest.raises(WorkloadRefused, match="workload-extent: gemm:K: found -3"):
        WorkloadSpec("gemm", M=1, K=-3, N=2)
    assert WorkloadSpec("gemm", 1, 2, 3, dtype="bf16") == parse("gemm:M=1,K=2,N=3")


def test_flops_count_every_product() -> None:
    assert parse("gemm:M=2,K=3,N=5").flops == 2 * 2 * 3 * 5
    assert parse("gated_ffn:M=2,K=3,N=5,L=7").flops == 2 * 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7


def test_specs_need_neither_tvm_nor_torch() -> None:
    program = (
        "import sys, crossfuse.workload as w, crossfuse.relax\n"
        "spec = w.lookup('S3', M=2); w.resolve('gemm:M=1,K=2,N=3')\n"
        "print([m for m in ('tvm', 'tvm_ffi', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr


def test_every_public_name_loads() -> None:
    import crossfuse.workload as workload

    cheap = set(workload.__all__) - {"prim_func"}
    assert all(callable(getattr(workload, name)) for name in cheap)
    assert {"parse", "lookup", "prim_func", "check"} <= set(dir(workload))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = workload.nothing
