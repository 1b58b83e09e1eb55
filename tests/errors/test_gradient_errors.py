"""What differentiation refuses, word by word."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te, tirx

from crossfuse.autodiff import gradients
from crossfuse.errors import GradientRefused
from errors import gradient_scripts as scripts

LIMIT = "limit: indices of sums, multiples, quotients and remainders of loop variables. Instead: "
SELECT = "leave 'X' out of wrt, or multiply by a matrix of 0 and 1 that says which element is read."


def computed(made: Any, shape: tuple[int, ...] = (4,), extra: str = "int32") -> Any:
    x, at = te.placeholder((16,), "float32", "X"), te.placeholder((16,), extra, "At")
    return te.create_prim_func([x, at, te.compute(shape, lambda *i: made(x, at, *i), name="Y")])


def nested(x: Any, at: Any, i: Any) -> Any:
    index = i
    for each in range(8):
        index = tirx.if_then_else(i > each, index + 1, index)
    return x[tirx.max(index, 0)]


COMPUTED = {
    "data": (
        lambda x, at, i: x[at[i] + 1],
        "gradient: block 'Y', buffer 'X': found X[At[i0] + 1], where At[i0] is data; "
        + LIMIT
        + SELECT,
    ),
    "square": (
        lambda x, at, i: x[i * i],
        "gradient: block 'Y', buffer 'X': found X[i0 * i0], where i0 * i0 is a product of "
        "variables; " + LIMIT + SELECT,
    ),
    "divided by a variable": (
        lambda x, at, i: x[5 // (i + 1)],
        "gradient: block 'Y', buffer 'X': found X[5 // (i0 + 1)], where 5 // (i0 + 1) is divided "
        "by i0 + 1, which is no constant; " + LIMIT + SELECT,
    ),
    "towards zero": (
        lambda x, at, i: x[tirx.truncdiv(i - 3, 2) + 2],
        "gradient: block 'Y', buffer 'X': found X[T.Div(i0 - 3, 2) + 2], where T.Div(i0 - 3, 2) "
        "rounds towards 0, and one of both may be negative; " + LIMIT + SELECT,
    ),
    "shift": (
        lambda x, at, i: x[i ^ 1],
        "gradient: block 'Y', buffer 'X': found X[i0 ^ 1], where i0 ^ 1 is "
        "no sum, multiple, quotient or remainder; " + LIMIT + SELECT,
    ),
    "choices": (
        nested,
        "limit: 6 choices. Instead: write the choices as separate blocks.",
    ),
    "function": (
        lambda x, at, i: tirx.nextafter(x[i], x[i + 1]),
        "gradient: block 'Y': found function tirx.nextafter in T.nextafter(X[i0], X[i0 + 1]); "
        "limit: sums, products, quotients, maxima, minima, choices, casts, and functions abs, "
        "acos, acosh, asin, asinh, atan, atan2, atanh, cos, cosh, erf, exp, exp10, exp2, fmod, "
        "hypot, log, log10, log1p, log2, pow, rsqrt, sigmoid, sin, sinh, sqrt, tan, tanh. "
        "Instead: write it with these, or leave the input out of wrt.",
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_indices_and_operators(name: str) -> None:
    made, text = COMPUTED[name]
    with pytest.raises(GradientRefused) as refused:
        gradients(computed(made), wrt=["X"])
    assert text in str(refused.value)


SCRIPTS = {
    "two_writers": "gradient: buffer 'B': found blocks 'zero' and 'copy' that write it; limit: one "
    "block for each buffer. Instead: write it by one block.",
    "too_early": "gradient: block 'out', buffer 'C': found a read before a write; limit: blocks in "
    "the order of their data. Instead: order the blocks.",
    "never": "gradient: block 'out', buffer 'C': found a buffer that nothing writes; limit: "
    "written buffers. Instead: write it before it is read.",
    "half": "gradient: block 'half', buffer 'B': found a store to [v_i] of [4]; limit: each element"
    " of the buffer once, at affine indices. Instead: write each buffer by one block, all of it.",
    "scan": "gradient: block 'scan', buffer 'B': found T.if_then_else(v_i > 0, B[v_i - 1], "
    "T.float32(0.0)) + A[v_i]; limit: element-wise blocks, and updates by +, *, max or min from an "
    "initial value. Instead: write reductions so, with T.init.",
    "from_zero": "gradient: block 'largest': found a max from 0; limit: a start from the least "
    "number. Instead: start from the least number, and combine the result with 0 after.",
    "strided": "gradient: parameter 'n': found a number; limit: buffers. Instead: build the "
    "function for one value of it, or store it in a buffer.",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions(name: str) -> None:
    with pytest.raises(GradientRefused) as refused:
        gradients(getattr(scripts, name))
    assert str(refused.value) == SCRIPTS[name]


@pytest.mark.parametrize(
    ("wrt", "found"), [(["At"], "'At'"), (["Y", "X", "Z"], "'Y', 'Z'"), ([], "no name")], ids=str
)
def test_names(wrt: list[str], found: str) -> None:
    func = computed(lambda x, at, i: x[i] + at[i].astype("float32"))
    with pytest.raises(GradientRefused) as refused:
        gradients(func, wrt=wrt)
    assert str(refused.value) == (
        f"gradient: wrt: found {found}; limit: inputs of floating point: X. Instead: name some of "
        "these, or leave wrt out."
    )


def test_names_that_are_kept() -> None:
    func = computed(lambda x, at, i: x[i] + at[i].astype("float32"))
    with pytest.raises(GradientRefused) as refused:
        gradients(func, keep=["Z"])
    text = "gradient: keep: found 'Z'; limit: outputs and intermediates: Y. Instead: name some of "
    assert str(refused.value) == f"{text}these."


def test_no_floating_point() -> None:
    at = te.placeholder((4,), "int32", "At")
    func = te.create_prim_func([at, te.compute((4,), lambda i: at[i] + 1, name="Y")])
    with pytest.raises(GradientRefused) as refused:
        gradients(func)
    assert str(refused.value) == (
        "gradient: function: found inputs At; limit: an input of floating point. Instead: convert "
        "inside of it."
    )


def test_data_in_an_index_of_another_input_is_no_obstacle() -> None:
    """A table of which no gradient is wanted may be read anywhere."""
    x, at = te.placeholder((16,), "float32", "X"), te.placeholder((4,), "int32", "At")
    w = te.placeholder((4,), "float32", "W")
    y = te.compute((4,), lambda i: x[at[i]] * w[i], name="Y")
    found = gradients(te.create_prim_func([x, at, w, y]), wrt=["W"])
    assert found.inputs == ("X", "At")
