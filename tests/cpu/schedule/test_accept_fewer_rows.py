"""`accept_fewer_rows`: the mark that it leaves, and its trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from cpu.schedule.kernels import scaled_matmul
from cpu.schedule.steps import assert_same
from crossfuse.markers import ROWS, marked_blocks
from crossfuse.schedule.planned import trace_json


def marked(before: bool) -> Any:
    """A schedule with another primitive before or after the call."""
    sch = Schedule(scaled_matmul)
    if before:
        assert sch.accept_fewer_rows() is None
    sch.cache_read(sch.get_sblock("C"), 0, "shared")
    if not before:
        sch.accept_fewer_rows()
    return sch


@pytest.mark.parametrize("before", [True, False])
def test_the_root_block_is_annotated(before: bool) -> None:
    (block,) = marked_blocks(marked(before).mod["main"], ROWS)
    assert (block.name_hint, dict(block.annotations)) == ("root", {ROWS: "at most"})


def test_recorded_as_stock_instructions() -> None:
    sch = marked(before=True)
    names = [each.kind.name for each in sch.trace.insts]
    assert names[:2] == ["GetSBlock", "Annotate"]


@pytest.mark.parametrize("before", [True, False])
def test_json_text_replays_equal(before: bool) -> None:
    sch = marked(before)
    again = Schedule(scaled_matmul)
    Trace.apply_json_to_schedule(json.loads(trace_json(sch.trace)), again)
    assert_same(again, sch)
