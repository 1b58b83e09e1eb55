"""Keys of a tile of rows split over the CTAs of a cluster, whose states merge, in the emulator."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cpu.cascade.tiles.forms import scheduled
from cpu.cascade.tiles.masked import Masked, function, inputs, reference
from cpu.hopper.instructions import EXPECT, PUSH, RECEIVED
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.errors import LoweringRefused
from crossfuse.hardware import device
from crossfuse.lower.extract import lower
from crossfuse.lower.hopper.stream.plan.memory import plan_mailbox
from crossfuse.lower.hopper.stream.recover.function import recover_streams
from crossfuse.lower.image import KernelImage
from crossfuse.runtime import compile_cubin

pytestmark = pytest.mark.cpu

#: Fewer SMs than heads of keys.
SMALL = replace(device("nvidia-h100"), sms=3)
DECODE = Masked(heads=8, share=4, rows=1, keys=333, depth=64)
WIDE = replace(DECODE, heads=4, keys=600, depth=128)

CASES = {
    "alone": (DECODE, 1),
    "two": (DECODE, 2),
    "slices that do not divide the columns": (DECODE, 3),
    "four": (WIDE, 4),
    "eight": (WIDE, 8),
    "sixteen, most without keys": (replace(DECODE, heads=4, keys=100), 16),
    "nine, the last of which merges nothing": (replace(DECODE, heads=4, keys=600), 9),
    "sixteen": (replace(WIDE, keys=1030), 16),
    "fewer keys than CTAs are in a tile": (replace(DECODE, keys=9), 8),
    "lengths": (replace(DECODE, lengths=True), 4),
    "seven heads a group": (replace(DECODE, heads=7, share=7), 2),
    "twelve heads a group": (replace(DECODE, heads=12, share=12, alibi=True, cap=20.0), 4),
    "many rows, causal": (Masked(heads=1, rows=100, keys=150, depth=64, causal=True), 2),
}


def kernel(case: Masked, cluster: int) -> KernelImage:
    return lower(scheduled(function(case), rows=64, elements=64, cluster=cluster), SMALL).image


def judge(case: Masked, image: KernelImage, given: dict[str, np.ndarray], orders: int = 2) -> None:
    report = emulate(image, given, orders=orders)
    report.raise_if_wrong()
    found = report.outputs["out"]
    for outputs in report.later:
        assert outputs["out"].tobytes() == found.tobytes()
    exact, separate = (reference(case, given, each) for each in (np.float64, np.float32))
    assert np.isfinite(found.astype(np.float64)).all()
    error = np.linalg.norm(found.astype(np.float64) - exact)
    assert error <= 2 * np.linalg.norm(separate - exact) + 1e-30


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right(name: str) -> None:
    case, cluster = CASES[name]
    judge(case, kernel(case, cluster), inputs(case))


@pytest.mark.slow
def test_heads_that_see_nothing_are_zero() -> None:
    case = replace(DECODE, lengths=True)
    given = inputs(case)
    given["length"][:] = [0, 1, 64, 65, 333, 128, 0, 300]
    report = emulate(kernel(case, 4), given, orders=1)
    report.raise_if_wrong()
    found = report.outputs["out"].astype(np.float64)
    assert not found[[0, 6]].any()
    exact = reference(case, given, np.float64)
    seen = given["length"] > 0
    assert np.abs(found - exact)[seen].max() < 0.03


@cache
def right() -> KernelImage:
    return kernel(DECODE, 4)


def kinds(image: KernelImage) -> set[str]:
    return {each.kind for each in emulate(image, inputs(DECODE), orders=3).findings}


FAULTS = {
    "states that are read before they are there": (
        lambda: drop_call(right(), RECEIVED),
        "uninitialised-read",
    ),
    "bytes that nobody announces": (lambda: drop_call(right(), EXPECT, 3), "deadlock"),
    "bytes that are announced in vain": (
        lambda: change_argument(right(), EXPECT, 1, "{} + 8u", 3),
        "deadlock",
    ),
    "bytes that are not announced": (
        lambda: change_argument(right(), EXPECT, 1, "{} - 8u", 3),
        "mbarrier",
    ),
    "a state in another one's place": (
        lambda: change_argument(right(), PUSH, 0, "{} + 8u", 1),
        "async-race",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught(name: str) -> None:
    plant, kind = FAULTS[name]
    assert kind in kinds(plant())


def test_who_has_not_received_everything_may_not_exit() -> None:
    # States arrive while the threads are busy with something else.
    leave = "for (int i = 0; i < 200; ++i) __syncwarp(); return;"
    text = re.sub(RECEIVED + r"\(\(&\(memory.*;", leave, right().cuda)
    findings = emulate(replace(right(), cuda=text), inputs(DECODE), orders=1).findings
    told = [str(each) for each in findings if each.kind == "early-exit"]
    assert any("nobody waits for the phase of the mbarrier that counts it" in each for each in told)


def test_states_need_their_factors() -> None:
    text = right().cuda
    factor = re.search(r"crossfuse_fast_exp2\(\(m_slab_ptr\[0\] - \w+\[0\]\)\)", text)
    assert factor is not None
    wrong = replace(right(), cuda=text.replace(factor.group(), "1.0f"))
    found = emulate(wrong, inputs(DECODE), orders=1).outputs["out"].astype(np.float64)
    assert np.abs(found - reference(DECODE, inputs(DECODE), np.float64)).max() > 0.05


@pytest.mark.parametrize("cluster", [1, 8, 16])
def test_nothing_spills(cluster: int) -> None:
    image = lower(scheduled(function(WIDE), rows=64, elements=64, cluster=cluster)).image
    for usage in compile_cubin(image.cuda).resources:
        assert not usage.complaints, usage


@pytest.mark.slow
def test_memory_is_full_of_keys() -> None:
    texts = [kernel(WIDE, each).launches[0].dynamic_shared_bytes for each in (1, 16)]
    assert min(texts) > 180_000


def test_odd_slices_are_refused() -> None:
    (program,) = recover_streams(scheduled(function(DECODE), cluster=5).mod["main"])
    assert program.split is not None
    odd = replace(program, split=replace(program.split, columns=13))
    with pytest.raises(LoweringRefused) as caught:
        plan_mailbox(odd)
    assert str(caught.value) == (
        "stream-split: loop 'part': found slices of 13 columns for 5 CTAs; limit: slices of an "
        "even number of columns, since threads send pairs. Instead: pass another number of CTAs a "
        "cluster, such as a power of two."
    )


REFUSED = {
    "two warpgroups of few rows": (
        1,
        {"rows": 128},
        "stream-tile: scores 'scores': found 4 of 128 rows of a tile that are stored; limit: all "
        "rows, or a tile of 64. Instead: take 64 rows a tile",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    cluster, tiles, text = REFUSED[name]
    sizes = {"rows": 64, "elements": 64, "cluster": cluster} | tiles
    with pytest.raises(LoweringRefused) as caught:
        lower(scheduled(function(DECODE), **sizes), SMALL)
    assert text in str(caught.value)
