"""Streams that keep their best elements and where they stood: argmax, argmin, top-k; minima."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, tirx, topi

from cpu.cascade.detect.test_selection import LARGEST, chosen
from cpu.cascade.detect.writing import each, fold, function, most, softmax_of, tensor
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.llvm import run_sequential
from crossfuse.errors import CascadeRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.schedule.rules.stream import schedule_stream
from crossfuse.workload.cascade_build import top_of

ROWS = 3


def stream_of(func: Any, tiles: StreamTiles) -> Any:
    (site,) = detect(func)
    return streaming(site, derive(site.cascade), tiles)


def image_of(func: Any, tiles: StreamTiles) -> KernelImage:
    return lower(schedule_stream(stream_of(func, tiles), tiles)).image


def both(func: Any, tiles: StreamTiles, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Outputs on the CPU and under the emulator, which finds nothing."""
    report = emulate(image_of(func, tiles), arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    return [dict(run_sequential(stream_of(func, tiles), arrays).outputs), dict(report.outputs)]


def routed(length: int, k: int) -> Any:
    """The k largest probabilities of a softmax, and of which classes they are."""
    x = tensor("x", ROWS, length)
    m = most("m", (ROWS,), length, x)
    s = fold("s", (ROWS,), length, lambda i, j: tirx.exp(x(i, j) - m(i)))
    top, at = top_of(x, k)
    share = each("share", (ROWS, k), lambda i, t: tirx.exp(top(i, t) - m(i)) / s(i))
    return function(x, share, at)


def with_ties(length: int) -> np.ndarray:
    """Few different numbers, equal ones only, and -oo but for one."""
    x = np.round(2 * np.random.default_rng(length).standard_normal((ROWS, length)))
    x[1] = 1
    x[2] = -np.inf
    x[2, length // 2] = 0
    return x.astype("float32")


@pytest.mark.parametrize(
    ("k", "length", "tiles"),
    [
        (1, 9, StreamTiles(2)),
        (3, 77, StreamTiles(8, unroll=2, cluster=2)),
        (5, 130, StreamTiles(64, unroll=1)),
    ],
)
def test_softmax_and_top_k(k: int, length: int, tiles: StreamTiles) -> None:
    x = with_ties(length)
    places = np.argsort(-x, axis=1, kind="stable")[:, :k]
    powers = np.exp(x.astype("float64") - x.max(axis=1, keepdims=True))
    shares = np.take_along_axis(powers / powers.sum(axis=1, keepdims=True), places, 1)
    for outputs in both(routed(length, k), tiles, {"x": x}):
        np.testing.assert_array_equal(outputs["top_at"], places)
        np.testing.assert_allclose(outputs["share"], shares, rtol=1e-6)


def test_a_sampled_token_and_its_confidence() -> None:
    """Gumbel-max: where logits and noise together are largest, and a softmax of the logits."""
    x, noise = tensor("x", ROWS, 130), tensor("noise", ROWS, 130)
    noisy = each("noisy", (ROWS, 130), lambda i, j: x(i, j) + noise(i, j))
    place, _ = chosen(LARGEST, noisy, ROWS, 130)
    s, _power = softmax_of(x, (ROWS,), 130)
    confidence = each("confidence", (ROWS,), lambda i: 1.0 / s(i))
    token = each("token", (ROWS,), lambda i: place(i))
    random = np.random.default_rng(1)
    arrays = {
        "x": random.standard_normal((ROWS, 130)).astype("float32"),
        "noise": random.gumbel(size=(ROWS, 130)).astype("float32"),
    }
    wanted = (arrays["x"] + arrays["noise"]).argmax(axis=1)
    total = np.exp(arrays["x"] - arrays["x"].max(axis=1, keepdims=True)).sum(axis=1)
    for outputs in both(function(x, noise, token, confidence), StreamTiles(32), arrays):
        np.testing.assert_array_equal(outputs["token"], wanted)
        np.testing.assert_allclose(outputs["confidence"], 1 / total, rtol=1e-6)


def test_argmin_and_min() -> None:
    x = tensor("x", ROWS, 50)
    least = fold("least", (ROWS,), 50, lambda i, j: x(i, j), te.min)
    spread = fold("spread", (ROWS,), 50, lambda i, j: tirx.exp(least(i) - x(i, j)))
    place = topi.argmin(x, axis=1)
    arrays = {"x": np.round(np.random.default_rng(2).standard_normal((ROWS, 50))).astype("float32")}
    low = arrays["x"].min(axis=1, keepdims=True)
    wanted = np.exp(low.astype("float64") - arrays["x"]).sum(axis=1)
    for outputs in both(function(x, spread, place), StreamTiles(16, unroll=2), arrays):
        (found,) = (each for each in outputs.values() if each.dtype == np.int32)
        np.testing.assert_array_equal(found, arrays["x"].argmin(axis=1))
        np.testing.assert_allclose(outputs["spread"], wanted, rtol=1e-6)


def test_too_many() -> None:
    with pytest.raises(CascadeRefused) as caught:
        stream_of(routed(100, 33), StreamTiles())
    assert str(caught.value) == (
        "cascade-stream: slot top: found the 33 largest; limit: 32 numbers. Instead: leave it out "
        "of the cascade."
    )
