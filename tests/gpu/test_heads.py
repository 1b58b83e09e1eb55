"""Products that begin with raw rows, on a GPU: right, and the same bits in every launch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import crossfuse
from cpu.hopper.rows.products import HEADS, of_spec
from crossfuse.runtime.tensors import to_numpy, to_torch
from crossfuse.workload.cascade_numerics import adversarial_inputs, check, random_inputs
from gpu.streams import replayed_on_two_streams


@pytest.mark.parametrize("name", HEADS)
def test_all_launches_give_the_same_bits(name: str, tmp_path: Path) -> None:
    """The first one finds its code nowhere; of later ones some CTAs start early."""
    torch = pytest.importorskip("torch")
    given, tiles = HEADS[name]
    compiled = crossfuse.compile(of_spec(given, constant=True, **tiles), directory=tmp_path)
    assert "crossfuse_factors" in compiled.lowered.image.cuda
    inputs = [to_torch(each).cuda() for each in random_inputs(given, 1).values()]
    out = compiled.kernel.run(*inputs)
    first = to_numpy(out.cpu())
    check(given, random_inputs(given, 1), {"out": first})
    for _ in range(500):
        compiled.kernel(*inputs, out)
    torch.cuda.synchronize()
    assert to_numpy(out.cpu()).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", HEADS)
def test_hard_numbers(name: str, tmp_path: Path) -> None:
    given, tiles = HEADS[name]
    kernel = crossfuse.compile(of_spec(given, constant=True, **tiles), directory=tmp_path).kernel
    for _, inputs in adversarial_inputs(given):
        found = kernel.run(*inputs.values())
        assert isinstance(found, np.ndarray)
        check(given, inputs, {"out": found})


def test_two_streams_at_once(tmp_path: Path) -> None:
    given, tiles = HEADS["a tile without rows"]
    kernel = crossfuse.compile(of_spec(given, constant=True, **tiles), directory=tmp_path).kernel
    for found, wanted in replayed_on_two_streams(kernel):
        assert found.equal(wanted)
