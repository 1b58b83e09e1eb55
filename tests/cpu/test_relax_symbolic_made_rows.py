"""Rows that a product's kernel makes first, of symbolic rows in Relax: a kernel for each bin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from cpu.test_relax_symbolic_rows import Machine, close, model, symbols
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.lower.extract import lower
from crossfuse.relax import FuseChains

pytestmark = pytest.mark.cpu
K, N = 128, 64
F8 = ml_dtypes.float8_e4m3fn


def norm(emit: Any, x: Any, gamma: Any, weight: Any, residual: Any) -> Any:
    """A norm, the product with a weight as torch stores it, and a residual."""
    normal = emit(op.nn.rms_norm(x, gamma, -1))
    product = emit(op.matmul(normal, emit(op.permute_dims(weight))))
    return emit(op.add(product, residual))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).uniform(-0.5, 0.5, shape).astype("float16")


@pytest.mark.slow
def test_a_norm_picks_the_kernel_of_its_bin() -> None:
    (rows,) = symbols("rows")
    shapes = {"x": (rows, K), "gamma": (K,), "weight": (N, K), "residual": (rows, N)}
    fuse = FuseChains(always=True, bins=(16, 64))
    run = Machine(fuse(model(norm, shapes)))
    (outcome,) = fuse.outcomes
    assert outcome.name == "crossfuse_rows_gemm_rows" and outcome.products == ("lv2",)
    assert [(each.rows, each.name, each.family) for each in outcome.bins] == [
        (16, "crossfuse_rows_gemm_m16", "rows"),
        (64, "crossfuse_rows_gemm_m64", "rows"),
    ]
    gamma, weight = drawn(K), drawn(N, K)
    for count, most in {0: None, 1: 16, 3: 16, 16: 16, 17: 64, 64: 64, 100: None}.items():
        x, residual = drawn(count, K), drawn(count, N)
        got = run(x, gamma, weight, residual)
        assert run.ran == ([f"crossfuse_rows_gemm_m{most}"] if most else [])
        exact = x.astype("float64") / np.sqrt((x.astype("float64") ** 2).mean(-1)[:, None] + 1e-5)
        close(got, exact * gamma @ weight.T.astype("float64") + residual, most is not None)


@pytest.mark.slow
def test_batch_times_sequence_of_a_layer_norm() -> None:
    """The rows of a batch of one sequence are those of a matrix."""
    batch, length = symbols("batch", "length")

    def build(emit: Any, x: Any, gamma: Any, beta: Any, weight: Any) -> Any:
        normal = emit(op.nn.layer_norm(emit(op.reshape(x, x.ty.shape)), gamma, beta, axes=[2]))
        return emit(op.nn.relu(emit(op.matmul(normal, weight))))

    shapes = {"x": (batch, length, K), "gamma": (K,), "beta": (K,), "weight": (K, N)}
    fuse = FuseChains(always=True, bins=(16, 64))
    run = Machine(fuse(model(build, shapes, {"batch": 4, "length": 10})))
    assert [each.rows for each in fuse.outcomes[0].bins] == [16, 40]
    gamma, beta, weight = drawn(K), drawn(K), drawn(K, N)
    for lead, most in {(1, 1): 16, (2, 8): 16, (1, 10): 16, (4, 10): 40}.items():
        x = drawn(*lead, K)
        got = run(x, gamma, beta, weight)
        assert run.ran == [f"crossfuse_rows_gemm_m{most}"]
        wide = x.astype("float64") - x.astype("float64").mean(-1)[..., None]
        normal = wide / np.sqrt((wide * wide).mean(-1)[..., None] + 1e-5) * gamma + beta
        close(got, np.maximum(normal @ weight.astype("float64"), 0), True)


def quantiser() -> Any:
    """Rows over their scales in 8 bits, and the product, which needs the scales too."""
    (rows,) = symbols("rows")
    types = {"x": ((rows, K), "float16"), "weight": ((N, K), "float8_e4m3fn")}
    given = [relax.Var(name, relax.TensorType(*kind)) for name, kind in types.items()]
    builder = relax.BlockBuilder()
    emit = builder.emit
    with builder.function("main", given):
        with builder.dataflow():
            x = emit(op.astype(given[0], "float32"))
            most = emit(op.max(emit(op.abs(x)), axis=-1, keepdims=True))
            scale = emit(op.divide(most, relax.const(448.0, "float32")))
            narrow = emit(op.astype(emit(op.divide(x, scale)), "float8_e4m3fn"))
            turned = emit(op.permute_dims(given[1]))
            product = emit(op.matmul(narrow, turned, out_dtype="float32"))
            whole = emit(op.multiply(product, scale))
            out = builder.emit_output(op.astype(whole, "float16"))
        builder.emit_func_output(out)
    return builder.get()


def test_a_quantiser_of_fewer_rows_than_its_tile() -> None:
    """LLVM has no 8-bit floats in Relax: the schedule, and the kernel in the emulator."""
    fuse = FuseChains(always=True, bins=(16,))
    made = fuse(quantiser())
    assert [each.name for each in fuse.outcomes[0].bins] == ["crossfuse_rows_gemm_m16"]
    (kernel,) = (each for each in made.functions.values() if isinstance(each, tirx.PrimFunc))
    x, weight = drawn(3, K), drawn(N, K).astype(F8)
    wide = x.astype("float32")
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(448)
    exact = (wide / scale).astype(F8).astype("float64") @ weight.astype("float64").T * scale
    sequential = run_sequential(kernel, [x, weight])
    report = emulate(lower(kernel).image, [x, weight], orders=1)
    report.raise_if_wrong()
    for outputs in (sequential.outputs, report.outputs):
        (found,) = outputs.values()
        assert found.shape == (3, N)
        np.testing.assert_allclose(found.astype("float64"), exact, rtol=1e-2, atol=2e-2)


INSTEAD = " Instead: leave the model unfused, or give it one number of rows."


ROW_WISE = "the same row of all that has rows, leading extents together."


#: What makes the rows of a product, extents of what they are made of, and why there is no kernel.
LEFT: dict[str, tuple[Any, Sequence[Any], str]] = {
    # A batch of one has nothing to sum up, or to exchange.
    "a softmax along the batch": (
        lambda emit, x: op.nn.softmax(x, 0),
        ("rows", "more", K),
        "block 'T_softmax_maxelem': found 'compute_intermediate[v_k, v_i0, v_i1]' for "
        f"'T_softmax_maxelem[v_i0, v_i1]'; limit: {ROW_WISE}",
    ),
    "another order of rows": (
        lambda emit, x: op.nn.softmax(emit(op.permute_dims(x, [1, 0, 2])), -1),
        ("rows", "more", K),
        "block 'T_transpose': found 'p0[v_ax1, v_ax0, v_ax2]' for 'T_transpose_intermediate[v_ax0, "
        f"v_ax1, v_ax2]'; limit: {ROW_WISE}",
    ),
    "two extents of rows": (
        lambda emit, x: op.nn.softmax(x, -1),
        (4, "rows", K),
        "main: found a result of shape [4, 4, 64], its rows in one extent; limit: a matrix of "
        "rows.",
    ),
    "no loops": (
        lambda emit, x: op.sort(x, -1),
        ("rows", K),
        "lv: found it calls relax.sort, which is no TIR function; limit: operators that become "
        "functions of loops.",
    ),
    "a product of float32": (
        lambda emit, x: op.astype(emit(op.nn.softmax(x, -1)), "float32"),
        ("rows", K),
        "main: found reductions, and a product of another form; limit: a norm or a quantiser of "
        "rows, and one product of them and weights, of 2 bytes an element or 1.",
    ),
}


def _product(emit: Any, left: Any, weight: Any) -> Any:
    return op.matmul(left, emit(op.astype(weight, left.ty.dtype)))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_says_why(name: str) -> None:
    made, shape, text = LEFT[name]
    known = dict(zip(("rows", "more"), symbols("rows", "more"), strict=True))
    given = tuple(known.get(each, each) for each in shape)
    fuse = FuseChains(always=True, bins=(16,))
    fuse(
        model(
            lambda emit, x, weight: emit(_product(emit, emit(made(emit, x)), weight)),
            {"x": given, "weight": (K, N)},
        )
    )
    (outcome,) = fuse.outcomes
    assert outcome.name == ""
    assert outcome.text == f"outline: {text}{INSTEAD}"


def test_norms_that_several_read_are_not_looked_at() -> None:
    """They are stored anyway; and static rows are left to FuseCascades."""
    (rows,) = symbols("rows")

    def both(emit: Any, x: Any, gamma: Any, weight: Any) -> Any:
        normal = emit(op.nn.rms_norm(x, gamma, -1))
        return emit(op.add(emit(op.matmul(normal, weight)), normal))

    def one(emit: Any, x: Any, gamma: Any, weight: Any) -> Any:
        return emit(op.matmul(emit(op.nn.rms_norm(x, gamma, -1)), weight))

    for build, count in ((both, rows), (one, 16)):
        fuse = FuseChains(always=True, bins=(16,))
        fuse(model(build, {"x": (count, K), "gamma": (K,), "weight": (K, K)}))
        assert not [each.name for each in fuse.outcomes if "rows" in each.name]
