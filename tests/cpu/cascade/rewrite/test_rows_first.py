"""Functions in two: rows that a cascade makes, and the product of them."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te

from cpu.hopper.rows.products import layernorm_gemm, scheduled
from crossfuse.cascade.rewrite.rows_first import joined, rows_first
from crossfuse.errors import CascadeRefused
from crossfuse.workload import parse
from crossfuse.workload import prim_func as chain_func
from crossfuse.workload.cascade_build import prim_func
from crossfuse.workload.cascades import resolve

pytestmark = pytest.mark.cpu


def names(buffers: Any) -> list[str]:
    return [str(each.name) for each in buffers]


def test_a_norm_is_cut_from_its_product() -> None:
    parts = rows_first(prim_func(resolve("rmsnorm_gemm:tokens=4,K=16,N=8")))
    assert parts is not None
    assert names(parts.passed) == ["normalised"]
    assert names(parts.rows.params) == ["x", "gamma", "normalised"]
    assert names(parts.product.params) == ["normalised", "weight", "out"]
    assert names(parts.rows.body.block.alloc_buffers) == ["squares"]
    assert names(parts.product.body.block.alloc_buffers) == ["product"]


def test_what_the_epilogue_reads_is_passed_on() -> None:
    parts = rows_first(prim_func(resolve("quant_gemm:tokens=4,K=32,N=8")))
    assert parts is not None
    assert names(parts.passed) == ["scale", "quantised"]
    assert names(parts.product.params) == ["scale", "quantised", "weight", "weight_scale", "out"]


def test_the_blocks_of_a_schedule() -> None:
    function = scheduled(layernorm_gemm(70, 128, 32), rows=64, columns=16).mod["main"]
    found = [str(each.loop_var.name) for each in function.body.block.body.seq]
    assert found[0] == "row" and len(found) == 2
    assert "crossfuse.grid_stage" in str(function.body.block.body.seq[0])


@pytest.mark.parametrize("text", ["gemm:M=8,K=16,N=8", "gemm_chain:M=8,K=16,N=8,L=8"])
def test_products_of_inputs_are_left_alone(text: str) -> None:
    assert rows_first(chain_func(parse(text))) is None


@pytest.mark.parametrize(
    "text", ["softmax:rows=4,cols=8", "moe_routing:tokens=4,hidden=8,experts=4,top_k=1"]
)
def test_cascades_without_a_product_behind_them_are_left_alone(text: str) -> None:
    assert rows_first(prim_func(resolve(text))) is None


def named(block: str) -> Any:
    """A norm and its product, whose epilogue has a name."""
    x, weight = (te.placeholder((4, 32), "float32", name) for name in ("x", "weight"))
    j, k = (te.reduce_axis((0, 32), name) for name in "jk")
    total = te.compute((4,), lambda i: te.sum(x[i, j], axis=j), "total")
    less = te.compute(x.shape, lambda i, j: x[i, j] - total[i], "less")
    y = te.compute((4, 4), lambda i, n: te.sum(less[i, k] * weight[n, k], axis=k), "y")
    out = te.compute(y.shape, lambda i, n: y[i, n] + 1.0, block)
    return te.create_prim_func([x, weight, out])


def test_blocks_of_both_have_names_of_their_own() -> None:
    with pytest.raises(CascadeRefused) as caught:
        scheduled(named("outputs"))
    assert str(caught.value) == (
        "cascade-stream: block 'outputs': found a name that a block of the stream has; limit: "
        "blocks by names of their own. Instead: rename it."
    )
    parts = rows_first(named("last"))
    assert parts is not None
    assert names(joined(parts, parts.rows).params) == ["x", "weight", "last"]
