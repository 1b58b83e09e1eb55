"""Streaming functions on the CPU, against the two-pass form in double precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cascade_functions import variance
from cpu.cascade.rewrite.cases import (
    CASES,
    assert_close,
    each_kind,
    inputs,
    of_rows,
    scheduled,
    site_of,
    stream_of,
)
from crossfuse.cascade.algebra import derive
from crossfuse.cascade.detect import detect
from crossfuse.cascade.rewrite.streaming import streaming
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.cascade.spec import left, right
from crossfuse.emulate.llvm import run_sequential

#: Lengths: one element, fewer than threads, no vectors, vectors, tiles with and without a rest.
LENGTHS = {1: 1, 5: 1, 77: 1, 96: 1, 256: 2, 300: 2}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_row(name: str) -> None:
    """One function for all rows; a row that is -oo throughout is one without any element."""
    tiles = StreamTiles(threads=8, unroll=2, cluster=2, resident="shared")
    arrays, kinds = each_kind(name, 2, 77)
    function = stream_of(site_of(name, 2 * len(kinds), 77), tiles)
    got = run_sequential(function, arrays).outputs[CASES[name].output]
    for rows in kinds.values():
        assert_close(got[rows], name, of_rows(arrays, rows))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_every_length(name: str, length: int) -> None:
    kept = ("registers", "shared", "none")[length % 3]
    tiles = StreamTiles(threads=16, unroll=LENGTHS[length], resident=kept)
    arrays = inputs(name, 2, length)
    function = stream_of(site_of(name, 2, length), tiles)
    assert_close(run_sequential(function, arrays).outputs["Y"], name, arrays)


def test_double_precision_stays() -> None:
    (site,) = detect(variance(2, 90, "float64", "float64"))
    function = streaming(site, derive(site.cascade), StreamTiles(threads=4))
    arrays = inputs("variance", 2, 90, "shifted", "float64")
    got = run_sequential(function, arrays).outputs["V"]
    wanted = arrays["X"].var(axis=1)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_the_mean_of_one_element_is_that_element() -> None:
    """Nothing says that its sum is divided by one; squares of it would cancel."""
    site = site_of("variance", 4, 1)
    assert "total_mean" in {each.name for each in derive(site.cascade).slots}
    arrays = {"X": np.array([[1e15 / 3], [12345.678], [-1 / 3], [0]], np.float32)}
    function = streaming(site, derive(site.cascade), StreamTiles(threads=8))
    np.testing.assert_array_equal(run_sequential(function, arrays).outputs["V"], 0)


def test_bound_function_stays_sequential() -> None:
    """What the schedule makes is the same program, bit by bit, forwards and backwards."""
    tiles = StreamTiles(threads=32, unroll=1, cluster=4, resident="shared")
    arrays = inputs("softmax", 2, 200)
    plain = run_sequential(stream_of(site_of("softmax", 2, 200), tiles), arrays)
    bound = run_sequential(scheduled("softmax", 2, 200, tiles), arrays)
    assert plain.outputs["Y"].tobytes() == bound.outputs["Y"].tobytes()


def test_a_merge_without_correction_is_wrong() -> None:
    """The twin of what is tested above: sums of segments added as they are."""
    site = site_of("softmax", 2, 77)
    derivation = derive(site.cascade)
    m, s = derivation.slots
    faulty = replace(derivation, slots=(m, replace(s, merge=left("s") + right("s"))))
    arrays = inputs("softmax", 2, 77)
    got = run_sequential(streaming(site, faulty, StreamTiles(threads=8)), arrays).outputs["Y"]
    with pytest.raises(AssertionError):
        assert_close(got, "softmax", arrays)
