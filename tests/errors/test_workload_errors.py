"""What specs and suites refuse, word by word."""

from __future__ import annotations

import pytest

from crossfuse.errors import WorkloadRefused
from crossfuse.workload import resolve

KEYS = "one of M, K, N, L, dtype, act, weights, out, combine, bias, scale, residual"
LANGUAGE = "x, numbers, + - * / **, and the functions exp, tanh, sigmoid, erf, sqrt, abs, max, min"
REWRITE = "rewrite it with these"
IDS = "limit: G1 to G10, S1 to S8, C1 to C8, R1 to R14"
TYPES = "float16, bfloat16, float32, float8_e4m3fn, float8_e5m2"

SPECS = {
    "gated_fnn:M=1": "workload-kind: kind: found 'gated_fnn'; "
    "limit: one of gated_ffn, gemm_chain, gemm, gated_gemm, conv_chain. "
    "Instead: write 'gated_ffn'.",
    "gated_gemm:M=1,K=2": "workload-extent: gated_gemm: found no N; limit: the extents M, K, N. "
    "Instead: add N=128 or the extents you mean.",
    "gated_gemm:M=1,K=2,N=3,L=4": "workload-extent: gated_gemm:L: found 4; limit: M, K and N, "
    "because gated_gemm has no second product. Instead: leave L out, or write kind gated_ffn.",
    "gated_gemm:M=1,K=2,N=3,bias=first+last": "workload-bias: gated_gemm:bias: found first+last; "
    "limit: last, because gated_gemm has products of one operand. "
    "Instead: write bias=last, or kind gated_ffn.",
    "matmul:M=1": "workload-kind: kind: found 'matmul'; "
    "limit: one of gated_ffn, gemm_chain, gemm, gated_gemm, conv_chain. "
    "Instead: choose one of these.",
    "gemm:M=1,K=2": "workload-extent: gemm: found no N; limit: the extents M, K, N. "
    "Instead: add N=128 or the extents you mean.",
    "gemm_chain:dtype=f16": "workload-extent: gemm_chain: found no M, K, N, L; limit: the extents "
    "M, K, N, L. Instead: add M=128,K=128,N=128,L=128 or the extents you mean.",
    "gemm:M=1,K=2,N=3,m=2": f"workload-key: gemm:key: found 'm'; limit: {KEYS}. "
    "Instead: write 'M'.",
    "gemm:M=1,K=2,N=3,wieghts=nk": "workload-key: gemm:key: found 'wieghts'; "
    f"limit: {KEYS}. Instead: write 'weights'.",
    "gemm:M=1,M=2,K=2,N=3": "workload-key: gemm:M: found 1 and 2; limit: one value. "
    "Instead: keep one of them.",
    "gemm:M=1,K=2,N=3,bf16": "workload-spec: gemm: found 'bf16'; "
    "limit: key=value pairs separated by commas. Instead: write key=value.",
    "gemm:M=0,K=2,N=3": "workload-extent: gemm:M: found 0; limit: a positive integer. "
    "Instead: write M=128, say.",
    "gemm:M=1,K=-2,N=3": "workload-extent: gemm:K: found -2; limit: a positive integer. "
    "Instead: write K=128, say.",
    "gemm:M=1,K=2,N=3,L=4": "workload-extent: gemm:L: found 4; limit: M, K and N, because gemm has "
    "no second product. Instead: leave L out, or write kind gemm_chain.",
    "gemm:M=100000,K=2,N=100000": "workload-extent: gemm:MxN: found 10000000000 elements; "
    "limit: 2147483647, so that int32 can index them. Instead: compute the matrix in slices.",
    "gemm:M=1,K=2,N=3,dtype=int8": f"workload-dtype: dtype: found 'int8'; limit: one of {TYPES}. "
    "Instead: choose one of these.",
    "gemm:M=1,K=2,N=3,out=flaot32": f"workload-dtype: out: found 'flaot32'; limit: one of {TYPES}. "
    "Instead: write 'float32'.",
    "gemm:M=1,K=2,N=3,weights=nm": "workload-weights: weights: found 'nm'; limit: one of kn, nk. "
    "Instead: choose one of these.",
    "gemm:M=1,K=2,N=3,combine=mean": "workload-combine: combine: found 'mean'; "
    "limit: one of sum, prod, max, min. Instead: choose one of these.",
    "gemm_chain:M=1,K=2,N=3,L=4,combine=max": "workload-combine: gemm_chain:combine: found max; "
    "limit: sum, because only gemm has a free choice of reduction. "
    "Instead: write kind gemm, or leave combine out.",
    "gemm_chain:M=1,K=2,N=3,L=4,bias=second": "workload-bias: bias: found 'second'; "
    "limit: one of first, last, first+last. Instead: choose one of these.",
    "gemm:M=1,K=2,N=3,scale=lsat": "workload-scale: scale: found 'lsat'; "
    "limit: one of first, last, first+last. Instead: write 'last'.",
    "gemm:M=1,K=2,N=3,bias=first+last": "workload-bias: gemm:bias: found first+last; limit: last, "
    "because gemm has one product. Instead: write bias=last, or kind gemm_chain.",
    "gemm:M=1,K=2,N=3,scale=last+first": "workload-scale: gemm:scale: found first+last; "
    "limit: last, because gemm has one product. Instead: write scale=last, or kind gemm_chain.",
    "gemm:M=1,K=2,N=3,residual=1": "workload-residual: residual: found '1'; limit: one of in, out. "
    "Instead: choose one of these.",
    "gemm:M=1,K=2,N=3,bias=": "workload-spec: gemm: found 'bias='; "
    "limit: key=value pairs separated by commas. Instead: write key=value.",
    "S33": f"workload-id: suites: found 'S33'; {IDS}. Instead: write 'S3'.",
    "ffn": f"workload-id: suites: found 'ffn'; {IDS}. "
    "Instead: choose one of these, or write a spec such as gemm:M=8,K=8,N=8.",
    "R7": "workload-kind: R7: found cascade (softmax); limit: a gemm_chain, gated_ffn or "
    "conv_chain. Instead: take one of G1 to G10, S1 to S8 or C1 to C8, or read the cascade by "
    "crossfuse.workload.cascades.resolve.",
}
CONV = "conv_chain:batch=1,H=7,W=5,IC=64,OC1=32,OC2=16"
CONV_KEYS = (
    "one of batch, H, W, IC, OC1, OC2, k1, k2, stride, dtype, act, weights, out, bias, scale, "
    "residual"
)
SPECS |= {
    CONV: "workload-extent: conv_chain: found no k1; limit: the extents batch, H, W, IC, OC1, OC2, "
    "k1. Instead: add k1=1 or what you mean.",
    f"{CONV},k1=2": "workload-extent: conv_chain:k1: found 2; limit: odd windows, which have a "
    "pixel in the middle. Instead: pad the weights to k1=3.",
    f"{CONV},k1=1,k2=3": "workload-extent: conv_chain:k2: found 3; limit: 1, because each CTA has "
    "the pixels of its own tile of the intermediate alone. Instead: make the second convolution a "
    "chain of its own.",
    f"{CONV},k1=3,stride=2": "workload-extent: conv_chain:stride: found 2; limit: 1, because rows "
    "of the output are taken from pixels that follow one another. Instead: leave stride out.",
    f"{CONV},k1=3,M=4": f"workload-key: conv_chain:key: found 'M'; limit: {CONV_KEYS}. "
    "Instead: choose one of these.",
    f"{CONV},k1=0": "workload-extent: conv_chain:k1: found 0; limit: a positive integer. "
    "Instead: write k1=1, say.",
    f"{CONV},k1=x": "workload-extent: conv_chain:k1: found x; limit: a positive integer. "
    "Instead: write k1=128, say.",
    "C1:L=3": f"workload-key: C1:key: found 'L'; limit: {CONV_KEYS}. Instead: choose one of these.",
    "conv_chain:batch=9,H=9999,W=999,IC=64,OC1=32,OC2=16,k1=1": "workload-extent: conv_chain:MxN: "
    "found 2876832288 elements; limit: 2147483647, so that int32 can index them. "
    "Instead: compute the matrix in slices.",
}
ACTS = {
    "silo": f"found 'silo'; limit: {LANGUAGE}. Instead: write 'silu'.",
    "x+": f"found no expression; limit: {LANGUAGE}. Instead: use these, or one of the names "
    "identity, relu, squared_relu, silu, quick_gelu, gelu, gelu_tanh, sigmoid, tanh.",
    "x.real": f"found 'x.real'; limit: {LANGUAGE}. Instead: {REWRITE}.",
    "sigmod(x)": "found the function 'sigmod'; limit: the functions exp, tanh, sigmoid, erf, sqrt, "
    "abs, max, min. Instead: write 'sigmoid'.",
    "max(x)": f"found max with 1 arguments; limit: 2 for max. Instead: {REWRITE}.",
    "x**0.5": f"found the exponent 0.5; limit: an integer from 1 to 8. Instead: {REWRITE}.",
    "((x**8)**8)**8": f"found 584 operations; limit: at most 200. Instead: {REWRITE}.",
    "2*3": f"found an expression without x; limit: a function of x. Instead: {REWRITE}.",
    "x/(1-1)": "found a division by zero; limit: constant parts that are finite. "
    f"Instead: {REWRITE}.",
    "x*sqrt(0-1)": "found a function outside its domain or range; "
    f"limit: constant parts that are finite. Instead: {REWRITE}.",
    "x*1e39": f"found the constant 1e+39; limit: finite in float32. Instead: {REWRITE}.",
}


@pytest.mark.parametrize("text", SPECS)
def test_a_spec_is_refused(text: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        resolve(text)
    assert str(caught.value) == SPECS[text]


@pytest.mark.parametrize("act", ACTS)
def test_an_activation_is_refused(act: str) -> None:
    with pytest.raises(WorkloadRefused) as caught:
        resolve(f"S3:act={act}")
    assert str(caught.value) == f"workload-act: act={act}: {ACTS[act]}"
