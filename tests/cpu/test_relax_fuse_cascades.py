"""The pass that rewrites cascades in a module: what it takes, what it leaves, what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from crossfuse.cascade.rewrite.tiles import CascadeTiles, StreamTiles
from crossfuse.relax import FuseCascades, Outcome
from relax_models import run

pytestmark = pytest.mark.cpu

HEADS, LENGTH, DEPTH = 2, 7, 8
WIDTH = HEADS * DEPTH
QKV = (2, LENGTH, HEADS, DEPTH)


def model() -> Any:
    """A norm, an attention, a product and a softmax."""
    shapes = {"x": (2, LENGTH, WIDTH), "gamma": (WIDTH,), "weight": (WIDTH, 12)}
    given = [relax.Var(name, relax.TensorType(each, "float32")) for name, each in shapes.items()]
    x, gamma, weight = given
    op, builder = relax.op, relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            normal = builder.emit(op.nn.rms_norm(x, gamma, axes=[-1]))
            heads = builder.emit(op.reshape(normal, QKV))
            seen = builder.emit(op.nn.attention(heads, heads, heads))
            flat = builder.emit(op.reshape(seen, shapes["x"]))
            logits = builder.emit(op.nn.relu(op.matmul(flat, weight)))
            out = builder.emit_output(op.nn.softmax(logits, -1))
        builder.emit_func_output(out)
    return relax.transform.LegalizeOps()(builder.get())


def inputs() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = [(2, LENGTH, WIDTH), (WIDTH,), (WIDTH, 12)]
    return [random.standard_normal(each).astype(np.float32) for each in shapes]


FUSE = {"tiles": CascadeTiles(rows=4, elements=4), "stream": StreamTiles(threads=4, unroll=2)}


@pytest.mark.slow
def test_cascades_of_a_model_are_fused() -> None:
    mod = model()
    fuse = FuseCascades(**FUSE)
    made = tvm.ir.transform.Sequential([fuse])(mod)
    forms = {each.function: each.form for each in fuse.outcomes}
    assert forms == {
        "fused_softmax": "threads",
        "rms_norm": "threads",
        "reshape": "",
        "attention": "tiles",
        "reshape1": "",
        "matmul": "",
    }
    assert [each.calls for each in fuse.outcomes if each.calls] == [("relu", "softmax")]
    given = inputs()
    np.testing.assert_allclose(run(made, given)[0], run(mod, given)[0], rtol=1e-5, atol=1e-6)
    for name, func in mod.functions_items():
        if forms.get(str(name.name_hint)) == "":
            assert made[name].same_as(func)


def test_reasons_name_reductions_or_what_is_missing() -> None:
    fuse = FuseCascades(**FUSE)
    fuse(model())
    reasons = {each.function: each.reason for each in fuse.outcomes}
    assert reasons["fused_softmax"].endswith("(max), T_softmax_expsum (sum) over 12 elements")
    assert reasons["matmul"] == "it has one reduction, which reads each element once as it is"
    assert "found no reduction" in reasons["reshape"]


def test_what_is_scheduled_stays() -> None:
    once = FuseCascades(**FUSE)(model())
    again = FuseCascades(**FUSE)
    tvm.ir.assert_structural_equal(again(once), once)
    assert Outcome("fused_softmax", "", "it is scheduled already") in again.outcomes


def test_sizes_that_do_not_fit_leave_a_function_alone() -> None:
    fuse = FuseCascades(tiles=CascadeTiles(cluster=17), stream=FUSE["stream"])
    made = fuse(model())
    (attention,) = [each for each in fuse.outcomes if each.function == "attention"]
    assert attention.form == ""
    assert "tiles, cluster: found 17" in attention.reason
    assert "tirx.is_scheduled" not in (made["attention"].attrs or {})


def test_functions_that_tvm_joins_with_no_other_stay_alone() -> None:
    """One of 32-bit extents, as `te` makes it, and one of plain pointers, behind a softmax."""
    x = te.placeholder((16, 64), "float32", name="x")
    more = te.compute((16, 64), lambda i, j: x[i, j] + 1.0, name="more")
    narrow = te.create_prim_func([x, more])
    pointers = tirx.PrimFunc([tirx.Var(f"p{i}", "handle") for i in (0, 1)], tirx.Evaluate(0))

    def outcomes(func: Any) -> tuple[Any, list[Outcome]]:
        builder = relax.BlockBuilder()
        name = builder.add_func(func.with_attr("global_symbol", "own"), "own")
        value = relax.Var("x", relax.TensorType((16, 64), "float32"))
        with builder.function("main", [value]):
            with builder.dataflow():
                made = builder.emit(relax.call_tir(name, [value], out_ty=value.ty))
                made = builder.emit_output(builder.emit(relax.op.nn.softmax(made)))
            builder.emit_func_output(made)
        fuse = FuseCascades()
        return fuse(relax.transform.LegalizeOps()(builder.get())), fuse.outcomes

    for func in (narrow, pointers):
        mod, found = outcomes(func)
        (softmax,) = (each for each in found if each.function == "softmax")
        assert softmax.form == "threads" and not softmax.calls
        if func is narrow:
            (text,) = softmax.apart
            assert text.startswith("own: TVM does not join them: ") and "Inconsistent" in text
            data = np.random.default_rng(0).standard_normal((16, 64)).astype("float32")
            due = np.exp(data.astype("float64") + 1)
            np.testing.assert_allclose(run(mod, [data])[0], due / due.sum(-1, keepdims=True), 1e-5)
