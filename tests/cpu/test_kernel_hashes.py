"""The record of generated CUDA: a small sample is as recorded, and what differs is named."""

from __future__ import annotations

from types import ModuleType

import pytest

from null.script import load

#: One kernel of each of these is lowered here; the program compares all of them.
GROUPS = ("candidates-h100, dsm", "candidates-h100, l2", "rows-candidates-h100, stream", "suite")

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def hashes() -> ModuleType:
    return load("kernel_hashes")


def test_a_sample_is_as_recorded(hashes: ModuleType) -> None:
    every = hashes.groups()
    wanted = hashes.sample({name: every[name] for name in GROUPS}, 1)
    found = hashes.compute(wanted)
    assert not [*hashes.differences(wanted, hashes.read(), found)]


def test_every_kernel_is_recorded(hashes: ModuleType) -> None:
    every, recorded = hashes.groups(), hashes.read()
    assert {name: set(each) for name, each in every.items()} == {
        name: set(each) for name, each in recorded.items()
    }


def test_what_differs_is_named(hashes: ModuleType) -> None:
    kernels = {
        "group": {each: hashes.Kernel(str, (each,), f"kernel {each}") for each in ("a", "b", "c")}
    }
    found = hashes.compute(kernels)
    recorded = {"group": {"a": "a", "b": "other", "d": "d"}}
    assert [*hashes.differences(kernels, recorded, found)] == [
        "changed  group: kernel b: other -> b",
        "added    group: kernel c",
    ]
    assert [*hashes.removed(kernels, recorded)] == ["removed  group: d"]
