"""Small kernels of every family, with inputs: what `mutate_sync.py` plants faults in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.rows_first import RowsFirst, rows_first
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device, device
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage, starting_early
from crossfuse.schedule.planned import schedule_cascade_of
from crossfuse.schedule.rules.experts import schedule_experts
from crossfuse.schedule.rules.parted_ffn import (
    ClusterTiles,
    RegisterTiles,
    schedule_clustered_ffn,
    schedule_register_ffn,
)
from crossfuse.schedule.rules.phases import ChainTiles, PhaseTiles
from crossfuse.schedule.rules.ranks import schedule_collective
from crossfuse.schedule.rules.rows import schedule_rows_gemm
from crossfuse.schedule.rules.skinny import SkinnyTiles, schedule_skinny
from crossfuse.schedule.rules.stream import schedule_cascade_tiles
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.schedule.rules.together import schedule_together
from crossfuse.workload import (
    all_gather,
    all_reduce,
    all_to_all,
    parse,
    prim_func,
    random_inputs,
    reduce_scatter,
)
from crossfuse.workload.build import emit_products, form_of
from crossfuse.workload.cascade_build import prim_func as cascade_func
from crossfuse.workload.cascade_numerics import random_inputs as cascade_inputs
from crossfuse.workload.cascades import resolve
from crossfuse.workload.dtypes import Operand
from crossfuse.workload.experts import ExpertProduct, ExpertsForm, emit_experts

Kernel = tuple[KernelImage, Mapping[str, np.ndarray]]


#: Bytes of shared memory that a CTA has: as few as the kernel takes, so that its rings of stages
#: come round although the problem is small.
SIZES = tuple(kib * 1024 for kib in (12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 227))


def _tight(schedule: Any, sms: int) -> KernelImage:
    """Lower for a device with little memory, and for fewer multiprocessors than tiles."""
    for size in SIZES:
        small = replace(device("nvidia-h100"), max_shared_bytes=size)
        try:
            return lower(schedule, replace(small, sms=sms) if sms else small).image
        except RefusedError:
            if size == SIZES[-1]:
                raise
    raise AssertionError("unreachable")


def _chain(text: str, schedule: Callable[[Any], Any], sms: int = 0) -> Kernel:
    spec = parse(text)
    return _tight(schedule(prim_func(spec)), sms), random_inputs(spec)


def _stream(text: str, sms: int = 3, **tiles: Any) -> Kernel:
    spec = resolve(text)
    function = cascade_func(spec)
    (site,) = detect(function)
    schedule = schedule_cascade_tiles(site, derive(site.cascade), CascadeTiles(**tiles))
    return _tight(schedule, sms), cascade_inputs(spec)


def _attention_out(text: str, sms: int = 3, cluster: int = 1) -> Kernel:
    spec = resolve(text)
    tiles = {"rows": 64, "elements": 32, "cluster": cluster, "columns": 32}
    schedule = schedule_cascade_of(cascade_func(spec), "attention_out", tiles)
    return _tight(schedule, sms), cascade_inputs(spec)


def _rows(text: str, chunk: int = 0, constant: bool = False, **tiles: int) -> Kernel:
    spec = resolve(text)
    parts = rows_first(cascade_func(spec))
    assert isinstance(parts, RowsFirst)
    (site,) = detect(parts.rows)
    schedule = schedule_rows_gemm(
        parts,
        site,
        derive(site.cascade),
        tiles=TensorTiles(**tiles),
        stream=None,
        chunk=chunk,
        constant_weights=constant,
    )
    return _tight(schedule, 0), cascade_inputs(spec, 2)


def _grid(first: TensorTiles, text: str) -> Kernel:
    second = TensorTiles(64, 64, split=2, stages=2)
    return _chain(text, lambda f: schedule_tiled_ffn(f, first=first, second=second))


def _experts(k_major: bool) -> Kernel:
    """Products of two tokens by the weights of four experts each, added up."""
    tokens, top, columns, depth, dtype = 2, 4, 32, 64, "bfloat16"
    form = ExpertsForm(
        Operand("A", (tokens * top, depth), dtype),
        Operand("B", (8, columns, depth) if k_major else (8, depth, columns), dtype),
        Operand("places", (tokens, top), "int64"),
        (ExpertProduct("gemm0"),),
        columns,
        lambda tensors, i, j: tensors["gemm0"](i, j),
        (),
        dtype,
        tokens * top,
        summed=top,
        factor=Operand("factor", (tokens, top), "float32"),
        normalised=True,
        k_major=k_major,
    )
    func = emit_experts(form)
    inputs = _drawn(func) | {"places": np.arange(tokens * top).reshape(tokens, top) % 8}
    inputs["factor"] = np.abs(inputs["factor"])
    return _tight(schedule_experts(func), 0), inputs


def _side_by_side() -> Kernel:
    text = "gemm:M=300,K=256,N={},weights=nk"
    func = emit_products([form_of(parse(text.format(each))) for each in (128, 64, 72)])
    tiles = ChainTiles(64, 2, (PhaseTiles(64, "rows"),))
    return _tight(schedule_together(func, tiles=tiles), 6), _drawn(func)


def _drawn(func: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given = [each for each in func.params if not str(each.name).startswith("out")]
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    return {
        str(each.name): rng.standard_normal([*map(int, each.ty.shape)]).astype(
            kinds.get(str(each.ty.dtype), str(each.ty.dtype))
        )
        for each in given
    }


#: By family: what makes a kernel.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "skinny": lambda: _chain(
        "gated_gemm:M=3,K=512,N=32,bias=last",
        partial(schedule_skinny, tiles=SkinnyTiles(lanes=8, warps=4, loads=1)),
    ),
    "experts": lambda: _experts(True),
    "expert_columns": lambda: _experts(False),
    "products side by side": _side_by_side,
    "threads": lambda: _chain("gemm:M=16,K=64,N=16", lambda f: schedule_split_k(f, cluster=4)),
    "product": lambda: _chain(
        "gemm:M=512,N=192,K=256,dtype=bfloat16,weights=nk",
        lambda f: schedule_tiled_gemm(
            f, tiles=TensorTiles(rows=128, columns=192, cluster=2, stages=2)
        ),
        2,
    ),
    "product, boxes in stages": lambda: _chain(
        "gemm:M=512,N=192,K=192,dtype=bfloat16,weights=nk",
        lambda f: schedule_tiled_gemm(
            f, tiles=TensorTiles(rows=256, columns=96, cluster=1, stages=3)
        ),
        1,
    ),
    "split": lambda: _chain(
        "gemm:M=64,N=128,K=1536,dtype=bfloat16,weights=nk",
        lambda f: schedule_tiled_gemm(f, tiles=TensorTiles(split=4, columns=64)),
    ),
    "grid, boxes": lambda: _grid(
        TensorTiles(64, 32, 2, across=2, stages=2),
        "gated_ffn:M=64,K=128,N=512,L=128,dtype=bfloat16",
    ),
    "grid, elements": lambda: _grid(
        TensorTiles(64, 24, 2, stages=2),
        "gated_ffn:M=64,K=128,N=256,L=128,dtype=float8_e4m3fn,out=bfloat16",
    ),
    "gather": lambda: _chain(
        "gemm_chain:M=64,K=256,N=256,L=64,dtype=bfloat16,act=gelu",
        lambda f: schedule_clustered_ffn(f, tiles=ClusterTiles(64, 2, 1)),
    ),
    "gather, parts": lambda: _chain(
        "gemm_chain:M=100,K=256,N=512,L=64,dtype=bfloat16,act=relu",
        lambda f: schedule_clustered_ffn(f, tiles=ClusterTiles(64, 2, 2)),
    ),
    "registers": lambda: _chain(
        "gemm_chain:M=64,K=264,N=128,L=40,dtype=float16,act=gelu",
        lambda f: schedule_register_ffn(f, tiles=RegisterTiles(64, 40, 1)),
    ),
    "registers, cluster": lambda: _chain(
        "gemm_chain:M=128,K=256,N=256,L=64,dtype=bfloat16,act=relu",
        lambda f: schedule_register_ffn(f, tiles=RegisterTiles(64, 64, 2, 2)),
    ),
    "convolutions": lambda: _chain(
        "conv_chain:batch=2,H=5,W=7,IC=64,OC1=64,OC2=64,k1=3",
        lambda f: schedule_clustered_ffn(f, tiles=ClusterTiles(64, 2, 1)),
    ),
    "attention": lambda: _stream(
        "attention:batch=1,heads=2,q_len=256,kv_len=200,head_dim=64,causal=true",
        rows=128,
        elements=64,
    ),
    "attention, shared keys": lambda: _stream(
        "attention:batch=1,heads=2,q_len=400,kv_len=133,head_dim=64", share=2
    ),
    "attention, split": lambda: _stream(
        "decode_attention:batch=1,heads=8,kv_heads=2,q_len=1,kv_len=333,head_dim=64",
        rows=64,
        elements=64,
        cluster=2,
    ),
    "attention of few rows": lambda: _stream(
        "decode_attention:batch=1,heads=8,kv_heads=2,q_len=1,kv_len=200,head_dim=64",
        rows=8,
        elements=64,
    ),
    "attention of few rows, split": lambda: _stream(
        "decode_attention:batch=1,heads=8,kv_heads=2,q_len=1,kv_len=333,head_dim=64",
        rows=8,
        elements=64,
        cluster=2,
    ),
    "latent": lambda: _stream(
        "mla_decode:batch=1,q_heads=64,kv_len=130,latent_dim=128,rope_dim=32"
    ),
    "attention, product": lambda: _attention_out(
        "attention_out:batch=1,heads=2,q_len=70,kv_len=96,head_dim=64,hidden=32"
    ),
    "attention, product, cluster": lambda: _attention_out(
        "attention_out:batch=1,heads=2,q_len=16,kv_len=128,head_dim=64,hidden=32", 0, 2
    ),
    "rows": lambda: _rows("rmsnorm_gemm:tokens=70,K=512,N=32", rows=64, columns=16),
    "rows, chunks": lambda: _rows(
        "quant_gemm:tokens=64,K=768,N=32", 256, rows=64, columns=16, cluster=1
    ),
    "rows, help": lambda: _rows(
        "rmsnorm_gemm:tokens=4,K=512,N=64", constant=True, rows=64, columns=32, cluster=2
    ),
    "rows, head": lambda: _rows(
        "rmsnorm_gemm:tokens=3,K=1024,N=576", constant=True, rows=128, columns=192, cluster=1
    ),
    "routing": lambda: _stream("moe_routing:tokens=40,hidden=128,experts=16,top_k=2"),
}


def _over_ranks(schedule: Any, *shape: int, sms: int = 132) -> Kernel:
    """A collective whose kernels start early, for tensors of this shape, ranks first."""
    given = np.random.default_rng(0).uniform(-1, 1, shape).astype(ml_dtypes.bfloat16)
    gpu = Device("some GPU", sms=sms)
    return lower(starting_early(schedule.mod["main"]), gpu).image, {"A": given}


#: Kernels that several GPUs run together.
OVER_RANKS: dict[str, Callable[[], Kernel]] = {
    "all-reduce": lambda: _over_ranks(
        schedule_collective(all_reduce(elements=512, ranks=2)), 2, 512
    ),
    "all-reduce, two kernels": lambda: _over_ranks(
        schedule_collective(all_reduce(elements=512, ranks=2), threads=32), 2, 512, sms=1
    ),
    "all-gather, two kernels": lambda: _over_ranks(
        schedule_collective(all_gather(elements=512, ranks=2), threads=32), 2, 512, sms=1
    ),
    "all-gather": lambda: _over_ranks(
        schedule_collective(all_gather(elements=512, ranks=2)), 2, 512
    ),
    "all-to-all": lambda: _over_ranks(
        schedule_collective(all_to_all(elements=256, ranks=2)), 2, 2, 256
    ),
    "reduce-scatter": lambda: _over_ranks(
        schedule_collective(reduce_scatter(elements=256, ranks=3)), 3, 3, 256
    ),
}
