"""Cascades of models as importers write them: torch, and modules in TVMScript."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.relax import FuseCascades
from relax_models import heads, legalised, normals, number, run, scores, together

pytestmark = pytest.mark.cpu

SIZES: dict[str, Any] = {
    "tiles": CascadeTiles(rows=4, elements=4),
    "stream": StreamTiles(threads=4, unroll=2),
}
F16, F32 = "float16", "float32"


# fmt: off
@I.ir_module(s_tir=True)
class Before:
    @T.prim_func(private=True, s_tir=True)
    def largest(x: T.Buffer((4, 9), "float32"), y: T.Buffer((4,), "float32")):
        for i, j in T.grid(4, 9):
            with T.sblock("largest"):
                v_i, v_j = T.axis.remap("SR", [i, j])
                with T.init():
                    y[v_i] = T.float32(-3.4028234663852886e38)
                y[v_i] = T.max(y[v_i], x[v_i, v_j])

    @T.prim_func(private=True, s_tir=True)
    def power(x: T.Buffer((4, 9), "float32"), m: T.Buffer((4,), "float32"), y: T.Buffer((4, 9), "float32")):  # noqa: E501
        for i, j in T.grid(4, 9):
            with T.sblock("power"):
                v_i, v_j = T.axis.remap("SS", [i, j])
                y[v_i, v_j] = T.exp(x[v_i, v_j] - m[v_i])

    @T.prim_func(private=True, s_tir=True)
    def total(x: T.Buffer((4, 9), "float32"), y: T.Buffer((4,), "float32")):
        for i, j in T.grid(4, 9):
            with T.sblock("total"):
                v_i, v_j = T.axis.remap("SR", [i, j])
                with T.init():
                    y[v_i] = T.float32(0)
                y[v_i] = y[v_i] + x[v_i, v_j]

    @T.prim_func(private=True, s_tir=True)
    def double(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in T.serial(4):
            with T.sblock("double"):
                v_i = T.axis.remap("S", [i])
                y[v_i] = x[v_i] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4, 9), "float32"), z: R.Tensor((4,), "float32")):
        cls = Before
        with R.dataflow():
            m = R.call_tir(cls.largest, (x,), out_ty=R.Tensor((4,), "float32"))
            other = R.call_tir(cls.double, (z,), out_ty=R.Tensor((4,), "float32"))
            p = R.call_tir(cls.power, (x, m), out_ty=R.Tensor((4, 9), "float32"))
            s = R.call_tir(cls.total, (p,), out_ty=R.Tensor((4,), "float32"))
            R.output(m, s, other)
        return (m, s, other)
# fmt: on

AFTER = """\
    with R.dataflow():
        other = R.call_tir(double, (z,), out_ty=R.Tensor((4,), dtype="float32"))
        fused_largest_total_results = R.call_tir(fused_largest_total, (x,), \
out_ty=[R.Tensor((4,), dtype="float32"), R.Tensor((4,), dtype="float32")])
        m: R.Tensor((4,), dtype="float32") = fused_largest_total_results[0]
        s: R.Tensor((4,), dtype="float32") = fused_largest_total_results[1]
        R.output(other, m, s)
    return (m, s, other)
"""


def test_calls_are_replaced_by_one_where_the_last_of_them_stood() -> None:
    fuse = FuseCascades(**SIZES)
    made = fuse(Before)
    assert made["main"].script().split(":\n", 1)[1].strip() == AFTER.strip()
    assert [each.calls for each in fuse.outcomes if each.calls] == [("largest", "power", "total")]
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(F32)
    m, s, other = run(made, [x, x[:, 0]])
    np.testing.assert_array_equal(m, x.max(1))
    np.testing.assert_allclose(s, np.exp(x - x.max(1, keepdims=True)).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(other, 2 * x[:, 0])


def attention(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As models keep it: products in float16, the softmax in float32."""
    q, k, v = (heads(emit, each, 2) for each in (q, k, v))
    x = emit(op.where(mask, scores(emit, q, k, 0.125), number(-np.inf, F16)))
    seen = emit(op.nn.softmax(emit(op.astype(x, F32)), -1))
    return together(emit, emit(op.matmul(emit(op.astype(seen, F16)), v)))


@pytest.mark.slow
def test_chosen_sizes_lower_for_the_target() -> None:
    tokens, mask = ((1, 128, 128), F16), ((1, 1, 128, 128), "bool")
    shapes = {"q": tokens, "k": tokens, "v": tokens, "mask": mask}
    fuse = FuseCascades("nvidia-h200")
    made = fuse(legalised(shapes, attention))
    (group,) = [each for each in fuse.outcomes if each.calls]
    assert group.form == "tiles"
    assert group.apart == ()
    assert "tirx.is_scheduled" in made[group.function].attrs
    q, k, v = normals({name: shapes[name] for name in "qkv"})
    seen = np.tril(np.ones((128, 128), bool))[None, None]
    (out,) = run(made, [q, k, v, seen])

    def split(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64).reshape(1, 128, 2, 64).transpose(0, 2, 1, 3)

    x = np.where(seen, split(q) @ split(k).swapaxes(-1, -2) * 0.125, -np.inf)
    power = np.exp(x - x.max(-1, keepdims=True))
    exact = (power / power.sum(-1, keepdims=True) @ split(v)).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(out, exact.reshape(out.shape), rtol=1e-2, atol=4e-3)


@pytest.mark.slow
def test_without_a_kernel_for_the_target_calls_stay_and_say_why() -> None:
    tokens, mask = ((1, 16, 16), F32), ((1, 1, 16, 16), F32)
    shapes = {"q": tokens, "k": tokens, "v": tokens, "mask": mask}

    def wide(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        q, k, v = (heads(emit, each, 2) for each in (q, k, v))
        x = emit(op.add(scores(emit, q, k, 0.125), mask))
        return together(emit, emit(op.matmul(emit(op.nn.softmax(x, -1)), v)))

    fuse = FuseCascades()
    mod = legalised(shapes, wide)
    made = fuse(mod)
    refused = [each for each in fuse.outcomes if each.calls and not each.form]
    assert {"matmul", "softmax", "matmul1"} <= set(refused[0].calls)
    assert "limit" in refused[0].reason
    assert all(each.function == "" for each in refused)
    # The softmax alone has a kernel.
    assert [each.form for each in fuse.outcomes if each.form] == ["threads"]
    for one, other in zip(run(made, normals(shapes)), run(mod, normals(shapes)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_layer_norm_in_front_of_a_product() -> None:
    shapes = {"x": ((2, 5, 12), F32), "gamma": ((12,), F32), "beta": ((12,), F32)}
    shapes |= {"weight": ((12, 6), F32)}

    def build(emit: Any, x: Any, gamma: Any, beta: Any, weight: Any) -> Any:
        return op.matmul(emit(op.nn.layer_norm(x, gamma, beta, axes=[-1])), weight)

    fuse = FuseCascades(**SIZES)
    made = fuse(legalised(shapes, build))
    assert [each.calls for each in fuse.outcomes if each.calls] == [("layer_norm", "matmul")]
    x, gamma, beta, weight = (each.astype(np.float64) for each in normals(shapes))
    away = x - x.mean(-1, keepdims=True)
    normal = away / np.sqrt((away * away).mean(-1, keepdims=True) + 1e-5) * gamma + beta
    np.testing.assert_allclose(run(made, normals(shapes))[0], normal @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_torch_attention_with_a_safe_softmax_is_one_kernel() -> None:
    torch = pytest.importorskip("torch")
    from crossfuse.relax import import_torch

    class Attention(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    generator = torch.Generator().manual_seed(0)
    given = [torch.randn((2, 2, 7, 4), generator=generator) for _ in range(3)]
    seen = torch.ones(7, 7).tril().bool()
    given.append(torch.zeros(7, 7).masked_fill(~seen, -np.inf))
    module = Attention().eval()
    mod = relax.transform.LegalizeOps()(import_torch(module, given).mod)
    fuse = FuseCascades(**SIZES)
    made = fuse(mod)
    (group,) = [each for each in fuse.outcomes if each.calls]
    assert group.form == "tiles"
    assert "(max), T_softmax_expsum (sum)" in group.reason
    for scale in (1, 300):  # scores of hundreds, of which no exponential is finite
        given[0] = scale * given[0]
        out = run(made, [each.numpy() for each in given])[0]
        np.testing.assert_allclose(out, module(*given).numpy(), rtol=1e-4, atol=1e-5)
