"""What is left of 2-byte floats is added and approximated in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax import op

from crossfuse.relax.operators import check_elementwise
from crossfuse.relax.passes import ATTENTION, WideArithmetic
from crossfuse.workload.dtypes import float_type
from relax_models import run

pytestmark = pytest.mark.cpu
DEPTH = 2048


def module(build: Callable[..., Any], dtype: str, *shapes: tuple[int, ...]) -> Any:
    builder = relax.BlockBuilder()
    given = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", given):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(build(*given)))
        builder.emit_func_output(result)
    return builder.get()


def test_long_sums_of_half_precision_round_once() -> None:
    mod = module(op.matmul, "float16", (4, DEPTH), (DEPTH, 4))
    random = np.random.default_rng(0)
    given = [random.random(each).astype("float16") for each in ((4, DEPTH), (DEPTH, 4))]
    exact = given[0].astype("float64") @ given[1].astype("float64")
    legal = relax.transform.LegalizeOps()
    errors = [
        np.abs(run(legal(each), given)[0] - exact).max() for each in (WideArithmetic()(mod), mod)
    ]
    # A unit in the last place is 0.5 there; added in float16 it is many of them.
    assert errors[0] <= 0.26 and errors[1] > 1


@pytest.mark.parametrize("build", [op.tanh, op.sigmoid, op.nn.gelu_tanh], ids=lambda f: f.__name__)
def test_activations_of_half_precision_round_once(build: Callable[..., Any]) -> None:
    """TVM alone takes a tanh as a quotient of polynomials of float16."""
    mod = WideArithmetic()(module(build, "float16", (16, 64)))
    x = np.random.default_rng(0).normal(0, 0.03, (16, 64)).astype("float16")
    wide = module(build, "float32", (16, 64))
    legal = relax.transform.LegalizeOps()
    due = run(legal(wide), [x.astype("float32")])[0].astype("float16")
    np.testing.assert_array_equal(run(legal(mod), [x])[0], due)


def test_a_batch_norm_stays_half_precision() -> None:
    """TVM alone makes float32 of it, by its epsilon, whatever the type says."""
    shapes = ((8, 4, 6, 6), *((4,),) * 4)
    legal = relax.transform.LegalizeOps()
    mod = legal(
        WideArithmetic()(
            module(lambda *x: op.nn.batch_norm(*x, axis=1, training=False)[0], "float16", *shapes)
        )
    )
    random = np.random.default_rng(0)
    x, *rows = (random.uniform(0.5, 2, each).astype("float16") for each in shapes)
    scale, shift, mean, variance = (each.astype("float64")[:, None, None] for each in rows)
    exact = (x - mean) / np.sqrt(variance + 1e-5) * scale + shift
    (made,) = run(mod, [x, *rows])
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, exact, rtol=2e-3, atol=1e-4)


LONG: dict[str, Callable[..., Any]] = {
    "sum": lambda x: op.sum(x, -1),
    "mean": lambda x: op.mean(x, -1),
    "cumsum": lambda x: op.cumsum(x, -1),
    "softmax": lambda x: op.nn.softmax(x, -1),
    "avg_pool": lambda x: op.nn.avg_pool2d(op.reshape(x, (1, 4, 64, 32)), (32, 32), (32, 32)),
    "einsum": lambda x: op.einsum((x, x), "ij,kj->ik"),
    "sort": op.sort,
    "argsort": op.argsort,
    "argmax": lambda x: op.argmax(x, -1),
    "topk": lambda x: op.topk(x, 3),
}


def _all(x: Any) -> Any:
    builder = relax.BlockBuilder.current()
    return relax.Tuple([builder.emit(each(x)) for each in LONG.values()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_tvm_adds_and_sorts_in_the_type_itself(dtype: str) -> None:
    """TVM alone adds 2048 ones of bfloat16 to 256, and sorts bfloat16 by its bits."""
    legal = relax.transform.LegalizeOps()
    narrow = float_type(dtype).numpy
    x = np.random.default_rng(0).random((4, DEPTH)).astype(narrow) - np.asarray(0.25, narrow)
    got = run(legal(WideArithmetic()(module(_all, dtype, (4, DEPTH)))), [x])
    due = run(legal(module(_all, "float32", (4, DEPTH))), [x.astype("float32")])
    for one, other, name in zip(got, due, LONG, strict=True):
        pairs = zip(one, other, strict=True) if name == "topk" else [(one, other)]
        for ours, exact in pairs:
            np.testing.assert_array_equal(ours, exact.astype(ours.dtype), name)


@pytest.mark.parametrize("causal", [None, "TopLeft"])
def test_attention_adds_in_float32(causal: str | None) -> None:
    """TVM alone adds in float16, and loses causal scores that are far below zero."""
    random = np.random.default_rng(0)
    q, k, v = (random.uniform(1, 2, (1, 64, 1, 40)).astype("float16") for _ in range(3))
    given = [(-4 * q).astype("float16"), k, v]
    mod = module(lambda *x: op.nn.attention(*x, causal_mask=causal), "float16", *[q.shape] * 3)
    (got,) = run(relax.transform.LegalizeOps(dict(ATTENTION))(mod), given)
    left, keys, values = (each.astype("float64")[0, :, 0] for each in given)
    scores = left @ keys.T / 40**0.5
    scores[np.triu(np.ones((64, 64), bool), 1) & (causal is not None)] = -np.inf
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    exact = chances / chances.sum(-1, keepdims=True) @ values
    assert np.abs(got[0, :, 0] - exact).max() < 1e-3  # a unit in the last place of 2


def test_convolutions_keep_their_options() -> None:
    def build(x: Any, weight: Any) -> Any:
        return op.nn.conv2d(x, weight, strides=2, padding=1, groups=2)

    mod = module(build, "float16", (1, 4, 8, 8), (6, 2, 3, 3))
    before, wide = mod["main"], WideArithmetic()(mod)["main"]
    first = wide.body.blocks[0].bindings[0].value
    assert str(first.ty.dtype) == "float32" and wide.ret_ty == before.ret_ty
    assert list(first.attrs.strides) == [2, 2] and first.attrs.groups == 2


def _norm(x: Any, gamma: Any, beta: Any) -> Any:
    return op.nn.layer_norm(x, gamma, beta, axes=-1)


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: op.power(x, relax.const(3.0, "bfloat16")), [(4, 8)]),
        (_norm, [(4, 8), (8,), (8,)]),
    ],
)
def test_what_tvm_refuses_in_bfloat16(build: Callable[..., Any], shapes: Any) -> None:
    mod = WideArithmetic()(module(build, "bfloat16", *shapes))
    relax.transform.LegalizeOps()(mod)
    assert str(mod["main"].ret_ty.dtype) == "bfloat16"


def test_numbers_stay_numbers() -> None:
    """A cast of a constant would be a binding that is no call, which nothing is merged with."""

    def build(x: Any) -> Any:
        return op.power(x, relax.const(2.0, "bfloat16"))

    mod = relax.transform.LegalizeOps()(WideArithmetic()(module(build, "bfloat16", (4, 8))))
    values = [each.value for block in mod["main"].body.blocks for each in block.bindings]
    assert not [each for each in values if isinstance(each, GenericConst)]


def test_a_power_of_bfloat16_is_element_wise() -> None:
    x = relax.Var("x", relax.TensorType((4, 8), "bfloat16"))
    call = relax.BlockBuilder().normalize(op.power(x, relax.const(3.0, "bfloat16")))
    check_elementwise(call)
