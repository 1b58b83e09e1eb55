"""Kernels that note when they did what."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.hopper.rows.products import HEADS, of_spec, spec
from crossfuse.emulate.cuda import emulate
from crossfuse.errors import LoweringRefused
from crossfuse.lower.extract import lower
from crossfuse.schedule.rules.tensor_tiles import TensorTiles
from crossfuse.schedule.rules.threads import schedule_split_k
from crossfuse.schedule.rules.tiled_ffn import schedule_tiled_ffn
from crossfuse.workload import cascade_numerics, parse, prim_func, random_inputs

SPEC = parse("gated_ffn:M=64,K=128,N=256,L=64,dtype=bfloat16")
TILES = {"first": TensorTiles(64, 8, 4), "second": TensorTiles(64, 16, split=4)}
FIRST = (
    "weights asked for 0",
    "first tiles 0",
    "multiplied 0",
    "in boxes 0",
    "written 0",
    "stored 0",
)
SECOND = ("weights asked for {0}", "first tiles {0}", "multiplied {0}", "peers multiplied {0}")


@pytest.mark.parametrize("staged", [False, True], ids=["two kernels", "one kernel"])
def test_every_event_is_stamped_and_nothing_else_changes(staged: bool) -> None:
    schedule = schedule_tiled_ffn(prim_func(SPEC), staged=staged, **TILES)
    timed, plain = lower(schedule, timeline=True), lower(schedule)
    assert "crossfuse_stamp" not in plain.image.cuda
    report = emulate(timed.image, random_inputs(SPEC), orders=2)
    assert report.findings == ()
    due = emulate(plain.image, random_inputs(SPEC), orders=1).outputs["out"]
    np.testing.assert_array_equal(report.outputs["out"], due)
    tables = [value for name, value in report.outputs.items() if name.startswith("crossfuse_")]
    assert [each.shape[1] for each in tables] == [len(each) for each in timed.events]
    # CTAs 16 and on have no tile of the second product: 64 columns in tiles of 16, split over 4.
    assert all(table[:16].all() for table in tables)


def test_events_are_named_in_their_order() -> None:
    (names,) = lower(schedule_tiled_ffn(prim_func(SPEC), **TILES), timeline=True).events
    second = tuple(each.format(1) for each in SECOND)
    end = (*second, "received 1", "stored 1", "end")
    assert names == ("begin", "cluster met", *FIRST, *end)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("tokens", [70, 2], ids=["warps", "warpgroups"])
def test_what_makes_rows_notes_when(tokens: int, cluster: int) -> None:
    given = spec(tokens, 128, 32)
    timed = lower(of_spec(given, rows=64, columns=16, cluster=cluster), timeline=True)
    assert timed.events[0][:4] == ("begin", "cluster met", "rows begun", "rows made")
    report = emulate(timed.image, cascade_numerics.random_inputs(given), orders=1)
    assert report.findings == ()
    (table,) = (value for name, value in report.outputs.items() if name.startswith("crossfuse_"))
    assert table.all()


@pytest.mark.slow
def test_a_warpgroup_beside_a_head_notes_when_its_rows_are_made() -> None:
    given, tiles = HEADS["a tile without rows"]
    timed = lower(of_spec(given, constant=True, **tiles), timeline=True)
    assert timed.image.launches[0].block == (512, 1, 1)
    report = emulate(timed.image, cascade_numerics.random_inputs(given), orders=1)
    assert report.findings == ()
    assert report.outputs["crossfuse_timeline_0"].all()


def test_general_kernels_have_no_timeline() -> None:
    func = prim_func(parse("gemm:M=64,N=64,K=64,dtype=float16"))
    with pytest.raises(LoweringRefused) as caught:
        lower(schedule_split_k(func, cluster=4), timeline=True)
    assert str(caught.value).startswith(
        "timeline: function 'main': found a kernel of the general lowering; limit: kernels of the "
        "Hopper pipeline"
    )
