"""Faults planted in a kernel of attention and its output product, each with its finding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from cpu.hopper.attention.products import of_spec, spec
from cpu.hopper.instructions import MEET, RAISE
from cpu.hopper.persistent import AWAIT, FENCE_OF_AWAIT, FENCE_OF_RAISE, LANDED
from cpu.hopper.planting import one_changed
from crossfuse.cascade.rewrite.tiles import CascadeTiles
from crossfuse.emulate.cuda import change_argument, drop_call, emulate
from crossfuse.lower.extract import lower
from crossfuse.lower.image import KernelImage
from crossfuse.workload.cascade_numerics import random_inputs

pytestmark = pytest.mark.cpu

GIVEN = spec(kv_len=64)


@cache
def alone() -> KernelImage:
    """Boxes are stored by TMA."""
    return lower(of_spec(GIVEN)).image


@cache
def shared() -> KernelImage:
    """CTAs of a cluster merge, and store element by element."""
    sizes = CascadeTiles(rows=64, elements=32, cluster=2)
    return lower(of_spec(GIVEN, sizes, split=2)).image


def unfenced(image: KernelImage) -> KernelImage:
    """Without the proxy fences on either side of a flag, and behind the stores of each thread."""
    both = one_changed(one_changed(image, FENCE_OF_RAISE, r"\1"), FENCE_OF_AWAIT, r"\1")
    return drop_call(both, "crossfuse_fence_copies")


FAULTS: dict[str, tuple[Callable[[], KernelImage], str, str]] = {
    "a flag raised before the box has landed": (
        lambda: drop_call(alone(), LANDED, 1),
        "race",
        "the copy is not waited for",
    ),
    "a flag that is never raised": (
        lambda: drop_call(alone(), RAISE, 1),
        "deadlock",
        "of crossfuse_flags_0, which stays 0",
    ),
    "a relaxed release": (
        lambda: one_changed(alone(), "red.release", "red.relaxed"),
        "async-race|race",
        "no release and acquire of a flag",
    ),
    "a wait for a head too few": (
        lambda: change_argument(alone(), AWAIT, 2, "{} - 1"),
        "async-race|race|uninitialised-read",
        "",
    ),
    "a wait for a warpgroup too few": (
        lambda: change_argument(shared(), AWAIT, 4, "{} - 1"),
        "async-race|race|deadlock",
        "",
    ),
    "stores that no proxy fence follows": (
        lambda: unfenced(shared()),
        "async-race",
        "fence.proxy.async",
    ),
    "a flag raised before all threads have stored": (
        lambda: drop_call(shared(), MEET, 0),
        "async-race|race",
        "",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    plant, kind, text = FAULTS[name]
    report = emulate(plant(), random_inputs(GIVEN), orders=3, max_findings=64)
    found = [each for each in report.findings if each.kind in kind.split("|")]
    assert found, report.findings
    assert any(text in str(each) for each in found), found
