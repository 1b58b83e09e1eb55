"""Expressions of TVM as sympy's, and back: the same numbers come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import tvm
from tvm import te, tirx

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import (
    OF_FUNCTION,
    OF_OPERATOR,
    Fence,
    Flag,
    Unevaluated,
    function,
    rint,
    round_away,
    shared,
)
from crossfuse.cascade.expressions.tir import narrows, to_sympy, to_tir
from crossfuse.errors import CascadeRefused

pytestmark = pytest.mark.cpu

X, Y = sympy.symbols("x y", real=True)
P, Q = sympy.symbols("i j", integer=True)
B = sympy.Symbol("b", integer=True, nonnegative=True)
SYMBOLS = {"x": X, "y": Y, "i": P, "j": Q, "b": B}
TYPES = {"x": "float32", "y": "float32", "i": "int32", "j": "int32", "b": "bool"}
POINTS = 64


def points(positive: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    drawn = {name: rng.standard_normal(POINTS).astype(np.float32) for name in "xy"}
    if positive:
        drawn = {name: np.abs(array) + np.float32(0.1) for name, array in drawn.items()}
    integers = {name: rng.integers(0, 9, POINTS).astype(np.int32) for name in "ij"}
    return drawn | integers | {"b": rng.integers(0, 2, POINTS).astype(bool)}


def evaluated(element: Callable[[dict[str, Any]], Any], data: dict[str, np.ndarray]) -> np.ndarray:
    """What LLVM computes of an expression of variables, at each point."""
    inputs = {name: te.placeholder((POINTS,), dtype, name) for name, dtype in TYPES.items()}
    variables = {name: ir.Var(name, dtype) for name, dtype in TYPES.items()}
    names = {var: name for name, var in variables.items()}

    def at_point(at: Any) -> Any:
        loads = {var: inputs[name](at) for var, name in names.items()}
        return ir.substitute(element(variables), lambda var: loads.get(var, var))

    made = te.compute((POINTS,), at_point, "made")
    built = tvm.compile(te.create_prim_func([*inputs.values(), made]), target="llvm")
    output = tvm.runtime.empty((POINTS,), made.dtype)
    built(*(tvm.runtime.tensor(data[name]) for name in inputs), output)
    return output.numpy()


def of_sympy(expression: sympy.Expr, dtype: str = "float32") -> Callable[[dict[str, Any]], Any]:
    return lambda values: to_tir(
        expression, {SYMBOLS[name]: value for name, value in values.items()}, dtype
    )


def there_and_back(element: Callable[..., Any], dtype: str) -> Callable[[dict[str, Any]], Any]:
    def again(values: dict[str, Any]) -> Any:
        found = to_sympy(element(**values), lambda node: SYMBOLS[str(node.name)])
        return of_sympy(found, dtype)(values)

    return again


PLAIN = [
    X + Y - 2,
    X - Y,
    -X - Y,
    X * Y / 3,
    X**2 + Y**5 - X**-2,
    sympy.sqrt(X) / sympy.sqrt(Y),
    1 / sympy.sqrt(X + sympy.Rational(1, 100000)),
    X ** sympy.Rational(3, 2),
    X**Y,
    sympy.exp(X - Y) * Y,
    2**X,
    sympy.log(X) - sympy.log(2),
    sympy.tanh(X) + sympy.erf(Y) + sympy.sin(X) * sympy.cos(Y),
    sympy.sinh(X) + sympy.cosh(Y) + sympy.asinh(X),
    sympy.Max(X, Y, 1) + sympy.Min(X, Y),
    sympy.Abs(X - Y),
    rint(8 * X) + round_away(8 * Y) + sympy.floor(X) + sympy.ceiling(Y),
    sympy.Piecewise((X, X > Y), (Y, True)),
    sympy.Piecewise((X, (P <= Q) & (P >= Q - 3)), (Y, sympy.Eq(P, 0) | sympy.Ne(B, 0)), (0, True)),
    sympy.Piecewise((X, sympy.Not(sympy.Eq(P, Q))), (-X, True)),
    X * (P - Q) / 8,
    X + sympy.Mod(P, 4) * sympy.floor(Q / 3),
    sympy.Mod(X, Y),
    sympy.Piecewise((1, sympy.Eq(B, 0)), (X, True)),
    sympy.pi * X + sympy.E,
    Unevaluated(X / Y) ** 2,
]


@pytest.mark.parametrize("expression", PLAIN, ids=str)
def test_numbers_are_those_of_numpy(expression: sympy.Expr) -> None:
    data = points(positive=True)
    wide = {name: array.astype(np.float64) for name, array in data.items() if name in "xy"}
    function = sympy.lambdify(list(SYMBOLS.values()), expression, ["scipy", "numpy"])
    due = function(*({**data, **wide, "b": data["b"].astype(int)}[name] for name in SYMBOLS))
    found = evaluated(of_sympy(expression), data)
    np.testing.assert_allclose(found, due, rtol=2e-5, atol=2e-5)


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


WRITTEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "arithmetic": ("float32", lambda x, y, i, j, b: (x + y) * f32(0.5) - x / (y * y + f32(1))),
    "exponentials": ("float32", lambda x, y, i, j, b: tirx.exp(x) + tirx.exp2(y)),
    "logarithms": (
        "float32",
        lambda x, y, i, j, b: tirx.log(x * x + f32(1)) + tirx.log2(y * y + f32(2)),
    ),
    "more logarithms": (
        "float32",
        lambda x, y, i, j, b: tirx.log10(x * x + f32(1)) + tirx.log1p(y * y),
    ),
    "roots": ("float32", lambda x, y, i, j, b: tirx.sqrt(x * x) * tirx.rsqrt(y * y + f32(1e-5))),
    "curves": ("float32", lambda x, y, i, j, b: tirx.tanh(x) * tirx.sigmoid(y) + tirx.erf(x)),
    "powers": ("float32", lambda x, y, i, j, b: tirx.pow(x * x + f32(1), y)),
    "extremes": ("float32", lambda x, y, i, j, b: tirx.max(tirx.abs(x), tirx.min(y, f32(0.25)))),
    "rounding": (
        "float32",
        lambda x, y, i, j, b: (
            tirx.round(x * f32(4))
            + tirx.nearbyint(y * f32(4))
            + tirx.floor(x)
            - tirx.ceil(y)
            + tirx.trunc(x * f32(3))
        ),
    ),
    "choices": (
        "float32",
        lambda x, y, i, j, b: tirx.Select(
            tirx.all(i <= j, tirx.Not(b)), x, tirx.if_then_else(i == j + 1, y, f32(-2))
        ),
    ),
    "flags": ("float32", lambda x, y, i, j, b: b.astype("float32") * x + (i < j).astype("float32")),
    "flags in conditions": (
        "float32",
        lambda x, y, i, j, b: tirx.Select(tirx.any(b, x > y), x, tirx.Select(i < j, y, x)),
    ),
    "a choice of flags": (
        "float32",
        lambda x, y, i, j, b: tirx.Select(tirx.Select(b, i < j, x > y), x, y),
    ),
    "integers": ("int32", lambda x, y, i, j, b: (i * 3 + j) // 4 + (i - j) % 3 - tirx.max(i, j)),
    "truncated quotients": (
        "int32",
        lambda x, y, i, j, b: (x * f32(5)).astype("int32") + tirx.truncdiv(i - j, 2),
    ),
    "positions": ("float32", lambda x, y, i, j, b: x + (j - i).astype("float32") * f32(0.125)),
    "casts": (
        "float32",
        lambda x, y, i, j, b: x.astype("float64").astype("float32") + i.astype("float32"),
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_there_and_back(name: str) -> None:
    dtype, element = WRITTEN[name]
    data = points()
    due = evaluated(lambda values: element(**values), data)
    found = evaluated(there_and_back(element, dtype), data)
    np.testing.assert_allclose(found, due, rtol=1e-5, atol=1e-6)


def random_number(rng: np.random.Generator, values: dict[str, Any], depth: int) -> Any:
    """A random expression whose values stay moderate."""
    if depth == 0:
        choice = rng.integers(5)
        if choice == 4:
            return f32(float(rng.integers(-8, 9)) / 4)
        return [values["x"], values["y"], values["i"].astype("float32"), values["x"]][choice]
    a, b = (random_number(rng, values, depth - 1) for _ in range(2))
    i, j = values["i"], values["j"]
    makers: list[Callable[[], Any]] = [
        lambda: a + b,
        lambda: a - b,
        lambda: tirx.tanh(a) * b,
        lambda: a / (tirx.abs(b) + f32(1)),
        lambda: tirx.max(a, b),
        lambda: tirx.min(a, b),
        lambda: tirx.exp(tirx.min(a, f32(1)) - tirx.abs(b)),
        lambda: tirx.Select(tirx.any(a > b, i < j), a, b),
        lambda: tirx.if_then_else(tirx.all(i <= j, values["b"]), a, b),
        lambda: tirx.sqrt(tirx.abs(a)),
        lambda: tirx.sigmoid(a) - b,
        lambda: tirx.floor(a) + b * (i - j).astype("float32"),
    ]
    return makers[rng.integers(len(makers))]()


@pytest.mark.parametrize("seed", range(24))
def test_random_expressions_there_and_back(seed: int) -> None:
    def element(**values: Any) -> Any:
        return random_number(np.random.default_rng(seed), values, 4)

    data = points()
    due = evaluated(lambda values: element(**values), data)
    found = evaluated(there_and_back(element, "float32"), data)
    close = np.isclose(found, due, rtol=1e-4, atol=1e-4)
    # Where a floor or a comparison stands at its edge, rounding decides.
    assert close.mean() > 0.9


def test_equal_flags_are_compared() -> None:
    b, x = ir.Var("b", "bool"), ir.Var("x", "float32")
    found = to_sympy(
        tirx.Select(b == (x > f32(0)), x, f32(0)), lambda node: SYMBOLS[str(node.name)]
    )
    due = {(1, 2): 2, (1, -2): 0, (0, 2): 0, (0, -2): -2}
    assert {(b, x): found.subs({B: b, X: x}) for b, x in due} == due


def test_constants_are_what_was_written() -> None:
    read = {value: to_sympy(f32(value), lambda node: X) for value in (1e-5, 0.1, 448.0, -2.5)}
    assert read[1e-5] == sympy.Rational(1, 100000)
    assert read[0.1] == sympy.Rational(1, 10)
    assert read[448.0] == 448
    assert read[-2.5] == sympy.Rational(-5, 2)
    assert to_sympy(f32(float("-inf")), lambda node: X) == -sympy.oo


def test_numbers_beyond_a_type_are_its_largest() -> None:
    """Scores masked by the least number of a type, in units of 2's exponent."""
    least = -float(np.finfo("float32").max)
    written = to_tir(sympy.Rational(least) / sympy.log(2), {}, "float32")
    assert float(written.value) == least
    masked = sympy.Piecewise((X, P < 4), (sympy.Rational(least), True))
    data = points()
    assert evaluated(of_sympy(masked), data)[data["i"] >= 4].max() == least
    found = function((X, P), masked)(data["x"], data["i"])
    assert found.dtype != object and found.min() == least


def test_infinities_are_true_ones() -> None:
    masked = sympy.Piecewise((X, P < 4), (-sympy.oo, True))
    data = points()
    found = evaluated(of_sympy(masked), data)
    assert np.array_equal(np.isneginf(found), data["i"] >= 4)


@pytest.mark.parametrize(
    ("left_out", "kept"),
    [
        (lambda x, y, i, j, b: b, lambda x, y, i, j, b: tirx.Not(b)),
        (lambda x, y, i, j, b: i > j, lambda x, y, i, j, b: i <= j),
        (
            lambda x, y, i, j, b: tirx.all(b, i < j),
            lambda x, y, i, j, b: tirx.Not(tirx.all(b, i < j)),
        ),
    ],
    ids=["flag", "positions", "both"],
)
def test_masks_of_what_is_left_out_are_those_of_what_is_kept(
    left_out: Callable[..., Any], kept: Callable[..., Any]
) -> None:
    values = {name: ir.Var(name, dtype) for name, dtype in TYPES.items()}
    x, lowest = values["x"], f32(float("-inf"))
    read = [
        to_sympy(each, lambda node: SYMBOLS[str(node.name)])
        for each in (
            tirx.Select(left_out(**values), lowest, x),
            tirx.Select(kept(**values), x, lowest),
        )
    ]
    assert read[0] == read[1] and read[0].args[-1] == (-sympy.oo, True)


def test_masks_by_values_keep_what_is_nan() -> None:
    """Neither ``x > y`` nor ``x <= y`` holds of NaN."""

    def masked(x: Any, y: Any, i: Any, j: Any, b: Any) -> Any:
        return tirx.Select(tirx.any(b, x > y), f32(float("-inf")), x)

    data = points()
    data["x"][::3] = np.nan
    due = evaluated(lambda values: masked(**values), data)
    assert np.isnan(due).any() and np.isneginf(due).any()
    np.testing.assert_array_equal(evaluated(there_and_back(masked, "float32"), data), due)


def test_conditions_as_numbers_multiply() -> None:
    """A choice hides what is infinite, a factor of 0 makes NaN of it; whole numbers are finite."""
    x, b = ir.Var("x", "float32"), ir.Var("b", "bool")
    values = {x: X, b: B}
    zero = tirx.const(0.0, "float32")
    mask = sympy.Piecewise((1, sympy.Ne(B, 0)), (0, True))
    flag = b.astype("float32")
    assert to_sympy(x * flag * flag, values.__getitem__) == X * Flag(mask)
    assert to_sympy(flag * tirx.const(2.0, "float32"), values.__getitem__) == 2 * mask
    hidden = to_sympy(tirx.Select(b, x, zero), values.__getitem__)
    assert hidden == sympy.Piecewise((X, sympy.Ne(B, 0)), (0, True))


def test_large_positions_are_not_rounded() -> None:
    data = points() | {"i": np.full(POINTS, 2**24 + 1, np.int32)}
    data["j"] = np.full(POINTS, 2**24, np.int32)
    found = evaluated(of_sympy(sympy.Piecewise((1, sympy.Eq(P, Q)), (X * (P - Q), True))), data)
    assert np.array_equal(found, data["x"])


def test_exponents_stay_what_they_are() -> None:
    x = ir.Var("x", "float32")
    names = []
    for expression in (sympy.exp(X), 2**X, 1 / sympy.sqrt(X)):
        names.append(str(to_tir(expression, {X: x}, "float32").op.name).rpartition(".")[2])
    assert names == ["exp", "exp2", "rsqrt"]


def test_powers_of_divisors_divide_in_turns() -> None:
    """Of 1e26 the power 3/2 is infinite in float32, and that of the reciprocal is not 0."""
    large = {"x": np.float32([1e10, 1e13, 1e18, 1e26]), "y": np.float32([1, 1e-3, 1e20, 1e30])}
    data = {name: np.resize(large.get(name, each), POINTS) for name, each in points().items()}
    for power in (-sympy.Rational(3, 2), -sympy.Rational(5, 2), -sympy.Integer(2)):
        found = evaluated(of_sympy(X**power * Y), data)
        alone = evaluated(of_sympy(X**power), data)
        wide = np.float64(data["x"]) ** float(power)
        np.testing.assert_allclose(found, wide * np.float64(data["y"]), rtol=1e-6, atol=1e-43)
        np.testing.assert_allclose(alone, wide, rtol=1e-6, atol=1e-43)


def test_float64_stays_float64() -> None:
    x = ir.Var("x", "float32")
    assert str(to_tir(X / 3, {X: x}, "float64").ty) == "float64"


def test_roundings_are_reported() -> None:
    x = ir.Var("x", "float32")
    seen = []

    def rounded(dtype: str, value: sympy.Expr) -> sympy.Expr:
        seen.append((dtype, value))
        return value

    value = (x + f32(1)).astype("bfloat16").astype("float32") * f32(2)
    assert to_sympy(value, lambda node: X, rounded) == 2 * Fence(X + 1)
    assert seen == [("bfloat16", X + 1)]


@pytest.mark.parametrize(
    ("source", "target", "due"),
    [
        ("float32", "bfloat16", True),
        ("bfloat16", "float32", False),
        ("bfloat16", "float16", True),
        ("float16", "bfloat16", True),
        ("float32", "float8_e4m3fn", True),
        ("int32", "bfloat16", False),
    ],
)
def test_which_conversions_narrow(source: str, target: str, due: bool) -> None:
    assert narrows(source, target) is due


def test_every_function_of_tvm_is_known_both_ways() -> None:
    assert set(OF_FUNCTION.values()) <= set(OF_OPERATOR)


def test_shared_parts_are_named_once() -> None:
    m, n = sympy.symbols("m t0", real=True)
    factor = sympy.exp(m - n)
    masked = sympy.Piecewise((factor * X, (P <= Q) & (P > Q - 3)), (0, True))
    definitions, (one, other) = shared([factor * X, masked + factor])
    assert [symbol.name for symbol, _ in definitions] == ["t1", "t2"]
    assert all(symbol.is_real for symbol, _ in definitions)
    back = dict(definitions)
    while any(each.free_symbols & set(back) for each in (one, other)):
        one, other = one.xreplace(back), other.xreplace(back)
    assert (one, other) == (factor * X, masked + factor)


def test_sharing_keeps_comparisons_with_infinity() -> None:
    empty = sympy.Eq(X, -sympy.oo, evaluate=False)
    guard = sympy.Piecewise((0, empty), (X, True), evaluate=False)
    definitions, (first, second) = shared([guard, Y * guard])
    assert definitions[0][1] == guard
    assert (first, second) == (definitions[0][0], Y * definitions[0][0])


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (X + Y, r"cascade-expression: symbol y: found no value; limit: symbols with a value: x"),
        (sympy.gamma(X), r"function gamma: found gamma\(x\); limit: sums, products"),
        (sympy.Piecewise((X, X > 0)), r"Piecewise: .*end it with \(value, True\)"),
        (X + sympy.I, r"number: found I; limit: real numbers"),
        (sympy.Piecewise((1, X > 0), (sympy.zoo, True)), r"number: found zoo; limit: real"),
    ],
    ids=["symbol", "function", "case", "complex", "by zero"],
)
def test_what_tvm_cannot_say_is_refused(expression: sympy.Expr, message: str) -> None:
    with pytest.raises(CascadeRefused, match=message):
        to_tir(expression, {X: ir.Var("x", "float32")}, "float32")


def test_what_is_no_number_is_refused() -> None:
    x = ir.Var("x", "float32")
    with pytest.raises(CascadeRefused, match=r"operator tirx\.isnan: .*limit: arithmetic"):
        to_sympy(tirx.isnan(x), lambda node: X)
    with pytest.raises(CascadeRefused, match=r"constant: found nan; .*mask with -inf"):
        to_sympy(f32(float("nan")), lambda node: X)
    with pytest.raises(
        CascadeRefused, match=r"an infinite factor: found oo \* \(x\); limit: finite"
    ):
        to_sympy(x * f32(float("inf")), lambda node: X)


@pytest.mark.parametrize(("scope", "kind"), [("global", "if_then_else"), ("local", "Select")])
def test_a_choice_computes_both_sides_unless_one_loads_from_memory(scope: str, kind: str) -> None:
    """What a condition keeps from being read may lie beyond its tensor."""
    place, other = ir.Var("place", "int32"), ir.Var("other", "float32")
    loaded = ir.tirx.decl_buffer([4], "float32", "loaded", scope=scope)[place - 1]
    values = {X: loaded, Y: other, P: place}
    for sides in ((X, Y), (Y, X + 1)):
        made = to_tir(sympy.Piecewise((sides[0], P >= 1), (sides[1], True)), values, "float32")
        assert kind in str(made)
    # What a condition itself reads is read anyway.
    made = to_tir(sympy.Piecewise((Y, X > 0), (0, True)), values, "float32")
    assert "Select" in str(made)
    chosen = to_tir(sympy.ITE(P >= 1, X > 0, Y > 0), values, "bool")
    assert kind in str(chosen)


@pytest.mark.parametrize(
    "sum_of",
    [
        lambda a, b, c: (a - b) + c,
        lambda a, b, c: a - (b - c),
        lambda a, b, c: (a + b) - a,
        lambda a, b, c: f32(3) * (a - b) + c,
        lambda a, b, c: ((a + b) - (b - c)) / f32(8),
        lambda a, b, c: c - (a - b) * f32(0.125),
        lambda a, b, c: tirx.abs((b - a) / f32(8) + c),
        lambda a, b, c: tirx.abs(f32(0.125) * ((a - b) - (a + c))),
        lambda a, b, c: tirx.abs(a / (tirx.abs(b) + c)),
    ],
)
def test_additions_stay_in_their_order(sum_of: Callable[..., Any]) -> None:
    """Of numbers that rounding tells apart: the same bits as the source gives."""

    def source(x: Any, y: Any, i: Any, j: Any, b: Any) -> Any:
        return sum_of(x, y, f32(1e-3))

    data = points()
    data |= {name: data[name] + np.float32(1e4) for name in "xy"}
    wanted = evaluated(lambda values: source(**values), data)
    np.testing.assert_array_equal(evaluated(there_and_back(source, "float32"), data), wanted)


@pytest.mark.parametrize(
    "source",
    [
        lambda x, y, i, j, b: x + (f32(1) - b.astype("float32")) * f32(-1e9),
        lambda x, y, i, j, b: x + (i - j).astype("float32") * f32(0.07),
        lambda x, y, i, j, b: x * (f32(2) - b.astype("float32")) + y,
        lambda x, y, i, j, b: (i.astype("float32") - f32(1e9)) + f32(1e9),
    ],
)
def test_sums_of_whole_numbers_are_added_up_before_others(source: Callable[..., Any]) -> None:
    """A mask as a number, or how far a key is: multiplied out, 1e9 takes all digits of a score."""
    data = points()
    wanted = evaluated(lambda values: source(**values), data)
    np.testing.assert_array_equal(evaluated(there_and_back(source, "float32"), data), wanted)


@pytest.mark.parametrize(
    ("node", "due"),
    [
        (tirx.BitwiseAnd, lambda a, b: a & b),
        (tirx.BitwiseOr, lambda a, b: a | b),
        (tirx.BitwiseXor, lambda a, b: a ^ b),
    ],
)
def test_conditions_by_bits(node: Any, due: Callable[[Any, Any], Any]) -> None:
    """As masks of torch come: ``a & b`` of two flags, and ``~a``."""
    a, b = ir.Var("a", "bool"), ir.Var("b", "bool")
    flags = {a: sympy.Symbol("a", integer=True), b: sympy.Symbol("b", integer=True)}
    read = to_sympy(node(a, tirx.BitwiseNot(b)), flags.get)
    for one in (0, 1):
        for other in (0, 1):
            values = {flags[a]: one, flags[b]: other}
            assert bool(read.xreplace(values)) is bool(due(one, 1 - other))


def test_log1p_keeps_small_numbers() -> None:
    x = ir.Var("x", "float32")
    read = to_sympy(tirx.log1p(x), {x: X}.get)
    assert str(to_tir(read, {X: x}, "float32").op.name) == "tirx.log1p"
    np.testing.assert_allclose(function([X], read)(np.array([1e-12])), [1e-12])


def test_elements_may_be_infinite_when_they_are_compared() -> None:
    """Symbols are real numbers, which sympy knows to be finite."""
    x = tirx.Var("x", "float32")
    most, least = (tirx.const(each, "float32") for each in (np.inf, -np.inf))
    for node in (tirx.EQ(x, most), tirx.LT(least, x), tirx.NE(x, least)):
        read = to_sympy(node, lambda _: X)
        assert read not in (sympy.true, sympy.false)
        assert "inf" in str(to_tir(read, {X: x}, "bool"))


def test_a_test_for_nan_is_refused() -> None:
    x = tirx.Var("x", "float32")
    with pytest.raises(CascadeRefused, match="limit: comparisons of two values"):
        to_sympy(tirx.NE(x, x), lambda _: X)
