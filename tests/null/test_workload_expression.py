"""Activations as text: parsing, canonical spelling, evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfuse.errors import WorkloadRefused
from crossfuse.workload import WorkloadSpec
from crossfuse.workload.expression import NAMED, canonical
from crossfuse.workload.numerics import activate

leaves = st.one_of(st.just("x"), st.floats(-100, 100).map(lambda v: repr(abs(v))))
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds("({}{}{})".format, inner, st.sampled_from("+-*"), inner),
        st.builds("{}({})".format, st.sampled_from(["tanh", "sigmoid", "erf", "abs"]), inner),
        st.builds("{}({},{})".format, st.sampled_from(["max", "min"]), inner, inner),
        st.builds("(-{})".format, inner),
        st.builds("(x**{})".format, st.integers(1, 4)),
    ),
    max_leaves=6,
).map("(x+{})".format)

# What Python itself makes of the text: an evaluator that shares nothing with the one under test.
PYTHON = {
    "tanh": np.tanh,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
}


def with_act(act: str) -> WorkloadSpec:
    return WorkloadSpec("gemm", 1, 1, 1, act=act)


@given(expressions)
def test_values_are_those_of_python(text: str) -> None:
    x = np.linspace(-3, 3, 13)
    expected = eval(text, {"__builtins__": {}}, PYTHON | {"x": x})
    np.testing.assert_allclose(activate(with_act(text), x), expected, rtol=1e-12, atol=1e-12)


@given(expressions)
def test_canonical_spelling_is_a_fixed_point(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == once
    x = np.linspace(-3, 3, 7)
    both = [activate(with_act(spelling), x) for spelling in (text, once)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_activation_and_its_expression_are_one(name: str) -> None:
    assert canonical(name) == canonical(NAMED[name]) == name


@pytest.mark.parametrize(
    ("act", "value"),
    [
        ("relu", 0.0),
        ("silu", -2 / (1 + math.exp(2))),
        ("gelu", -(1 + math.erf(-math.sqrt(2)))),
        ("gelu_tanh", -(1 + math.tanh(math.sqrt(2 / math.pi) * (-2 - 0.044715 * 8)))),
        ("quick_gelu", -2 / (1 + math.exp(2 * 1.702))),
        ("squared_relu", 0.0),
        ("x**3-x", -6.0),
        ("exp(1)*x", -2 * math.e),
    ],
)
def test_values_at_minus_two(act: str, value: float) -> None:
    result = activate(with_act(act), np.array([-2.0]))
    np.testing.assert_allclose(result, [value], rtol=1e-15)


def test_the_type_of_the_argument_is_kept() -> None:
    x = np.array([-200.0, 0.0, 200.0], np.float32)
    for act in [*NAMED, "x*sigmoid(1.702*x)+1"]:
        assert activate(with_act(act), x).dtype == np.float32


@given(st.text(max_size=30))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        assert canonical(text)
    except WorkloadRefused as error:
        assert error.refusal.rule == "workload-act"


@pytest.mark.parametrize(
    "hostile",
    [
        "__import__('os').system('true')",
        "x.__class__",
        "(lambda: x)()",
        "[x for x in y]",
        "x if x else x",
        "f'{x}'",
        "(" * 150 + "x",
        "-" * 201 + "x",
        "~" + "-" * 150 + "x",
        "9**9**9*x",
        "x*" + "9" * 150,
        "True*x",
        "x*1j",
        "x and x",
    ],
)
def test_code_is_not_an_expression(hostile: str) -> None:
    with pytest.raises(WorkloadRefused, match=r"^workload-act: act="):
        canonical(hostile)
