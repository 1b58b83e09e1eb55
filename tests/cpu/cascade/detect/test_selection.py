"""Reductions that keep where an element stood: argmax, argmin, top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx, topi

from cpu.cascade.detect.evaluate import assert_same
from cpu.cascade.detect.writing import drawn, each, fold, function, most, tensor
from crossfuse.cascade.detect import detect
from crossfuse.errors import CascadeRefused
from crossfuse.workload.cascade_build import top_of

pytestmark = pytest.mark.cpu


def chooser(keeps: Callable[[Any, Any], Any], worst: Any) -> Any:
    """A reduction of places and values that keeps what `keeps` says."""

    def combine(a, b):
        stays = keeps(a, b)
        return tirx.Select(stays, a[0], b[0]), tirx.Select(stays, a[1], b[1])

    return te.comm_reducer(combine, lambda p, v: (tirx.const(-1, p), worst(v)), name="chosen")


LARGEST = chooser(lambda a, b: a[1] >= b[1], tirx.min_value)


def chosen(by: Any, x: te.Tensor, rows: int, columns: int) -> tuple[te.Tensor, te.Tensor]:
    axis = te.reduce_axis((0, columns), "r")
    return te.compute((rows,), lambda i: by((axis, x(i, axis)), axis=axis), "best")


def test_argmax_as_te_writes_it() -> None:
    x = tensor("x", 4, 9)
    place, value = chosen(LARGEST, x, 4, 9)
    (site,) = detect(function(x, place, value))
    (stage,) = site.cascade.stages
    assert stage.monoid.name == "argmax"
    assert str(stage.term) == "x"
    assert {name: str(each) for name, each in site.cascade.results.items()} == {
        "best.v0": "best_v1_index",
        "best.v1": "best_v1",
    }
    assert str(site.stages[stage.name].buffer.name) == "best.v1"
    inputs = drawn(x)
    inputs["x"][2, [3, 7]] = 5
    assert_same(site, inputs)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_selections_of_topi(name: str, last: bool) -> None:
    x = tensor("x", 4, 9)
    func = function(x, getattr(topi, name)(x, axis=1, select_last_index=last))
    if last:
        with pytest.raises(CascadeRefused, match=r"argmax or argmin: .*of equals the first"):
            detect(func)
        return
    (site,) = detect(func)
    assert [each.monoid.name for each in site.cascade.stages] == [name]
    inputs = drawn(x)
    inputs["x"][1] = 1
    assert_same(site, inputs)


def test_a_selection_in_a_cascade() -> None:
    """A sampled token with its probability: noise is added to what is compared."""
    x, noise = tensor("x", 4, 9), tensor("noise", 4, 9)
    noisy = each("noisy", (4, 9), lambda i, j: x(i, j) + noise(i, j))
    place, _ = chosen(LARGEST, noisy, 4, 9)
    m = most("m", (4,), 9, lambda i, j: x(i, j))
    s = fold("s", (4,), 9, lambda i, j: tirx.exp(x(i, j) - m(i)))
    confidence = each("confidence", (4,), lambda i: 1.0 / s(i))
    copied = each("copied", (4,), lambda i: place(i))
    (site,) = detect(function(x, noise, copied, confidence))
    kinds = {each.monoid.name: str(each.term) for each in site.cascade.stages}
    assert kinds == {"argmax": "noise + x", "max": "x", "sum": "exp(-m + x)"}
    assert_same(site, drawn(x, noise))


def test_places_over_two_axes() -> None:
    x = tensor("x", 3, 4, 5)
    place = topi.argmax(x, axis=[1, 2])
    (site,) = detect(function(x, place))
    assert site.extents[site.axis] == 20
    assert_same(site, drawn(x))


def test_places_that_are_no_positions() -> None:
    x, names = tensor("x", 4, 9), tensor("names", 9, dtype="int32")
    axis = te.reduce_axis((0, 9), "r")
    place, _ = te.compute((4,), lambda i: LARGEST((names(axis), x(i, axis)), axis=axis), "best")
    with pytest.raises(CascadeRefused) as caught:
        detect(function(x, names, place))
    assert "block 'best', buffer 'best.v0': found places names[" in str(caught.value)
    assert "Instead: keep positions, and look up what they stand for" in str(caught.value)


def test_other_choices_are_refused() -> None:
    x = tensor("x", 4, 9)
    by_square = chooser(lambda a, b: a[1] * a[1] >= b[1] * b[1], tirx.min_value)
    with pytest.raises(CascadeRefused, match="found stores that choose or combine in another"):
        detect(function(x, *chosen(by_square, x, 4, 9)))


def test_sums_of_pairs_are_two_reductions() -> None:
    """As topi's norms add elements and their squares."""
    both = te.comm_reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        lambda p, v: (tirx.const(0, p), tirx.const(0, v)),
        name="both",
    )
    x = tensor("x", 4, 9)
    axis = te.reduce_axis((0, 9), "r")
    total, squares = te.compute(
        (4,), lambda i: both((x(i, axis), x(i, axis) * x(i, axis)), axis=axis), "sums"
    )
    (site,) = detect(function(x, total, squares))
    assert [(each.name, str(each.term)) for each in site.cascade.stages] == [
        ("sums_v0", "x"),
        ("sums_v1", "x**2"),
    ]
    assert_same(site, drawn(x))


def test_top_k() -> None:
    x = tensor("x", 4, 9)
    top, at = top_of(x, 3)
    (site,) = detect(function(x, top, at))
    (stage,) = site.cascade.stages
    assert (stage.monoid.name, stage.monoid.k, str(stage.term)) == ("topk", 3, "x")
    assert {name: str(each) for name, each in site.cascade.results.items()} == {
        "top": "top",
        "top_at": "top_index",
    }
    assert site.outputs[0].columns == site.outputs[1].columns
    inputs = drawn(x)
    inputs["x"][2] = 1
    inputs["x"][1, [0, 4, 5, 8]] = 7
    assert_same(site, inputs)


@pytest.mark.parametrize("kept", ["values", "places"])
def test_one_of_the_results_of_top_k(kept: str) -> None:
    x, bias = tensor("x", 4, 9, dtype="float16"), tensor("bias", 9)
    biased = each("biased", (4, 9), lambda i, j: x(i, j).astype("float32") + bias(j))
    top, at = top_of(biased, 2)
    (site,) = detect(function(x, bias, top if kept == "values" else at))
    (stage,) = site.cascade.stages
    assert (stage.monoid.name, str(stage.term)) == ("topk", "bias + x")
    assert site.stages[stage.name].dtype == "float32"
    assert_same(site, drawn(x, bias))


def test_two_numbers_of_places() -> None:
    """Three values, and the places of the best five."""
    x = tensor("x", 4, 9)
    (top, _), (_, at) = top_of(x, 3), top_of(x, 5, ("more", "more_at"))
    (site,) = detect(function(x, top, at))
    assert sorted(each.monoid.k for each in site.cascade.stages) == [3, 5]


@pytest.mark.parametrize("kept", ["both", "values", "indices"])
def test_top_k_of_topi(kept: str) -> None:
    x = tensor("x", 4, 9)
    made = topi.topk(x, 3, axis=1, ret_type=kept, dtype="int32")
    (site,) = detect(function(x, *(made if kept == "both" else [made])))
    (stage,) = site.cascade.stages
    assert (stage.monoid.k, str(stage.term)) == (3, "data_buf")
    inputs = {"data_buf": drawn(x)["x"]}
    inputs["data_buf"][1, [0, 4, 5, 8]] = 7
    assert_same(site, inputs)


def test_top_k_of_a_router_with_topi() -> None:
    x, bias = tensor("x", 4, 9), tensor("bias", 9)
    biased = each("biased", (4, 9), lambda i, j: x(i, j) + bias(j))
    top, at = topi.topk(biased, 3, axis=-1, dtype="int32")
    m = most("m", (4,), 9, lambda i, j: biased(i, j))
    s = fold("s", (4,), 9, lambda i, j: tirx.exp(biased(i, j) - m(i)))
    gates = each("gates", (4, 3), lambda i, t: tirx.exp(top(i, t) - m(i)) / s(i))
    (site,) = detect(function(x, bias, gates, at))
    assert sorted(each.monoid.name for each in site.cascade.stages) == ["max", "sum", "topk"]
    assert_same(site, drawn(x, bias))


@pytest.mark.parametrize(
    ("options", "found"),
    [({"is_ascend": True}, "k 3, axis 1, ascending"), ({"axis": 0}, "k 3, axis 0")],
    ids=["smallest", "columns"],
)
def test_other_sorts_are_refused(options: dict[str, Any], found: str) -> None:
    x = tensor("x", 4, 9)
    func = function(x, topi.topk(x, **{"k": 3, "axis": 1, "ret_type": "values"} | options))
    with pytest.raises(CascadeRefused) as caught:
        detect(func)
    assert f"block 'topk_cpu': found {found}; limit: calls of tvm.contrib.sort.topk" in str(
        caught.value
    )


def test_other_calls_are_refused() -> None:
    x = tensor("x", 4, 9)
    with pytest.raises(CascadeRefused, match=r"found a call .*limit: blocks that store reductions"):
        detect(function(x, topi.sort(x, axis=1)))


@pytest.mark.parametrize("wrong", ["last of equals", "smallest", "other rows"])
def test_ranks_of_another_kind_are_no_top_k(wrong: str) -> None:
    x = tensor("x", 9, 9)
    other, of = te.reduce_axis((0, 9), "other"), te.reduce_axis((0, 9), "of")

    def stands(i: Any, j: Any) -> Any:
        if wrong == "other rows":
            return tirx.any(x(j, other) > x(i, j), tirx.all(x(j, other) == x(i, j), other < j))
        ahead = x(i, other) < x(i, j) if wrong == "smallest" else x(i, other) > x(i, j)
        return tirx.any(ahead, tirx.all(x(i, other) == x(i, j), other > j))

    rank = te.compute(
        (9, 9), lambda i, j: te.sum(tirx.Select(stands(i, j), 1, 0), axis=other), "rank"
    )
    at = te.compute(
        (9, 3), lambda i, t: te.sum(tirx.Select(rank(i, of) == t, of, 0), axis=of), "at"
    )
    (site,) = detect(function(x, at))
    assert [each.monoid.name for each in site.cascade.stages] == ["sum"]
    assert list(site.producers.values()) == ["rank"]


def test_ranks_that_are_used_otherwise_are_no_top_k() -> None:
    x = tensor("x", 4, 9)
    _, at = top_of(x, 3)
    ranks = at.op.input_tensors[0]
    doubled = each("doubled", (4, 9), lambda i, j: ranks(i, j) * 2)
    sites = detect(function(x, at, doubled))
    assert all(stage.monoid.name == "sum" for site in sites for stage in site.cascade.stages)
    assert np.prod([len(site.outputs) for site in sites]) >= 1
