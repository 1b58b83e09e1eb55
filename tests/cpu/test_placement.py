"""Where `placement="auto"` tries to keep an intermediate first."""

from __future__ import annotations

import pytest

from crossfuse.compiler.placement import _places
from crossfuse.hardware import device
from crossfuse.workload import prim_func, resolve


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("G1", "G2", "G3", "G7", "G10", "C1", "C2", "C3", "C5"), ("registers", "dsm", "l2")),
        # The intermediate would be made too often.
        (("G9", "C4", "C6", "C7"), ("dsm", "l2", "global")),
        (("G4", "G5", "G6", "G8", "S3", "S8"), ("l2", "global", "dsm")),
    ],
)
def test_the_fastest_on_an_h100_is_first(names: tuple[str, ...], order: tuple[str, ...]) -> None:
    for name in names:
        found = _places(prim_func(resolve(name)), device("nvidia-h100"))
        assert found[: len(order)] == order, name


def test_what_registers_cannot_take_is_left_to_the_cluster() -> None:
    wide = prim_func(resolve("gemm_chain:M=16,K=64,N=40,L=64,dtype=bfloat16"))
    assert "registers" not in _places(wide, device("nvidia-h100"))
