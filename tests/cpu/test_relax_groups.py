"""Cascades over several calls of a model: which calls become one, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.relax import FuseCascades, Outcome
from relax_models import (
    Parameters,
    heads,
    layer_norm,
    legalised,
    normals,
    number,
    rms_norm,
    run,
    scores,
    softmax,
    together,
)

pytestmark = pytest.mark.cpu

SIZES: dict[str, Any] = {
    "tiles": CascadeTiles(rows=4, elements=4),
    "stream": StreamTiles(threads=4, unroll=2),
}
F32 = "float32"
BATCH, LENGTH, HEADS, WIDTH = 2, 7, 2, 8
TOKENS = ((BATCH, LENGTH, WIDTH), F32)
QKV: Parameters = {"q": TOKENS, "k": TOKENS, "v": TOKENS}


def fused(mod: Any) -> tuple[Any, dict[str, Outcome]]:
    """A module after the pass, and what became of calls that were taken together."""
    fuse = FuseCascades(**SIZES)
    made = fuse(mod)
    assert relax.analysis.check_well_formed(made)
    return made, {each.function: each for each in fuse.outcomes if each.calls}


def called(mod: Any) -> list[str]:
    """Functions that main calls, in order."""
    bindings = [each for block in mod["main"].body.blocks for each in block.bindings]
    calls = [each.value for each in bindings if isinstance(each.value, tvm.ir.Call)]
    return [str(each.args[0].name_hint) for each in calls if each.op.name == "relax.call_tir"]


def attend(emit: Any, q: Any, k: Any, v: Any, mask: Callable[[Any], Any]) -> Any:
    q, k, v = (heads(emit, each, HEADS) for each in (q, k, v))
    power = softmax(emit, emit(mask(scores(emit, q, k, 0.5))))
    return together(emit, emit(op.matmul(power, v)))


def bert(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """A mask of padding that is added, [batch, 1, 1, key]; softmax is one operator."""
    q, k, v = (heads(emit, each, HEADS) for each in (q, k, v))
    seen = emit(op.nn.softmax(emit(op.add(scores(emit, q, k, 0.5), mask)), -1))
    return together(emit, emit(op.matmul(seen, v)))


def gpt(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return attend(emit, q, k, v, lambda x: op.add(x, mask))


def chosen(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return attend(emit, q, k, v, lambda x: op.where(mask, x, number(-np.inf)))


def lengths(emit: Any, q: Any, k: Any, v: Any, place: Any, length: Any) -> Any:
    inside = emit(op.less(place, emit(op.reshape(length, (BATCH, 1, 1, 1)))))
    return attend(emit, q, k, v, lambda x: op.where(inside, x, number(-np.inf)))


@dataclass(frozen=True)
class Attention:
    """An attention, with the bias that numpy adds to scores; `mask` makes further inputs."""

    build: Callable[..., Any]
    shapes: Parameters
    masks: tuple[np.ndarray, ...]
    bias: np.ndarray


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
PADDED = np.arange(LENGTH) < np.array([3, LENGTH])[:, None, None, None]


def bias_of(seen: np.ndarray) -> np.ndarray:
    return np.where(seen, 0.0, -np.inf)


ATTENTIONS = {
    "bert": Attention(
        bert,
        {"mask": (PADDED.shape, F32)},
        (np.where(PADDED, 0, -1e9).astype(F32),),
        bias_of(PADDED),
    ),
    "gpt": Attention(
        gpt, {"mask": (CAUSAL.shape, F32)}, (bias_of(CAUSAL).astype(F32),), bias_of(CAUSAL)
    ),
    "a table": Attention(chosen, {"mask": (CAUSAL.shape, "bool")}, (CAUSAL,), bias_of(CAUSAL)),
    "lengths": Attention(
        lengths,
        {"place": ((LENGTH,), "int32"), "length": ((BATCH,), "int32")},
        (np.arange(LENGTH, dtype="int32"), np.array([3, LENGTH], "int32")),
        bias_of(PADDED),
    ),
}


def exact_attention(q: Any, k: Any, v: Any, bias: np.ndarray) -> np.ndarray:
    """In float64."""

    def split(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64).reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3)

    x = split(q) @ split(k).swapaxes(-1, -2) * 0.5 + bias
    power = np.exp(x - x.max(-1, keepdims=True))
    out = power / power.sum(-1, keepdims=True) @ split(v)
    return out.transpose(0, 2, 1, 3).reshape(q.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_with_masks_is_one_kernel(name: str) -> None:
    case = ATTENTIONS[name]
    made, groups = fused(legalised({**QKV, **case.shapes}, case.build))
    (group,) = groups.values()
    assert group.form == "tiles"
    assert group.apart == ()
    # What only gives tensors another shape needs no kernel, and stays.
    left = {each.rstrip("0123456789") for each in called(made) if each != group.function}
    assert left == {"reshape"}
    given = [*normals(QKV), *case.masks]
    (out,) = run(made, given)
    np.testing.assert_allclose(out, exact_attention(*given[:3], case.bias), rtol=2e-5, atol=2e-6)


def test_the_gain_is_what_need_not_be_written_and_read_again() -> None:
    case = ATTENTIONS["gpt"]
    _, groups = fused(legalised({**QKV, **case.shapes}, case.build))
    (group,) = groups.values()
    tokens, mask = 4 * BATCH * LENGTH * WIDTH, 4 * LENGTH * LENGTH
    assert group.after == 4 * tokens + mask
    table, row = 4 * BATCH * HEADS * LENGTH * LENGTH, 4 * BATCH * HEADS * LENGTH
    turned = 2 * 5 * tokens  # q, k twice, v and the result are permuted
    products = (2 * tokens + table) + (2 * tokens + table)
    element_wise = 2 * table + (2 * table + mask) + (2 * table + row) + 2 * table + 2 * table + row
    assert group.before == turned + products + element_wise + 2 * (table + row)


@pytest.mark.slow
def test_a_residual_behind_attention_is_added_where_heads_are_joined() -> None:
    def build(emit: Any, q: Any, k: Any, v: Any) -> Any:
        return op.add(q, attend(emit, q, k, v, lambda x: op.multiply(x, number(1.0))))

    made, groups = fused(legalised(QKV, build))
    (group,) = groups.values()
    assert called(made)[-1] == group.function
    assert group.calls[-2:] == ("reshape1", "add")
    q, k, v = normals(QKV)
    exact = q + exact_attention(q, k, v, np.zeros((LENGTH, LENGTH)))
    np.testing.assert_allclose(run(made, [q, k, v])[0], exact, rtol=2e-5, atol=2e-6)


def test_a_norm_in_front_of_a_product_is_one_kernel() -> None:
    shapes = {"x": ((2, 5, 16), F32), "gamma": ((16,), F32), "weight": ((16, 12), F32)}

    def build(emit: Any, x: Any, gamma: Any, weight: Any) -> Any:
        return op.matmul(rms_norm(emit, x, gamma), weight)

    made, groups = fused(legalised(shapes, build))
    assert called(made) == list(groups) == ["fused_mean_matmul"]
    x, gamma, weight = (each.astype(np.float64) for each in normals(shapes))
    normal = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma
    np.testing.assert_allclose(run(made, normals(shapes))[0], normal @ weight, rtol=1e-4, atol=1e-5)


def test_products_of_a_shared_norm_read_what_it_writes() -> None:
    shapes = {"x": ((5, 16), F32), "gamma": ((16,), F32)}
    shapes |= {"first": ((16, 12), F32), "second": ((16, 6), F32)}

    def build(emit: Any, x: Any, gamma: Any, first: Any, second: Any) -> Any:
        normal = rms_norm(emit, x, gamma)
        return emit(op.matmul(normal, first)), emit(op.matmul(normal, second))

    mod = legalised(shapes, build)
    made, groups = fused(mod)
    assert called(made) == ["fused_mean", "matmul", "matmul1"]
    (group,) = groups.values()
    assert "found numbers of each element, in 4 tiles of the axis" in group.apart[0]
    for one, other in zip(run(made, normals(shapes)), run(mod, normals(shapes)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_residual_that_is_needed_again_is_written_too() -> None:
    row = ((3, 5, 16), F32)
    shapes = {"x": row, "more": row, "gamma": ((16,), F32), "beta": ((16,), F32)}

    def build(emit: Any, x: Any, more: Any, gamma: Any, beta: Any) -> Any:
        total = emit(op.add(x, more))
        return total, layer_norm(emit, total, gamma, beta)

    made, groups = fused(legalised(shapes, build))
    assert called(made) == ["fused_mean_mean"]
    (group,) = groups.values()
    assert group.form == "threads"
    x, more, gamma, beta = (each.astype(np.float64) for each in normals(shapes))
    total, normal = run(made, normals(shapes))
    away = x + more - (x + more).mean(-1, keepdims=True)
    exact = away / np.sqrt((away * away).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    np.testing.assert_allclose(total, x + more, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(normal, exact, rtol=1e-4, atol=1e-5)


def test_a_loss_of_logits_is_one_kernel() -> None:
    shapes = {"x": ((5, 16), F32), "label": ((5,), "int64")}

    def build(emit: Any, x: Any, label: Any) -> Any:
        return op.nn.nll_loss(emit(op.nn.log_softmax(x, -1)), label, reduction="none")

    made, groups = fused(legalised(shapes, build))
    assert called(made) == list(groups) == ["fused_log_softmax"]
    x, label = normals(shapes)[0], np.array([0, 3, 15, 7, 2])
    exact = np.log(np.exp(x.astype(np.float64)).sum(-1)) - x[np.arange(5), label]
    np.testing.assert_allclose(run(made, [x, label])[0], exact, rtol=1e-5)


def test_what_is_chosen_of_a_product_is_one_kernel() -> None:
    shapes = {"x": ((5, 16), F32), "weight": ((16, 9), F32)}

    def build(emit: Any, x: Any, weight: Any) -> Any:
        return op.argmax(emit(op.matmul(x, weight)), axis=-1)

    made, groups = fused(legalised(shapes, build))
    assert called(made) == list(groups) == ["fused_matmul_argmax"]
    x, weight = normals(shapes)
    np.testing.assert_array_equal(run(made, [x, weight])[0], (x @ weight).argmax(-1))


@pytest.mark.slow
def test_probabilities_that_are_returned_keep_attention_apart() -> None:
    def build(emit: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (heads(emit, each, HEADS) for each in (q, k, v))
        seen = emit(op.nn.softmax(scores(emit, q, k, 0.5), -1))
        return seen, emit(op.matmul(seen, v))

    mod = legalised(QKV, build)
    made, groups = fused(mod)
    assert list(groups) == ["fused_softmax"]
    reasons = dict(each.split(": ", 1) for each in groups["fused_softmax"].apart)
    assert set(reasons) == {"matmul", "matmul1"}
    assert "numbers of each element, in 2 tiles of the axis" in reasons["matmul"]
    for one, other in zip(run(made, normals(QKV)), run(mod, normals(QKV)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_would_be_computed_again_for_each_row_stays_outside() -> None:
    shapes = {"x": ((512, 16), F32), "gamma": ((16,), F32)}

    def build(emit: Any, x: Any, gamma: Any) -> Any:
        return rms_norm(emit, x, emit(op.exp(emit(op.tanh(emit(op.exp(gamma)))))))

    made, groups = fused(legalised(shapes, build))
    assert called(made)[-1] == "fused_mean"
    (text,) = [each for each in groups["fused_mean"].apart if "operations" in each]
    assert "for each row again it would take" in text
    assert called(made)[:-1]


def test_elements_are_not_made_again_for_each_row() -> None:
    def build(emit: Any, q: Any, k: Any, v: Any) -> Any:
        made = emit(op.matmul(v, emit(op.permute_dims(k, [0, 2, 1]))))
        seen = emit(op.nn.softmax(emit(op.matmul(q, emit(op.permute_dims(k, [0, 2, 1])))), -1))
        return op.matmul(seen, made)

    made, groups = fused(legalised(QKV, build))
    (group,) = groups.values()
    assert "matmul" in called(made)
    assert any("would be computed for 7 rows again" in each for each in group.apart), group.apart


def test_symbolic_shapes_stay_as_they_are() -> None:
    rows = tvm.tirx.Var("rows", "int64")
    mod = legalised({"x": ((rows, 16), F32)}, lambda emit, x: softmax(emit, x))
    fuse = FuseCascades(**SIZES)
    made = fuse(mod)
    assert called(made) == called(mod)
    reasons = {each.function: each.reason for each in fuse.outcomes}
    assert "extent" in reasons["max"] or "constant" in reasons["max"], reasons


def test_repeated_layers_share_a_kernel() -> None:
    shapes = {"x": ((5, 16), F32), "gamma": ((16,), F32), "weight": ((16, 16), F32)}

    def build(emit: Any, x: Any, gamma: Any, weight: Any) -> Any:
        for _ in range(3):
            x = emit(op.add(x, emit(op.matmul(rms_norm(emit, x, gamma), weight))))
        return x

    mod = legalised(shapes, build)
    made, _ = fused(mod)
    kernels = [each for each in called(made) if "fused" in each]
    assert len(kernels) == 3
    assert len(set(kernels)) == 1
    np.testing.assert_allclose(
        run(made, normals(shapes))[0], run(mod, normals(shapes))[0], rtol=1e-4, atol=1e-4
    )


def test_functions_that_nothing_calls_any_more_are_gone() -> None:
    mod = legalised({"x": ((5, 16), F32)}, lambda emit, x: softmax(emit, x))
    made, groups = fused(mod)
    assert {str(each.name_hint) for each in made.functions} == {"main", *groups}
    assert not made["main"].attrs or "op_pattern" not in made["main"].attrs
    assert int(made[next(iter(groups))].attrs["op_pattern"]) == 8
