"""Which rows are raw elements times a factor of the row."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import tirx

from cpu.hopper.rows.products import Element, layernorm_gemm, norm_gemm, scheduled
from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiles import StreamTiles
from crossfuse.lower.hopper.recover.function import recover

pytestmark = pytest.mark.cpu


def found(function: Any) -> Any:
    stream = StreamTiles(threads=128, unroll=1, resident="registers")
    ((program,),) = recover(scheduled(function, stream, rows=64, columns=16).mod["main"])
    return program.rows.scaled


SCALED: dict[str, Element] = {
    "a gain": lambda x, factor, gain: x * factor * gain,
    "the factor inside": lambda x, factor, gain: gain * (x * factor),
    "a gain that is added to 1": lambda x, factor, gain: x * factor * (gain + 1.0),
    "the factor twice": lambda x, factor, gain: factor * x * (factor * gain),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_factor_is_found(name: str) -> None:
    scaled = found(norm_gemm(3, 256, 16, SCALED[name]))
    assert scaled is not None
    assert str(scaled.source.name) == "x"
    assert [str(each.name) for each in scaled.vectors] == ["gain"]
    loads = {str(each.source.name) for each in ir.buffer_loads(scaled.element)}
    assert loads == {"x", "gain"}
    assert {str(each.source.scope()) for each in ir.buffer_loads(scaled.factor)} == {"local"}


def test_no_gain_is_needed() -> None:
    scaled = found(norm_gemm(3, 256, 16, lambda x, factor, gain: x * factor))
    assert scaled is not None and scaled.vectors == ()


OTHERS: dict[str, Element] = {
    "something added": lambda x, factor, gain: x * factor + gain,
    "a bound": lambda x, factor, gain: tirx.max(x * factor, 0.0) * gain,
    "another power of the element": lambda x, factor, gain: (x * x + gain) * (factor + gain),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_have_none(name: str) -> None:
    assert found(norm_gemm(3, 256, 16, OTHERS[name])) is None


def test_a_mean_that_is_taken_off_is_no_factor() -> None:
    assert found(layernorm_gemm(4, 136, 64)) is None


def test_one_element_a_thread_is_no_number_of_the_row() -> None:
    """What a thread has of the only element that it makes is as local as a factor would be."""
    assert found(norm_gemm(3, 128, 16, SCALED["a gain"])) is None
