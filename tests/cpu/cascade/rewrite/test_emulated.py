"""Streams as CUDA: threads, warps, CTAs and clusters under the emulator; planted faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.cascade.rewrite.cases import (
    CASES,
    assert_close,
    each_kind,
    inputs,
    of_rows,
    scheduled,
)
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.emulate.cuda import emulate
from crossfuse.emulate.cuda.faults import drop_call
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage

#: Cluster, threads, unroll, residence, cascade; lengths leave a rest in the last CTA.
CLUSTERS = [
    (1, 64, 1, "shared", "layer_norm"),
    (2, 32, 2, "none", "inertia"),
    (2, 64, 1, "registers", "layer_norm"),
    (3, 32, 1, "shared", "softmax"),
    (4, 32, 2, "registers", "softmax"),
    (4, 16, 1, "none", "cross_entropy"),
    (8, 32, 1, "shared", "softmax"),
    (16, 8, 1, "registers", "softmax"),
    (16, 32, 1, "none", "variance"),
]


def image_of(name: str, rows: int, length: int, tiles: StreamTiles) -> KernelImage:
    return lower(scheduled(name, rows, length, tiles)).image


def without(image: KernelImage, call: str) -> KernelImage:
    """The image without the calls of a function."""
    text = image.cuda.replace(f"{call};", "(void)0;")
    assert text != image.cuda
    return replace(image, cuda=text)


@pytest.mark.parametrize(("cluster", "threads", "unroll", "resident", "name"), CLUSTERS)
def test_clusters(cluster: int, threads: int, unroll: int, resident: str, name: str) -> None:
    length = cluster * threads * 4 * unroll + 13
    tiles = StreamTiles(threads, unroll=unroll, cluster=cluster, resident=resident)
    arrays = inputs(name, 2, length)
    report = emulate(image_of(name, 2, length, tiles), arrays, orders=3)
    assert report.ok, "\n".join(map(str, report.findings))
    output = CASES[name].output
    assert_close(report.outputs[output], name, arrays)
    # Threads and clusters ran in three orders.
    for other in report.later:
        assert other[output].tobytes() == report.outputs[output].tobytes()


@pytest.mark.parametrize(("cluster", "threads"), [(2, 1), (3, 2), (16, 8)])
def test_fewer_threads_than_ctas(cluster: int, threads: int) -> None:
    """Each tells its state to several peers."""
    arrays = inputs("softmax", 2, 150)
    tiles = StreamTiles(threads, unroll=1, cluster=cluster)
    report = emulate(image_of("softmax", 2, 150, tiles), arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_close(report.outputs["Y"], "softmax", arrays)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_whole_rows_in_registers(name: str, cluster: int) -> None:
    """All threads have equal counts, which are known; exponentials are kept for the outputs."""
    tiles = StreamTiles(32, unroll=2, cluster=cluster, resident="registers")
    length = 256 * cluster
    arrays, kinds = each_kind(name, 1, length)
    report = emulate(image_of(name, len(kinds), length, tiles), arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    for rows in kinds.values():
        assert_close(report.outputs["Y"][rows], name, of_rows(arrays, rows))


def test_threads_without_elements_that_count() -> None:
    """Their maximum is -oo, and what they kept is 0 below any other."""
    tiles = StreamTiles(32, unroll=1, cluster=2, resident="registers")
    x = np.full((3, 256), -np.inf, np.float32)
    x[0, 130], x[1, 3:5], x[2, ::7] = -200.0, (3e38, 2e38), np.linspace(-1e4, 1e4, 37)
    arrays = {"X": x}
    report = emulate(image_of("softmax", 3, 256, tiles), arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_close(report.outputs["Y"], "softmax", arrays)


@pytest.mark.parametrize("rows", [4, 64])
def test_rows_side_by_side(rows: int) -> None:
    """Several rows in a CTA: each has a warp, or a part of one, of its own."""
    tiles = StreamTiles(512 // rows // 2, unroll=1, rows=rows, resident="registers")
    arrays = inputs("softmax", 64, 50)
    report = emulate(image_of("softmax", 64, 50, tiles), arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    assert_close(report.outputs["Y"], "softmax", arrays)


@pytest.mark.slow
def test_states_that_nobody_waits_for() -> None:
    tiles = StreamTiles(32, unroll=1, cluster=2)
    arrays = inputs("variance", 1, 300)
    right = image_of("variance", 1, 300, tiles)
    assert emulate(right, arrays).ok
    # Peers are reached before they have started, and set up their barriers after that.
    report = emulate(drop_call(right, "crossfuse_push_begin", -1), arrays, max_findings=32)
    assert "peer-not-started" in {each.kind for each in report.findings}
    report = emulate(drop_call(right, "crossfuse_push_end", -1), arrays, max_findings=32)
    assert {each.kind for each in report.findings} & {"async-race", "early-exit"}


def test_without_a_barrier_of_the_cta() -> None:
    """Warps exchange states through shared memory."""
    arrays = inputs("variance", 1, 300)
    right = image_of("variance", 1, 300, StreamTiles(128, unroll=1))
    assert emulate(right, arrays).ok
    found = {each.kind for each in emulate(without(right, "__syncthreads()"), arrays).findings}
    assert "race" in found or "uninitialised" in found, found


def test_a_pair_that_is_merged_the_wrong_way_round() -> None:
    """Both threads of a pair must compute one merge, or sums differ in their last bits."""
    tiles = StreamTiles(32, unroll=1)
    arrays = inputs("softmax", 1, 600, "large")
    right = image_of("softmax", 1, 600, tiles)
    wrong = replace(right, cuda=right.cuda.replace(", 16, 32)", ", 8, 32)", 1))
    assert wrong.cuda != right.cuda
    with pytest.raises(AssertionError):
        assert_close(emulate(wrong, arrays).outputs["Y"], "softmax", arrays)


@pytest.mark.parametrize(("name", "cluster"), [("softmax", 1), ("layer_norm", 2)])
def test_bfloat16(name: str, cluster: int) -> None:
    """Packed registers and vectors of eight."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tiles = StreamTiles(64, unroll=2, cluster=cluster, resident="registers")
    length = 1024 * cluster
    arrays = {key: each.astype(ml_dtypes.bfloat16) for key, each in inputs(name, 2, length).items()}
    image = lower(scheduled(name, 2, length, tiles, "bfloat16")).image
    assert "uint4" in image.cuda and "words" in image.cuda
    report = emulate(image, arrays)
    assert report.ok, "\n".join(map(str, report.findings))
    wanted = CASES[name].reference(arrays, "float64")
    found = report.outputs["Y"].astype("float64")
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-6)
