"""Keys of a tile of rows split over CTAs whose states a second kernel merges, in the emulator."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference
from cpu.hopper.stream.test_stream_split import CASES, DECODE, SMALL, WIDE, judge, kernel
from crossfuse.emulate.cuda import drop_call, emulate
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.stream.recover.function import stored_nests
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin

pytestmark = pytest.mark.cpu

WAIT = "tvm_builtin_ptx_griddepcontrol_wait"
STORE = "tvm_builtin_ptx_st_vec_global_v2_f32"
RIGHT = {
    "two, many rows, causal": CASES["many rows, causal"],
    "two": CASES["two"],
    "three": CASES["slices that do not divide the columns"],
    "four, lengths": CASES["lengths"],
    "eight, one without keys": (replace(DECODE, heads=4, keys=430), 8),
    "sixteen, most without keys": CASES["sixteen, most without keys"],
}


def kernels(case: Masked, parts: int) -> KernelImage:
    tiles = {"rows": 64, "elements": 64, "cluster": parts}
    return lower(scheduled(function(case), **tiles, merge="kernel"), SMALL).image


@cache
def right() -> KernelImage:
    return kernels(DECODE, 4)


def error(image: KernelImage) -> float:
    given = inputs(DECODE)
    made = emulate(image, given, orders=1).outputs["out"].astype(np.float64)
    return float(np.abs(made - reference(DECODE, given, np.float64)).max())


@pytest.mark.parametrize("name", RIGHT)
def test_kernels_are_right(name: str) -> None:
    case, parts = RIGHT[name]
    judge(case, kernels(case, parts), inputs(case))


@pytest.mark.nightly
def test_results_are_those_of_a_cluster() -> None:
    given = inputs(DECODE)
    images = [right(), kernel(DECODE, 4)]
    stored, merged = (emulate(each, given, orders=1).outputs["out"] for each in images)
    assert stored.tobytes() == merged.tobytes()


@pytest.mark.slow
def test_heads_that_see_nothing_are_zero() -> None:
    case = replace(DECODE, lengths=True)
    given = inputs(case)
    given["length"][:] = [0, 1, 64, 65, 333, 128, 0, 300]
    report = emulate(kernels(case, 2), given, orders=1)
    report.raise_if_wrong()
    assert not report.outputs["out"].astype(np.float64)[[0, 6]].any()


def test_no_cluster_and_states_of_all_parts() -> None:
    image = right()
    assert [each.grid for each in image.launches] == [(8, 1, 1), (2, 1, 1)]
    assert [each.cluster_size for each in image.launches] == [1, 1]
    (states,) = image.workspaces
    # Two heads of keys, four parts, four rows; 64 sums, the maximum and the sum of weights.
    assert (states.name, states.shape, states.dtype) == (
        "partial_states",
        (2, 4 * 4 * (64 + 2)),
        "float32",
    )


def test_the_second_kernel_is_launched_early_and_waits() -> None:
    assert [each.early for each in right().launches] == [False, True]
    report = emulate(drop_call(right(), WAIT, 0), inputs(DECODE), orders=1)
    told = {each.kind: each for each in report.findings}
    assert told["early-launch"].buffer == "partial_states"


@pytest.mark.slow
def test_a_state_that_is_not_merged_is_found() -> None:
    text, count = re.subn(r"o_slab_ptr\[0\]\)\)", "0.0f))", right().cuda)
    assert count == 1
    assert error(right()) < 0.02
    assert error(replace(right(), cuda=text)) > 0.05


def test_a_wrong_maximum_is_found() -> None:
    text, count = re.subn(r"(merge1_ptr\[0\] = \w+\(\(m_slab_ptr)\[2\]", r"\1[0]", right().cuda)
    assert count == 1
    assert error(replace(right(), cuda=text)) > 0.05


def test_a_state_that_is_not_stored_is_found() -> None:
    assert emulate(drop_call(right(), STORE, 0), inputs(DECODE), orders=1).findings


def test_nothing_spills() -> None:
    image = lower(scheduled(function(WIDE), rows=64, elements=64, cluster=16, merge="kernel")).image
    for usage in compile_cubin(image.cuda).resources:
        assert not usage.complaints, usage


def nests(case: Masked) -> list[Any]:
    schedule = scheduled(function(case), rows=64, elements=64, cluster=4, merge="kernel")
    return list(schedule.mod["main"].body.block.body.seq)


def test_the_merge_has_the_grid_of_the_stream() -> None:
    stream, merge = nests(DECODE)
    with pytest.raises(LoweringRefused) as caught:
        stored_nests([stream, nests(replace(DECODE, heads=12))[1]], ())
    assert str(caught.value).startswith(
        "stream: loop 'i0_group_i1_fused': found 3 iterations along blockIdx.y, which the stream "
        "has not; limit: the grid of the stream without the loop over CTAs that share keys."
    )
    for pair, count in (([stream, stream], 0), ([stream, merge.body], 2)):
        with pytest.raises(LoweringRefused) as caught:
            stored_nests(pair, ())
        assert f"found {count} loops over the grid that the merge has not" in str(caught.value)
