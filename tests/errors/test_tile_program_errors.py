"""Everything that the Hopper pipeline refuses, by its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from crossfuse import _tvm as ir
from crossfuse.errors import LoweringRefused, Refusal
from crossfuse.hardware import device
from crossfuse.lower.extract import lower, only_function
from crossfuse.lower.hopper.plan.kernel import plan_kernel
from crossfuse.lower.hopper.recover.function import recover
from crossfuse.schedule.rules import pipelined
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.tiled_gemm import schedule_tiled_gemm
from crossfuse.workload import parse, prim_func
from crossfuse.workload.build import Form, Product, emit
from crossfuse.workload.dtypes import Operand
from errors import tile_programs as t

AS_THE_RULES = "schedule as the tiled rules do"
OTHER_FACTORS = "split rows and columns by other factors"
UNSTAGED = "leave the stages out for the general lowering"

#: Function, or what makes it; the text after the rule, up to the limit.
PROGRAMS: dict[str, tuple[Any, str]] = {
    "serial loop outside": (
        lambda: t.around("serial"),
        "loop 'again': found a serial loop around the pipelined one; ",
    ),
    "threads outside": (
        lambda: t.around("threadIdx.x"),
        "loop 'again': found a loop bound to threadIdx.x; ",
    ),
    "two pipelined loops": (
        t.two_products,
        "function: found 2 loops with stages and 2 other nests in a CTA; ",
    ),
    "threads inside a tile": (
        lambda: t.program(t.load_by_threads),
        "loop 'i': found a loop of the tile that is bound or has extent 64; ",
    ),
    "two blocks in a nest": (
        lambda: t.program(t.load_two_blocks),
        "function: found 2 statements in a nest; ",
    ),
    "three loads": (
        lambda: t.program(t.load_twice),
        "loop 'k': found 4 nests in 2 steps; ",
    ),
    "load that computes": (
        lambda: t.program(t.load_scaled),
        "block 'load': found a statement that is no plain copy; ",
    ),
    "load of other indices": (
        lambda: t.program(t.load_transposed),
        "block 'load': found a statement that is no plain copy; ",
    ),
    "three dimensions": (
        t.three_dimensions,
        "block 'batch', buffer 'A': found 3 dimensions; ",
    ),
    "strided index": (
        lambda: t.program(t.load_strided),
        "block 'load', buffer 'A': found index d * 2 + k; ",
    ),
    "two loops of one dimension": (
        lambda: t.program(t.load_by_two_loops),
        "block 'load', buffer 'A': found index k * 64 + d * 8 + e; ",
    ),
    "predicate inside the tensor": (
        lambda: t.program(t.load_in_part),
        "block 'load', buffer 'A': found the condition i < 60; ",
    ),
    "part of an operand": (
        lambda: t.program(t.load_half),
        "block 'product': found operand 'P'; ",
    ),
    "operand of another step": (
        lambda: t.program(right=t.load_other_step),
        "block 'product': found operand 'Q'; ",
    ),
    "operand in global memory": (
        lambda: t.program(product=t.multiply_unstaged),
        "block 'product': found operand 'B'; ",
    ),
    "no initialisation": (
        lambda: t.program(product=t.multiply_without_init),
        "block 'product': found the statement C[vi, vj] + T.Cast(\"float32\", P[vi, vk]) * ",
    ),
    "no product": (
        lambda: t.program(product=t.add),
        "block 'product': found the statement C[vi, vj] + (T.Cast(\"float32\", P[vi, vk]) + ",
    ),
    "another reduction": (
        lambda: schedule_tiled_gemm(
            prim_func(parse("gemm:M=64,N=64,K=64,dtype=float16,combine=max")),
            tiles=TensorTiles(64, 64),
        ),
        "block 'gemm0': found the statement T.max(gemm0_local[v_i, v_j], ",
    ),
    "two reduction variables": (
        lambda: t.program(product=t.multiply_twice_reduced),
        "block 'product': found no product of matrices; ",
    ),
    "store that reduces": (
        lambda: t.program(last=t.store_sums),
        "block 'store': found no elementwise store of a matrix; ",
    ),
    "store of another tile": (
        lambda: t.program(last=t.store_half),
        "store of 'E': found a tile of (64, 32) from [0, 0]; ",
    ),
    "store of another element": (
        lambda: t.program(last=t.store_transposed),
        "block 'store': found the accumulator at [vj, vi]; ",
    ),
    "store that reads integers": (
        lambda: masked(),
        "block 'out': found a load of 'mask' of int32; limit: further operands of float32, "
        "bfloat16, float16, float8_e4m3fn, float8_e5m2. ",
    ),
    "store that reads a stage": (
        lambda: t.program(last=t.store_of_staged),
        "block 'store': found a load of 'P'; ",
    ),
}


def product(text: str, **tiles: int) -> Any:
    spec = parse(f"gemm:{text}")
    return schedule_tiled_gemm(prim_func(spec), tiles=TensorTiles(**tiles))


def product_in_steps(text: str, depth: int) -> Any:
    """The rule's product with steps of another depth, as a schedule by hand may have."""
    with patch.object(pipelined, "row_bytes_depth", return_value=depth):
        return product(text)


#: What makes the function; the text up to the limit; the cure.
PLANS: dict[str, tuple[Any, str, str]] = {
    "float32": (
        lambda: product("M=64,N=64,K=128,dtype=float32,weights=nk"),
        "tile-operand: product of 'gemm0_local': found operands of float32 and float32; ",
        UNSTAGED,
    ),
    "one wide operand": (
        lambda: t.program(dtypes=("float8_e4m3fn", "float16")),
        "tile-operand: product of 'C': found operands of float8_e4m3fn and float16; ",
        "convert the operands",
    ),
    "two 16-bit types": (
        lambda: t.program(dtypes=("float16", "bfloat16")),
        "tile-operand: product of 'C': found operands of float16 and bfloat16; ",
        "convert one of them",
    ),
    "fp8 as [k, n]": (
        lambda: product("M=64,N=64,K=128,dtype=float8_e4m3fn,weights=kn"),
        "tile-operand: tensor 'B': found a float8_e4m3fn operand stored as [k, n]; ",
        "transpose the weight once",
    ),
    "pitch of the left operand": (
        lambda: product("M=64,N=64,K=100,dtype=bfloat16,weights=kn"),
        "tile-operand: tensor 'A': found rows of 200 bytes; ",
        "pad the rows",
    ),
    "pitch of the right operand": (
        lambda: product("M=64,N=100,K=64,dtype=bfloat16,weights=kn"),
        "tile-operand: tensor 'B': found rows of 200 bytes; ",
        "pad the rows",
    ),
    "pitch of fp8": (
        lambda: product("M=64,N=64,K=120,dtype=float8_e5m2,weights=nk"),
        "tile-operand: tensor 'A': found rows of 120 bytes; ",
        "pad the rows",
    ),
    "half a row of 128 bytes": (
        lambda: product_in_steps("M=64,N=64,K=128,dtype=float16,weights=nk", 32),
        "tile-operand: tensor 'A': found 32 elements of the reduction in a step; ",
        "split the reduction by 64",
    ),
    "depth of fp8": (
        lambda: product_in_steps("M=64,N=64,K=128,dtype=float8_e5m2,weights=nk", 64),
        "tile-operand: tensor 'A': found 64 elements of the reduction in a step; ",
        "split the reduction by 128",
    ),
    "96 rows": (
        lambda: product("M=96,N=64,K=64,dtype=float16,weights=nk", rows=96),
        "tile-shape: product of 'gemm0_local': found a tile of 96 x 64; ",
        OTHER_FACTORS,
    ),
    "five blocks of rows": (
        lambda: product("M=320,N=64,K=64,dtype=float16,weights=nk", rows=320),
        "tile-shape: product of 'gemm0_local': found a tile of 320 x 64; ",
        OTHER_FACTORS,
    ),
    "too many accumulators of two blocks": (
        lambda: product("M=256,N=200,K=64,dtype=float16,weights=nk", rows=256, columns=200),
        "tile-shape: product of 'gemm0_local': found a tile of 256 x 200; limit: 64 or 128 rows "
        "with columns in multiples of 8 up to 256, or 192 or 256 rows with up to 192 columns; all "
        "products of a tile together",
        OTHER_FACTORS,
    ),
    "too many accumulators": (
        lambda: product("M=192,N=256,K=64,dtype=float16,weights=nk", rows=192, columns=256),
        "tile-shape: product of 'gemm0_local': found a tile of 192 x 256; ",
        OTHER_FACTORS,
    ),
    "odd columns": (
        lambda: product("M=64,N=60,K=64,dtype=float16,weights=nk", columns=60),
        "tile-shape: product of 'gemm0_local': found a tile of 64 x 60; ",
        OTHER_FACTORS,
    ),
    "wide tile": (
        lambda: product("M=64,N=264,K=64,dtype=float16,weights=nk", columns=264),
        "tile-shape: product of 'gemm0_local': found a tile of 64 x 264; ",
        OTHER_FACTORS,
    ),
    "stages": (
        lambda: product("M=128,N=256,K=64,dtype=float16,weights=nk", rows=128, stages=5),
        "shared-memory: kernel: found 278688 bytes for 5 stages of 49152 bytes; ",
        "use fewer stages or smaller tiles",
    ),
    "one stage": (
        lambda: product("M=128,N=256,K=128,dtype=float16,weights=nk", stages=1),
        "stages: loop 'k_0': found 1 stage for 2 steps; limit: 2 or more: a tile is held until the "
        "one after it is multiplied",
        "annotate the loop with 2 stages, or 0 for as many as fit",
    ),
}


def masked() -> Any:
    """A product whose columns are multiplied by integers."""
    a, b = (Operand(name, (64, 64), "float16") for name in ("A", "B"))
    mask = Operand("mask", (64,), "int32")
    form = Form(
        a,
        (Product("gemm0", b, "nk"),),
        None,
        None,
        lambda tensors, i, j: tensors["gemm0"](i, j) * tensors["mask"](j).astype("float32"),
        (mask,),
        "float16",
    )
    return schedule_tiled_gemm(emit(form))


def function_of(made: Any) -> Any:
    return only_function(made if isinstance(made, ir.PrimFunc) else made())


def refused(func: Any, step: Callable[[], Any], text: str) -> Refusal:
    """The refusal of one step, which the whole lowering must give too."""
    with pytest.raises(LoweringRefused) as caught:
        step()
    refusal = caught.value.refusal
    assert str(refusal).startswith(text)
    assert refusal.limit
    with pytest.raises(LoweringRefused) as lowered:
        lower(func)
    assert lowered.value.refusal == refusal
    return refusal


@pytest.mark.parametrize("case", PROGRAMS)
def test_other_forms_of_programs(case: str) -> None:
    made, text = PROGRAMS[case]
    func = function_of(made)
    refusal = refused(func, lambda: recover(func), f"tile-program: {text}")
    assert AS_THE_RULES in refusal.instead and UNSTAGED in refusal.instead


@pytest.mark.parametrize("case", PLANS)
def test_tiles_that_the_hardware_does_not_take(case: str) -> None:
    made, text, cure = PLANS[case]
    func = function_of(made)
    (programs,) = recover(func)
    refusal = refused(func, lambda: plan_kernel(programs, device("nvidia-h100")), text)
    assert cure in refusal.instead


def test_the_parts_are_right_together() -> None:
    """What the refused programs have in common is not refused."""
    assert lower(t.program()).image.launches[0].block == (256, 1, 1)
