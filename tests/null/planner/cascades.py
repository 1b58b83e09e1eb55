"""Cascades as the planner counts them, without functions: see `shape_of_cascade`."""

from __future__ import annotations

from dataclasses import replace

from crossfuse.cascade.rewrite.work import Pass, TileWork, Work
from crossfuse.planner.cascade.shape import CascadeShape, RowsProduct
from crossfuse.planner.chain.build import chain_of
from crossfuse.workload import parse

MIB = 2**20

#: Every query sees the keys up to its own.
CAUSAL = tuple((row, 0, row + 1) for row in (*range(0, 2048, 32), 2047))
_R1 = TileWork(
    256,
    2048,
    2048,
    depth=128,
    columns=128,
    result=256,
    inputs=384 * MIB,
    exponentials=1,
    operations=4,
    masks=1,
    spans=CAUSAL,
)
_R2 = TileWork(
    192,
    512,
    512,
    depth=64,
    columns=64,
    result=128,
    inputs=36 * MIB,
    exponentials=1,
    operations=4,
)
_R3 = TileWork(
    128,
    4,
    8192,
    depth=128,
    columns=128,
    result=256,
    inputs=512 * MIB,
    exponentials=1,
    operations=4,
)
TILED = {
    "R1": _R1,
    "R1, all keys": replace(_R1, masks=0, spans=()),
    "R1, 8 heads of keys": replace(_R1, inputs=192 * MIB),
    "R1, window of 512": replace(
        _R1, spans=tuple((row, max(0, row - 511), end) for row, _, end in CAUSAL)
    ),
    # A bias of the distance: converted to a float, and added.
    "R1, ALiBi": replace(_R1, exponentials=2, operations=5),
    # tanh is two instructions, and its argument and result are scaled.
    "R1, soft cap": replace(_R1, exponentials=3, operations=6),
    "R1, 64 columns": replace(_R1, depth=64, columns=64, result=128, inputs=192 * MIB),
    "R2": _R2,
    "R3": _R3,
    "R3, batch 1": replace(_R3, groups=8, inputs=32 * MIB),
    "R3, batch 2": replace(_R3, groups=16, inputs=64 * MIB),
}

SOFTMAX = CascadeShape(
    "softmax:rows=4096,cols=32768",
    Work(
        4096,
        32768,
        8,
        2,
        2,
        0,
        2,
        held=4,
        emitted=4,
        unpacked=True,
        exponentials=2,
        operations=5,
    ),
    (
        Pass("m", 256 * MIB, 16384),
        Pass("s", 256 * MIB, 16384),
        Pass("y", 256 * MIB, 256 * MIB),
    ),
)
DECODE = CascadeShape(
    "decode_attention:batch=1",
    TILED["R3, batch 1"],
    (
        Pass("scores", 16 * MIB, MIB // 2, 2**26),
        Pass("m", MIB // 2, 128),
        Pass("s", MIB // 2, 128),
        Pass("operand of o", MIB // 2, MIB // 2),
        Pass("o", 16 * MIB, 8192, 2**26),
    ),
)
#: A norm of rows, and the product that loads them.
NORM_GEMM = CascadeShape(
    "rmsnorm_gemm:tokens=256,K=4096,N=12288",
    TileWork(
        1,
        256,
        4096,
        depth=0,
        columns=12288,
        result=24576,
        inputs=98 * MIB,
        left=2,
        right=2,
        value=2,
        operations=4,
        slots=1,
    ),
    (
        Pass("squares", 2 * MIB, 1024),
        Pass("operand of product", 2 * MIB + 8192, 2 * MIB),
        Pass("product", 98 * MIB, 6 * MIB, 2**32 * 6),
    ),
    RowsProduct(
        chain_of(parse("gemm:M=256,K=4096,N=12288,dtype=bfloat16,weights=nk")),
        True,
        Work(
            256,
            4096,
            8,
            2,
            2,
            0,
            2,
            held=4,
            emitted=8,
            unpacked=True,
            slots=1,
            operations=4,
        ),
    ),
)
_FFN = RowsProduct(
    chain_of(parse("gated_ffn:M=16,K=2048,N=8192,L=2048,weights=nk,residual=in")),
    True,
    Work(
        16,
        2048,
        8,
        2,
        2,
        0,
        2,
        held=4,
        emitted=8,
        unpacked=True,
        slots=1,
        operations=4,
    ),
)
#: A norm of rows, and the gated layers behind it.
NORM_FFN = CascadeShape("rmsnorm_ffn:tokens=16,K=2048,N=8192", _FFN.rows, _FFN.passes, _FFN)
