"""What extraction refuses, word by word."""

from __future__ import annotations

from typing import Any

import pytest

from crossfuse.errors import PlanRefused
from crossfuse.workload import parse, prim_func
from errors import extract_cases as cases
from errors import extract_scripts as scripts
from errors.tile_programs import named
from study.extract.chain import chain_from

BUILT = {
    "gather": (
        "extract: block 'product', buffer 'x': found a data-dependent index rows[i0]; limit: "
        "sums of loops times constants, and their quotients by constants. Instead: compute "
        "that part outside, as a function of its own."
    ),
    "squares": (
        "extract: block 'product', buffer 'x': found an index i0 * i0; limit: sums of loops "
        "times constants, and their quotients by constants. Instead: compute that part "
        "outside, as a function of its own."
    ),
    "used_twice": (
        "extract: block 'product', buffer 'product': found an intermediate that blocks 'last'"
        " and 'product_1' read; limit: an intermediate that one product reads. Instead: keep "
        "the other use out of the function, or leave it unfused."
    ),
    "two_computed": (
        "extract: block 'product_2', buffer 'product': found two operands that are computed; "
        "limit: one operand from the product before, and a weight. Instead: outline such a "
        "chain first (crossfuse.relax.outline), or leave the function unfused."
    ),
    "two_chains": (
        "extract: block 'product_1': found products 'product' and 'product_1' of different "
        "left operands; limit: two weights of one left operand. Instead: outline such a chain"
        " first (crossfuse.relax.outline), or leave the function unfused."
    ),
    "three_weights": (
        "extract: block 'all': found 3 products ('product', 'product_1', 'product_2'); limit:"
        " one product, or two of one left operand. Instead: join the weights."
    ),
    "two_outputs": (
        "extract: function: found 2 outputs ('half', 'half'); limit: one output. Instead: "
        "split the function, one for each output."
    ),
    "of_max": (
        "extract: block 'half': found the max of block 'largest'; limit: sums of products of "
        "a left and a right operand. Instead: leave it to a library, there is nothing to "
        "fuse."
    ),
    "element_wise": (
        "extract: block 'twice': found an output that is no element-wise function of a "
        "product; limit: sums of products of a left and a right operand. Instead: leave it to"
        " a library, there is nothing to fuse."
    ),
    "heads": (
        "extract: block 'product_1', buffer 'product': found an index i0 * 4 + v_k0 of rows "
        "and columns; limit: rows that stay rows, and columns that are summed. Instead: split"
        " the chain there, or reshape rows and columns each by themselves."
    ),
    "windows_between": (
        "extract: block 'product_1', buffer 'product': found [i0 + v_k0, v_k1] of [10, 6]; "
        "limit: every element of the result once, in any order of rows and of columns. "
        "Instead: read the whole result, as rows and columns."
    ),
    "part_of_columns": (
        "extract: block 'product_1', buffer 'product': found [i0, v_k0] of [8, 10]; limit: "
        "every element of the result once, in any order of rows and of columns. Instead: read"
        " the whole result, as rows and columns."
    ),
    "rotated": (
        "extract: block 'product_1', buffer 'product': found reads at two places; limit: one "
        "element of the result for each of the reader. Instead: outline such a chain first "
        "(crossfuse.relax.outline), or leave the function unfused."
    ),
    "rows_summed": (
        "extract: block 'product_1': found a result whose rows the next product sums; limit: "
        "sums over the columns, which the weight brings in. Instead: transpose the weight's "
        "product, or split there."
    ),
    "other_batch": (
        "extract: block 'product_1': found a weight 'v' for other matrices than that of block"
        " 'product'; limit: one batch for all weights. Instead: split the chain between the "
        "two products."
    ),
    "normalised_weight": (
        "extract: block 'product', buffer 'most': found a right operand that is computed; "
        "limit: one operand from the product before, and a weight. Instead: outline such a "
        "chain first (crossfuse.relax.outline), or leave the function unfused."
    ),
    "mask_of_all": (
        "extract: block 'product', buffer 'mask': found a factor that follows rows, columns "
        "and the sum; limit: products of a left and a right operand. Instead: outline such a "
        "chain first (crossfuse.relax.outline), or leave the function unfused."
    ),
    "any_rows": (
        "extract: block 'product', loop 'v_i0': found extent rows; limit: constant extents. "
        "Instead: build the function for one number of rows; plans are made for each."
    ),
    "reduced_input": (
        "extract: block 'most': found a max of 'y'; limit: reductions of products, or of the "
        "left operand 'x'. Instead: outline such a chain first (crossfuse.relax.outline), or "
        "leave the function unfused."
    ),
    "four_bits": (
        "extract: type int4: found elements of 4 bits; limit: whole bytes. Instead: pack the "
        "elements into bytes."
    ),
    "stray": (
        "extract: block 'last': found the max of block 'most'; limit: sums of products of a "
        "left and a right operand. Instead: leave it to a library, there is nothing to fuse."
    ),
}
WRITTEN = {
    "two_writers": (
        "extract: buffer 'C': found blocks 'zero' and 'one' that write it; limit: one block "
        "for each buffer. Instead: write it by one block."
    ),
    "without_init": (
        "extract: block 'out', buffer 'C': found C[v_i, v_j] + A[v_i, v_k] * B[v_k, v_j]; "
        "limit: element-wise blocks, and updates by +, *, max or min from an initial value. "
        "Instead: write reductions so, with T.init."
    ),
    "from_one": (
        "extract: block 'out': found an initial value T.float32(1.0); limit: sums that start "
        "at 0. Instead: add the value after the sum."
    ),
    "half_written": (
        "extract: block 'out', buffer 'B': found a store to [v_i * 2, v_j] of [8, 4]; limit: "
        "each element of the buffer once, at affine indices. Instead: write each buffer by "
        "one block, all of it."
    ),
    "half_run": (
        "extract: block 'out': found v_i = i, v_j = j; limit: loops that run each iteration "
        "of a block once. Instead: extract the chain from the function before it is "
        "scheduled."
    ),
    "read_again": (
        "extract: function: found 2 outputs ('B', 'C'); limit: one output. Instead: split the"
        " function, one for each output."
    ),
    "copied_back": (
        "extract: buffer 'B': found an output that is read again; limit: an output that is "
        "only written. Instead: copy it to a buffer of its own."
    ),
    "idle": (
        "extract: block 'idle': found a result that nothing reads; limit: blocks that the "
        "output needs. Instead: take the block out."
    ),
    "too_early": (
        "extract: block 'out', buffer 'C': found a read before a write; limit: blocks in the "
        "order of their data. Instead: order the blocks."
    ),
    "conditional": (
        "extract: block 'out': found a statement IfThenElse; limit: loops around blocks of "
        "one store each. Instead: extract the chain before the function is lowered."
    ),
    "view": (
        "extract: block 'out', buffer 'C': found a view by match_buffer; limit: buffers as "
        "they are. Instead: extract the chain before the function is lowered."
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_and_no_chain_is_refused(name: str) -> None:
    assert _refusal(cases.function(getattr(cases, name))) == BUILT[name]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_and_no_chain_is_refused(name: str) -> None:
    assert _refusal(named(getattr(scripts, name))) == WRITTEN[name]


def test_another_combination_than_a_sum_is_refused() -> None:
    text = _refusal(prim_func(parse("gemm:M=2,K=3,N=5,combine=max")))
    assert "block 'out': found the max of block 'gemm0'" in text


def test_what_is_no_function_is_refused() -> None:
    text = _refusal(parse("gemm:M=2,K=3,N=5"))
    assert text.startswith("extract: function: found a WorkloadSpec; limit: a PrimFunc in s_tir")


def _refusal(func: Any) -> str:
    with pytest.raises(PlanRefused) as caught:
        chain_from(func)
    assert caught.value.refusal.rule == "extract"
    return str(caught.value)
