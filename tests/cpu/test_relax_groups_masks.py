"""Shared masks, equal layers and rows before a product: which calls become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm.relax import op

from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.relax import FuseCascades
from crossfuse.relax.cascades import kernels
from relax_models import Parameters, legalised, normals, number, rms_norm, run

pytestmark = pytest.mark.cpu

F32, F16 = "float32", "float16"


def test_softmaxes_take_in_a_mask_of_flags_that_they_share() -> None:
    """Flags were loaded as vectors, of which CUDA has none: the mask stayed a kernel."""
    row = ((5, 32), F32)
    shapes: Parameters = {"x": row, "y": row, "seen": ((5, 32), "bool")}

    def build(emit: Any, x: Any, y: Any, seen: Any) -> Any:
        mask = emit(op.where(seen, number(0.0), number(-np.inf)))
        first, second = (emit(op.add(each, mask)) for each in (x, y))
        return emit(op.nn.softmax(first, -1)), emit(op.nn.softmax(second, -1))

    fuse = FuseCascades()
    made = fuse(legalised(shapes, build))
    (group,) = (each for each in fuse.outcomes if each.calls)
    assert group.calls == ("where", "add", "add", "softmax", "softmax")
    assert not group.apart
    x, y, _ = normals(shapes)
    seen = np.tril(np.ones((5, 32), "bool"), 20)
    for given, found in zip((x, y), run(made, [x, y, seen]), strict=True):
        power = np.exp(given.astype(np.float64)) * seen
        np.testing.assert_allclose(found, power / power.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.slow
def test_attention_of_flat_batches_and_a_mask_of_each_sequence_is_one_kernel() -> None:
    """The products' one batch is two loops of the mask: their sums were not known as sums."""
    flat, mask = ((6, 64, 64), F16), ((3, 1, 1, 64), F16)
    shapes: Parameters = {"q": flat, "k": flat, "v": flat, "mask": mask}

    def build(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 2, 1])), out_dtype=F32))
        masked = emit(op.add(emit(op.reshape(scores, (3, 2, 64, 64))), emit(op.astype(mask, F32))))
        power = emit(op.astype(emit(op.nn.softmax(masked, -1)), F16))
        seen = emit(op.matmul(emit(op.reshape(power, (6, 64, 64))), v, out_dtype=F32))
        return emit(op.astype(seen, F16))

    fuse = FuseCascades()
    made = fuse(legalised(shapes, build))
    (group,) = (each for each in fuse.outcomes if each.calls)
    assert (group.form, group.calls.count("matmul")) == ("tiles", 2)
    q, k, v, mask = (each / 4 for each in normals(shapes))
    wide = (each.astype(np.float64) for each in (q, k, v, np.repeat(mask[:, 0], 2, 0)))
    q64, k64, v64, mask64 = wide
    power = np.exp(q64 @ k64.transpose(0, 2, 1) + mask64)
    (found,) = run(made, [q, k, v, mask])
    np.testing.assert_allclose(found, power / power.sum(-1, keepdims=True) @ v64, atol=2e-3)


@pytest.mark.slow
def test_equal_layers_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last differ from those between, and these are one another's answers."""
    found: list[Any] = []
    find = kernels._find
    monkeypatch.setattr(kernels, "_find", lambda func: found.append(func) or find(func))

    def looked_at(layers: int) -> int:
        def build(emit: Any, x: Any, gamma: Any, weight: Any) -> Any:
            for _ in range(layers):
                x = emit(op.add(x, emit(op.matmul(rms_norm(emit, x, gamma), weight))))
            return x

        shapes: Parameters = {"x": ((8, 64), F32), "gamma": ((64,), F32), "weight": ((64, 64), F32)}
        found.clear()
        fuse = FuseCascades(stream=StreamTiles(threads=4, unroll=2))
        fuse(legalised(shapes, build))
        assert sum(bool(each.calls and each.form) for each in fuse.outcomes) == layers
        return len(found)

    assert looked_at(3) == looked_at(5)


@pytest.mark.slow
def test_rows_are_made_in_the_kernel_of_their_product() -> None:
    """Before, a norm before one product was refused; the planner's estimates say why it is one."""
    shapes: Parameters = {"x": ((128, 256), F16), "gamma": ((256,), F32), "w": ((256, 384), F16)}

    def build(emit: Any, x: Any, gamma: Any, w: Any) -> Any:
        normal = rms_norm(emit, emit(op.astype(x, F32)), gamma)
        made = emit(op.matmul(emit(op.astype(normal, F16)), w, out_dtype=F32))
        return emit(op.astype(made, F16))

    fuse = FuseCascades()
    made = fuse(legalised(shapes, build))
    (group,) = (each for each in fuse.outcomes if each.calls)
    assert (group.form, group.calls[-2:]) == ("rows", ("matmul", "cast2"))
    assert "us with its product" in group.reason and "us in separate kernels" in group.reason
    x, gamma, w = normals(shapes)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * gamma @ w
    (found,) = run(made, [x, gamma, w])
    np.testing.assert_allclose(found, exact, rtol=2e-2, atol=5e-2)
