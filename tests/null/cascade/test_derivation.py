"""What is derived: pairs, rescalings, what is hoisted, stand-ins; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

import cascade_patterns as patterns
from cascade_patterns import symbols
from cascade_patterns.stages import cascade, mean_stages, total
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.expressions.functions import fenced_sum
from crossfuse.cascade.run import merge_tree, stream, two_pass
from crossfuse.cascade.spec import (
    ARGMAX,
    LOGADDEXP,
    MAX,
    MIN,
    PROD,
    SUM,
    Cascade,
    Derivation,
    Stage,
    guarded,
    left,
    new,
    right,
    topk,
    value,
)
from crossfuse.errors import CascadeRefused

exp = sympy.exp
x, v, w = symbols.x, symbols.v, symbols.w
m, s, d = sympy.Symbol("m", real=True), sympy.Symbol("s", real=True), sympy.Symbol("d", real=True)
NOTHING = -sympy.oo


def named(name: str) -> Derivation:
    return derive(patterns.named(name).cascade)


def step(derivation: Derivation, stage: str) -> object:
    return next(each for each in derivation.steps if each.stage == stage)


def test_softmax_corrects_by_one_exponential_of_a_difference() -> None:
    largest, exponentials = named("softmax stats").slots
    assert (largest.contribution, largest.carry, largest.init) == (x, value("m"), NOTHING)
    assert exponentials.contribution == exp(x - guarded("m"))
    assert exponentials.carry == value("s") * exp(value("m") - guarded("m"))
    assert exponentials.merge == left("s") * exp(left("m") - guarded("m")) + right("s") * exp(
        right("m") - guarded("m")
    )
    (stand_in, test), _ = largest.guard.args
    assert stand_in == 0 and test.args == (new("m"), NOTHING)


def test_normalised_attention_keeps_only_the_maximum_in_its_rescaling() -> None:
    derivation = named("normalised attention")
    assert step(derivation, "o").rescaling == ("m",)
    assert step(derivation, "o").hoisted == ("s",)
    assert derivation.stages["o"] == value("o") / guarded("s")


@pytest.mark.parametrize("name", ["RMS norm and GEMM", "L2 norm and dot", "SwiGLU and absmax"])
def test_scales_are_applied_once(name: str) -> None:
    derivation = named(name)
    assert not any(each.corrected for each in derivation.slots)
    assert step(derivation, "o").hoisted and step(derivation, "o").correction is None


def test_factors_of_norm_and_scale_cancel() -> None:
    derivation = named("RMS norm, absmax, GEMM")
    assert derivation.slot("o").contribution == symbols.g * w * x
    assert derivation.stages["o"] == value("o") / guarded("a")
    assert step(derivation, "a").pair == "max, * (c >= 0)"


def test_what_is_rounded_is_scaled_first_and_approximate() -> None:
    derivation = named("absmax quantisation and GEMM")
    assert derivation.slot("o").contribution == 448 * w * x / guarded("a")
    assert derivation.slot("o").carry == value("o") * value("a") / guarded("a")
    assert not derivation.exact
    assert derivation.reason == (
        "stage o rounds its term to float8_e4m3fn: partial results are rounded before the final "
        "scale is known"
    )


def test_powers_are_of_ratios() -> None:
    slot = named("safe 2-norm").slot("o")
    assert slot.contribution.has(sympy.UnevaluatedExpr)
    assert slot.carry.has(sympy.UnevaluatedExpr)


def test_safe_norm_neither_overflows_nor_vanishes() -> None:
    derivation = named("safe 2-norm")
    for scale in (1e-300, 1e300):
        data = {"x": scale * np.arange(1.0, 6.0)[None]}
        for found in (stream(derivation, data, 2), merge_tree(derivation, data, [2, 0, 3])):
            np.testing.assert_allclose(found["out"] / scale, np.sqrt(55), rtol=1e-14)


def test_masked_rows_have_defined_results() -> None:
    data = {"x": np.full((1, 5), -np.inf), "v": np.ones((1, 5))}
    assert stream(named("log-sum-exp"), data, 2)["out"] == -np.inf
    assert stream(named("attention"), data, 2)["out"] == 0
    assert not stream(named("softmax tensor"), data, 2)["out"].any()
    nothing = {"x": np.empty((1, 0)), "v": np.empty((1, 0))}
    assert merge_tree(named("log-sum-exp"), nothing, [0, 0])["out"] == -np.inf
    assert merge_tree(named("attention"), nothing, [0, 0, 0])["out"] == 0


def test_zero_rows_have_defined_results() -> None:
    data = {"x": np.zeros((1, 5)), "w": np.ones((1, 5)), "g": np.ones((1, 5))}
    assert stream(named("absmax quantisation and GEMM"), data, 2)["out"] == 0
    for name in ("min-max normalise and dot", "L2 norm and dot"):  # 0/0, as of separate passes
        assert np.isnan(stream(named(name), data, 2)["out"])
        assert np.isnan(two_pass(named(name).cascade, data)["out"])


def test_a_row_that_a_sum_divides_is_what_separate_passes_make_of_it() -> None:
    """Also where the sum is 0; numbers beside it are infinite then."""
    cascade = Cascade(
        (total(x**2, "d"), total(v, "o")), (x, v), results={"out": sympy.Symbol("o", real=True) / d}
    )
    for values, wanted in (([1.0, -1.0], np.nan), ([1.0, 2.0], np.inf), ([-1.0, 0.0], -np.inf)):
        data = {"x": np.zeros((1, 2)), "v": np.array([values])}
        for found in (stream(derive(cascade), data, 1), two_pass(cascade, data)):
            np.testing.assert_array_equal(found["out"], [wanted])


def test_no_inverse_of_a_sum_that_crosses_zero_is_taken() -> None:
    derivation = derive(Cascade((total(x, "d"), total(v * d)), (x, v)))
    data = {"x": np.array([[1.0, -1.0, 5.0]]), "v": np.ones((1, 3))}
    assert stream(derivation, data, 1)["o"] == 15
    assert merge_tree(derivation, data, [2, 1])["o"] == 15


def test_a_maximum_of_other_elements_is_no_proof_that_a_sum_is_zero() -> None:
    """Of y there is nothing yet where x has brought something: stand-ins on both sides."""
    y = symbols.y_
    derivation = derive(Cascade((Stage("m", MAX, y), total(exp(x - m))), (x, y)))
    assert "stand-ins" in step(derivation, "o").notes[0]
    data = {"x": np.array([[1.0, 2.0, 3.0]]), "y": np.array([[-np.inf, -90.0, -91.0]])}
    data["x"] -= 89
    wanted = two_pass(derivation.cascade, data)["o"]
    np.testing.assert_allclose(stream(derivation, data, 1)["o"], wanted, rtol=1e-12)
    np.testing.assert_allclose(merge_tree(derivation, data, [1, 2])["o"], wanted, rtol=1e-12)


def test_products_count_their_factors() -> None:
    stages = (total(x**2, "d"), Stage("o", PROD, v / (1 + d)))
    derivation = derive(Cascade(stages, (x, v)))
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(2, 9)), "v": rng.normal(size=(2, 9))}
    wanted = two_pass(derivation.cascade, data)["o"]
    np.testing.assert_allclose(stream(derivation, data, 4)["o"], wanted, rtol=1e-12)


def test_logaddexp_moves_addends_and_never_overflows() -> None:
    stages = (total(x, "d"), Stage("o", LOGADDEXP, v + d))
    derivation = derive(Cascade(stages, (x, v)))
    assert [each.name for each in derivation.slots] == ["d", "o_max", "o_sum"]
    data = {"x": np.array([[800.0, 100.0]]), "v": np.array([[900.0, 899.0]])}
    np.testing.assert_allclose(stream(derivation, data, 1)["o"], 1800 + np.log1p(np.exp(-1)))


@pytest.mark.parametrize("monoid", [MAX, MIN, ARGMAX, topk(2)])
def test_increasing_functions_come_out_of_choices(monoid: object) -> None:
    stages = (total(x**2, "d"), Stage("o", monoid, x * sympy.sqrt(d) + 2 * d))
    derivation = derive(Cascade(stages, (x,)))
    assert derivation.slot("o").contribution == x
    data = {"x": np.random.default_rng(1).normal(size=(3, 17))}
    wanted = two_pass(derivation.cascade, data)["o"]
    np.testing.assert_allclose(stream(derivation, data, 5)["o"], wanted, rtol=1e-12)


def test_equal_elements_keep_the_first_place() -> None:
    index = sympy.Symbol("o_index", integer=True, nonnegative=True)
    for monoid, due in ((ARGMAX, [[1]]), (topk(3), [[1, 3, 0]])):
        one = Cascade((Stage("o", monoid, x),), (x,), results={"where": index})
        data = {"x": np.array([[2.0, 5.0, 1.0, 5.0, 2.0]])}
        for found in (
            stream(derive(one), data, 2)["where"],
            merge_tree(derive(one), data, [1, 0, 3, 1])["where"],
        ):
            assert found.reshape(1, -1).tolist() == due


def test_what_is_masked_is_not_read() -> None:
    derivation = named("masked variance")
    assert [each.name for each in derivation.slots] == ["q", "S_mean", "S_mean_rest", "M"]
    data = {"x": np.array([[1.0, 2.0, 6.0, np.nan, np.inf]]), "i": np.array([2])}
    for found in (stream(derivation, data, 2), merge_tree(derivation, data, [1, 0, 3, 1])):
        np.testing.assert_allclose(found["out"], np.var([1.0, 2.0, 6.0]))


def test_masks_outside_of_exponentials_need_no_stand_in_of_the_past() -> None:
    slot = named("mask outside of exp").slot("s")
    assert slot.carry == value("s") * exp(value("m") - guarded("m"))


def test_powers_of_two_are_exponentials() -> None:
    derivation = derive(Cascade((Stage("m", MAX, x), total(2 ** (x - m))), (x,)))
    assert step(derivation, "o").rescaling == ("m",)
    data = {"x": np.array([[3000.0, 3001.0, -np.inf]])}
    np.testing.assert_allclose(stream(derivation, data, 1)["o"], 1.5)


def test_least_elements_stand_in_too() -> None:
    derivation = derive(Cascade((Stage("m", MIN, x), total(exp(m - x))), (x,)))
    data = {"x": np.array([[np.inf, 2000.0, 2000.0 + np.log(2)], [np.inf] * 3])}
    for found in (stream(derivation, data, 1), merge_tree(derivation, data, [1, 2])):
        np.testing.assert_allclose(found["o"], [1.5, 0])


@pytest.mark.parametrize("monoid", [MAX, MIN])
@pytest.mark.parametrize("sign", [1, -1])
def test_exponentials_that_grow_beside_an_extreme(monoid: object, sign: int) -> None:
    """Carries are right on both sides of the largest and of the least element."""
    derivation = derive(Cascade((Stage("m", monoid, x), total(exp(sign * (x - m)))), (x,)))
    falls = (monoid == MAX) == (sign == 1)
    assert bool(step(derivation, "o").notes) != falls
    data = {"x": np.random.default_rng(6).normal(size=(3, 11))}
    wanted = two_pass(derivation.cascade, data)["o"]
    for found in (stream(derivation, data, 1), merge_tree(derivation, data, [4, 0, 7])):
        np.testing.assert_allclose(found["o"], wanted, rtol=1e-12)


@pytest.mark.parametrize("term", [exp(x - m), v / m, (v + m) * exp(-m)])
def test_the_least_magnitude_of_nothing_is_infinite(term: sympy.Expr) -> None:
    derivation = derive(Cascade((Stage("m", MIN, x**2), total(term)), (x, v)))
    rng = np.random.default_rng(8)
    data = {"x": rng.normal(size=(3, 11)), "v": rng.normal(size=(3, 11))}
    data["x"][2] = 0
    if term == v / m:
        data["v"][2] = np.abs(data["v"][2])  # infinities of both signs are no number
    wanted = two_pass(derivation.cascade, data)["o"]
    for found in (stream(derivation, data, 1), merge_tree(derivation, data, [4, 0, 7])):
        np.testing.assert_allclose(found["o"], wanted, rtol=1e-10)


@pytest.mark.parametrize("exponent", [x + m, fenced_sum(x - m, -d)])
def test_extremes_and_sums_in_exponents(exponent: sympy.Expr) -> None:
    stages = (Stage("m", MAX, x), total(v, "d"), total(exp(exponent)))
    derivation = derive(Cascade(stages, (x, v)))
    rng = np.random.default_rng(9)
    data = {"x": rng.normal(size=(3, 11)), "v": rng.normal(size=(3, 11))}
    wanted = two_pass(derivation.cascade, data)["o"]
    for found in (stream(derivation, data, 1), merge_tree(derivation, data, [4, 0, 7])):
        np.testing.assert_allclose(found["o"], wanted, rtol=1e-10)


def test_sums_of_a_part_of_the_axis_bound_no_exponent() -> None:
    """A large element among small ones is far above their mean, not above that of all."""
    stages = (Stage("m", MAX, x), total(v, "d"))
    for exponent in (x - d, x - m * d):
        with pytest.raises(CascadeRefused, match="which elements of a part of the axis") as caught:
            derive(Cascade((*stages, total(exp(exponent))), (x, v)))
        assert caught.value.refusal.rule == "cascade-range"
    found = derive(Cascade((*stages, total(exp(fenced_sum(x - m, -d)))), (x, v)))
    data = {"x": np.zeros((1, 32), np.float32), "v": np.zeros((1, 32), np.float32)}
    data["v"][0, :2] = -200, 200
    assert merge_tree(found, data, [1, 31], tile=1)["o"] == 32


def test_a_mean_of_one_stage_is_no_mean_of_another() -> None:
    """Of the stages that use a sum, some by squares of distances and some by magnitudes."""
    stages = mean_stages()
    rest = {"invariants": (symbols.N,), "length": symbols.N}
    mean = symbols.MEAN
    with pytest.raises(CascadeRefused, match=r"found \|S_mean - x\|, which couples x with S_mean"):
        derive(Cascade((*stages, total(sympy.Abs(x - mean))), (x,), **rest))
    with pytest.raises(CascadeRefused, match=r"exponentials less S_mean"):
        derive(Cascade((*stages, total(exp(x - mean))), (x,), **rest))


def test_distances_from_an_extreme_move_with_it() -> None:
    """Of masked elements too, and of a row that begins with them."""
    lo = sympy.Symbol("lo", real=True)
    seen = sympy.Piecewise((x, x < 900), (sympy.oo, True))
    far = sympy.Piecewise(((x - lo) ** 2 * w, x < 900), (0, True))
    derivation = derive(Cascade((Stage("lo", MIN, seen), total(far)), (x, w)))
    assert step(derivation, "o").pair == "sum, shift of an extreme"
    random = np.random.default_rng(6)
    data = {"x": 500 + random.normal(size=(2, 13)), "w": random.normal(size=(2, 13))}
    data["x"][:, :5] = 1000
    apart = np.where(data["x"] < 900, data["x"] - data["x"].min(axis=1, keepdims=True), 0)
    wanted = (apart**2 * data["w"]).sum(axis=1)
    np.testing.assert_allclose(stream(derivation, data, 4)["o"], wanted, rtol=1e-12)
    np.testing.assert_allclose(merge_tree(derivation, data, [4, 9])["o"], wanted, rtol=1e-12)


def test_logarithms_of_probabilities_are_distances() -> None:
    """Masked by a number that is no infinity; `exp(-m)` of such logits is 0."""
    shown = sympy.Piecewise((x, x > -1e4), (-(10**30), True))
    m, s = sympy.symbols("m s", real=True)
    p = exp(x - m) / s
    plain = sympy.Piecewise((p * sympy.log(p), x > -1e4), (0, True))
    stages = (Stage("m", MAX, shown), total(exp(shown - m), "s"), total(plain))
    derivation = derive(Cascade(stages, (x,)))
    data = {"x": 2000 + np.random.default_rng(7).normal(size=(2, 13))}
    data["x"][:, :5] = -1e5
    power = np.exp(data["x"][:, 5:] - data["x"].max(axis=1, keepdims=True))
    power /= power.sum(axis=1, keepdims=True)
    wanted = (power * np.log(power)).sum(axis=1)
    np.testing.assert_allclose(stream(derivation, data, 4)["o"], wanted, rtol=1e-10)
    np.testing.assert_allclose(merge_tree(derivation, data, [4, 9])["o"], wanted, rtol=1e-10)


def test_slots_are_shared() -> None:
    m, s, o = named("entropy").slots
    assert (m.name, s.name) == ("m", "s")
    assert o.contribution == exp(x - guarded("m")) * (x - guarded("m"))
    slots = ["n", "S_mean", "S_mean_rest", "M", "o_lower", "o"]
    assert [each.name for each in named("kurtosis").slots] == slots


def test_names_of_slots_are_free() -> None:
    n = sympy.Symbol("n", real=True)
    one = cascade((total(x, "S"), total((x - symbols.S / symbols.N) ** 2 + n, "M")))
    one = Cascade(one.stages, (x,), (n, symbols.N), length=symbols.N)
    assert derive(one).slots[0].name == "n1"


def test_a_derivation_is_made_once() -> None:
    one = patterns.named("attention").cascade
    assert derive(one) is derive(one)


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        (
            (total(x, "d"), Stage("o", MAX, v * d)),
            ("cascade-sign", "stage o", "a max of elements times d", "reduce the elements"),
        ),
        (
            (total(x**2, "d"), Stage("o", MAX, x * d + v * sympy.sqrt(d))),
            ("cascade-separable", "stage o", "couples v, x with d", "rank 2 on a 24 x 24 sample"),
        ),
        (
            (total(x, "d"), total(exp(x * d))),
            ("cascade-separable", "stage o", "found d·x", "couples x with d", "second pass"),
        ),
        (
            (Stage("d", topk(2), x), total(x * d)),
            ("cascade-form", "stage o", "the k results of a top-k", "after the cascade"),
        ),
        (
            (total(x, "d"), Stage("o", PROD, x + d)),
            ("cascade-separable", "stage o", "couples x with d", "rank 2"),
        ),
        (
            (total(x, "d"), Stage("o", LOGADDEXP, x * d**2)),
            ("cascade-separable", "stage o", "with d"),
        ),
        (
            (Stage("m", ARGMAX, x), total(sympy.Piecewise((x, sympy.Eq(w, m)), (0, True)))),
            ("cascade-separable", "stage o", "m = w", "couples w, x with m"),
        ),
    ],
)
def test_refusals_name_the_obstacle(stages: tuple[Stage, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(CascadeRefused) as caught:
        derive(Cascade(stages, (x, v, w)))
    assert caught.value.refusal.rule == parts[0]
    for part in parts:
        assert part in str(caught.value)


def test_the_monoids_that_reduce_are_those_of_the_definition() -> None:
    assert {each.monoid for each in named("softmax stats").slots} == {MAX, SUM}
