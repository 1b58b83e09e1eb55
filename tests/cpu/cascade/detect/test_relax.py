"""Operators of Relax, legalised and fused by TVM: reshapes, 64-bit loops, kept dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from cpu.cascade.detect.evaluate import assert_same
from crossfuse import _tvm as ir
from crossfuse.cascade.detect import detect
from crossfuse.cascade.spec import Site

pytestmark = pytest.mark.cpu


def legalised(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    """The one function of TVM that an operator becomes."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"a{i}", relax.TensorType(s, "float32")) for i, s in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(build(*inputs)))
        builder.emit_func_output(result)
    module = relax.transform.LegalizeOps()(builder.get())
    functions = [each for each in module.functions.values() if isinstance(each, ir.PrimFunc)]
    (func,) = functions
    return func


def found(build: Callable[..., Any], *shapes: tuple[int, ...]) -> Site:
    func = legalised(build, *shapes)
    (site,) = detect(func)
    rng = np.random.default_rng(0)
    buffers = [each for each in func.params if ir.is_buffer_var(each)][: len(shapes)]
    assert_same(
        site,
        {
            str(buffer.name): rng.standard_normal(shape).astype("float32")
            for buffer, shape in zip(buffers, shapes, strict=True)
        },
    )
    return site


def kinds(site: Site) -> list[str]:
    return [each.monoid.name for each in site.cascade.stages]


def test_attention() -> None:
    site = found(op.nn.attention, (2, 8, 2, 4), (2, 6, 2, 4), (2, 6, 2, 3))
    assert kinds(site) == ["max", "sum", "sum"]
    assert [site.extents[each] for each in site.rows] == [4, 8]
    assert len(site.producers) == 1
    (output,) = site.outputs
    assert [str(each) for each in output.indices[::2]] == ["i0 // T.int64(2)", "i0 % T.int64(2)"]


def test_attention_with_a_bias() -> None:
    def biased(q, k, v, bias):
        return op.nn.attention(q, k, v, bias)

    site = found(biased, (2, 8, 2, 4), (2, 6, 2, 4), (2, 6, 2, 3), (2, 2, 8, 6))
    assert kinds(site) == ["max", "sum", "sum"]


def test_causal_attention() -> None:
    def causal(q, k, v):
        return op.nn.attention(q, k, v, causal_mask="TopLeft")

    site = found(causal, (2, 8, 2, 4), (2, 8, 2, 4), (2, 8, 2, 3))
    assert kinds(site) == ["max", "sum", "sum"]
    assert site.cascade.index is not None


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmaxes(name: str) -> None:
    site = found(getattr(op.nn, name), (3, 4, 9))
    assert kinds(site) == ["max", "sum"]
    assert len(site.cascade.rows) == 1


def test_norms() -> None:
    def layer(x, gamma, beta):
        return op.nn.layer_norm(x, gamma, beta, axes=[-2, -1])

    assert kinds(found(layer, (3, 4, 5), (4, 5), (4, 5))) == ["sum", "sum"]

    def rms(x, gamma):
        return op.nn.rms_norm(x, gamma, axes=[-1])

    assert kinds(found(rms, (3, 8), (8,))) == ["sum"]

    def group(x, gamma, beta):
        return op.nn.group_norm(x, gamma, beta, 2, 1, [2, 3])

    site = found(group, (4, 8, 3, 5), (8,), (8,))
    assert kinds(site) == ["sum", "sum"]
    assert [site.extents[each] for each in (*site.rows, site.axis)] == [4, 2, 60]


def test_moments() -> None:
    def spread(x):
        return op.std(x, axis=-1, keepdims=True)

    site = found(spread, (4, 9))
    assert kinds(site) == ["sum", "sum"]
    assert [str(each) for each in site.outputs[0].indices] == ["i0", "T.int64(0)"]


def test_selection() -> None:
    site = found(lambda x: op.argmax(x, axis=1), (4, 9))
    assert kinds(site) == ["argmax"]
    assert isinstance(site.function, tvm.tirx.PrimFunc)
