"""Specs of chains of every kind, with extents that are small, odd, alike or one."""

from __future__ import annotations

EXTENTS = "M=6,K=10,N=14,L=22"
EPILOGUES = (
    "",
    ",bias=first,scale=last",
    ",bias=last,scale=first+last,residual=in",
    ",bias=first+last,scale=first+last,residual=out,out=float32",
)
TEXTS = [
    *(
        f"{kind}:{EXTENTS},dtype={dtype},weights={weights}{epilogue}"
        for kind in ("gemm_chain", "gated_ffn")
        for dtype in ("float8_e4m3fn", "bfloat16", "float32")
        for weights in ("kn", "nk")
        for epilogue in EPILOGUES
    ),
    *(f"gemm:M=6,K=10,N=14{each}" for each in ("", ",bias=last,scale=last,residual=out,act=gelu")),
    # All extents alike, and extents of one.
    "gemm_chain:M=8,K=8,N=8,L=8,bias=first+last,residual=in",
    "gated_ffn:M=8,K=8,N=8,L=8,scale=first+last",
    "gemm_chain:M=1,K=3,N=5,L=2,bias=first",
    "gemm_chain:M=3,K=1,N=5,L=1",
    "gemm_chain:M=3,K=4,N=1,L=5,residual=in",
    "gemm:M=1,K=3,N=5",
    "gemm:M=3,K=4,N=1",
    "conv_chain:batch=2,H=5,W=7,IC=3,OC1=4,OC2=6,k1=3,bias=first+last,residual=in",
    "conv_chain:batch=2,H=5,W=7,IC=1,OC1=4,OC2=6,k1=5,weights=kn",
    "conv_chain:batch=1,H=1,W=1,IC=4,OC1=4,OC2=4,k1=3",
]
