"""Small chains whose partial tiles TMA adds, by both rules."""

from __future__ import annotations

from functools import cache
from typing import Any

from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.clustered_ffn import schedule_clustered_ffn
from crossfuse.schedule.rules.parted_tiles import ClusterTiles, RegisterTiles
from crossfuse.schedule.rules.register_ffn import schedule_register_ffn
from crossfuse.workload import WorkloadSpec, parse, prim_func

#: Workload and tiles: rows, cluster size and parts; or rows, columns and parts.
CASES: dict[str, tuple[str, ClusterTiles | RegisterTiles]] = {
    "2 parts": ("gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16,act=relu", ClusterTiles(64, 2, 2)),
    "3 parts, gated": ("gated_ffn:M=16,K=64,N=384,L=96,dtype=bfloat16", ClusterTiles(64, 2, 3)),
    "8 parts": ("gemm_chain:M=64,K=64,N=512,L=64,dtype=float16", ClusterTiles(64, 1, 8)),
    "one row": (
        "gemm_chain:M=1,K=64,N=512,L=64,dtype=bfloat16,weights=nk",
        ClusterTiles(64, 2, 4),
    ),
    "two warpgroups": ("gated_ffn:M=128,K=64,N=512,L=64,dtype=float16", ClusterTiles(128, 4, 2)),
    "rows in two tiles, two warpgroups": (
        "gemm_chain:M=130,K=64,N=384,L=48,dtype=bfloat16",
        ClusterTiles(128, 2, 3),
    ),
    "boxes of 32 and 8": (
        "gemm_chain:M=36,K=64,N=384,L=80,dtype=bfloat16,bias=last,residual=out",
        ClusterTiles(64, 2, 3),
    ),
    "boxes in turns": ("gemm_chain:M=60,K=64,N=384,L=200,dtype=bfloat16", ClusterTiles(64, 1, 3)),
    "boxes in turns, two warpgroups": (
        "gated_ffn:M=100,K=64,N=256,L=96,dtype=bfloat16",
        ClusterTiles(128, 1, 2),
    ),
    "float32 output": (
        "gemm_chain:M=64,K=64,N=384,L=96,dtype=bfloat16,out=float32",
        ClusterTiles(64, 2, 3),
    ),
    "widths that do not divide": (
        "gemm_chain:M=36,K=64,N=328,L=72,dtype=bfloat16,weights=nk",
        ClusterTiles(64, 2, 3),
    ),
    "a CTA without columns": (
        "gated_ffn:M=7,K=64,N=320,L=16,dtype=float16",
        ClusterTiles(64, 4, 2),
    ),
    "registers": (
        "gemm_chain:M=100,K=64,N=256,L=64,dtype=bfloat16,act=relu",
        RegisterTiles(64, 64, 2, 1),
    ),
    "registers, gated": (
        "gated_ffn:M=16,K=64,N=192,L=96,dtype=bfloat16",
        RegisterTiles(64, 48, 3, 1),
    ),
    "registers, 8 parts, two warpgroups": (
        "gemm_chain:M=128,K=64,N=512,L=64,dtype=float16",
        RegisterTiles(128, 32, 8, 1),
    ),
    "registers, widths that do not divide": (
        "gemm_chain:M=20,K=64,N=200,L=72,dtype=bfloat16,act=gelu",
        RegisterTiles(64, 48, 2, 1),
    ),
    "registers, one row": (
        "gemm_chain:M=1,K=64,N=256,L=64,dtype=bfloat16,weights=nk",
        RegisterTiles(64, 32, 4, 1),
    ),
}


def spec_of(name: str) -> WorkloadSpec:
    return parse(CASES[name][0])


def scheduled_by(spec: WorkloadSpec, tiles: ClusterTiles | RegisterTiles, **options: bool) -> Any:
    """Schedule a chain by the rule whose tiles are given."""
    rule: Any = schedule_clustered_ffn if isinstance(tiles, ClusterTiles) else schedule_register_ffn
    return rule(prim_func(spec), tiles=tiles, **options)


def scheduled(name: str, *, unordered: bool = True, constant: bool = False) -> Any:
    options = {"unordered": unordered, "constant_weights": constant}
    return scheduled_by(spec_of(name), CASES[name][1], **options)


@cache
def right(name: str, *, unordered: bool = True, constant: bool = False) -> KernelImage:
    return lower(scheduled(name, unordered=unordered, constant=constant)).image
