"""Loops of a product in any order are those of its output, then what is summed."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm import te
from tvm.s_tir import Schedule

from crossfuse.blocks.read import in_output_order
from crossfuse.compiler import read_source
from crossfuse.compiler.compiled import Wanted, choose
from crossfuse.emulate.llvm import run_sequential
from crossfuse.hardware import device

pytestmark = pytest.mark.cpu
M, N, K = 17, 64, 32


def product() -> Any:
    """In the order of the output."""
    a, b = te.placeholder((M, K), "float16", "a"), te.placeholder((K, N), "float16", "b")
    k = te.reduce_axis((0, K), "k")
    c = te.compute(
        (M, N), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), k), "c"
    )
    out = te.compute((M, N), lambda i, j: c[i, j].astype("float16"), "out")
    return te.create_prim_func([a, b, out])


def reordered(order: tuple[int, ...], variables: bool) -> Any:
    schedule = Schedule(product())
    block = schedule.get_sblock("c")
    loops = schedule.get_loops(block)
    schedule.reorder(*(loops[each] for each in order))
    if variables:
        schedule.reorder_block_iter_var(block, list(order))
    return schedule.mod["main"]


@pytest.mark.parametrize("variables", [False, True])
@pytest.mark.parametrize("order", permutations(range(3)))
def test_all_orders_are_one(order: tuple[int, ...], variables: bool) -> None:
    due = product()
    assert in_output_order(due) is due
    found = in_output_order(reordered(order, variables))
    assert tvm_ffi.structural_equal(found.body, due.body)


def test_a_kernel_of_loops_in_another_order() -> None:
    source = read_source(reordered((2, 1, 0), True))
    made = choose(source, device(None), Wanted(rule="tensor"))
    rng = np.random.default_rng(0)
    given = {"a": (M, K), "b": (K, N)}
    arrays = {name: rng.standard_normal(e).astype("float16") for name, e in given.items()}
    got = run_sequential(made.schedule, arrays).outputs["out"]
    due = arrays["a"].astype("float64") @ arrays["b"].astype("float64")
    np.testing.assert_allclose(got, due, rtol=2e-3, atol=2e-3)
