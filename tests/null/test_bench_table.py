"""Tables, comparisons and pictures of given rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfuse.bench.job import Job, Planned, Row, Timing
from crossfuse.bench.table import compare, document, mean_speedup, plot, report
from crossfuse.runtime.manifest import ResourceUsage
from null.bench_tables import cells


def row(variant: str, timing: Timing, *, label: str = "S8", protocol: str = "graph") -> Row:
    job = Job("gemm:M=16,K=16,N=32", variant, protocol=protocol)
    return Row(Planned(label, 16, 5.0, job), timing)


def took(microseconds: float, status: str = "ok") -> Timing:
    return Timing(status, "", microseconds, microseconds)


ROWS = (
    row("ours", took(20.0)),
    row("eager", took(15.0)),
    row("autotune", took(10.0)),
    row("ours", took(6.0), label="G1"),
    row("eager", took(12.0), label="G1"),
    row("autotune", Timing("crashed", "signal 11 [core]"), label="G1"),
)


def text(rows: tuple[Row, ...], width: int = 160) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        for part in report(rows):
            console.print(part)
    return capture.get()


def test_losses_and_wins_are_shown_as_they_are() -> None:
    lines = text(ROWS).splitlines()
    (g1,) = (line for line in lines if "G1" in line and "crashed" in line and "│" in line)
    assert "2.00x" in g1
    assert {"20.00 4.00x", "0.50x autotune", "2.00x eager"} <= set(cells(text(ROWS)))
    summary = "ours over the best baseline 1.00x (geometric mean of 2), slower on 1"
    assert any(summary in line for line in lines)


def test_reasons_are_below_the_table_and_not_markup() -> None:
    assert "G1 M=16 autotune (cold, graph): crashed: signal 11 [core]" in text(ROWS)


def test_protocol_of_the_paper_is_a_labelled_column() -> None:
    found = text((*ROWS[:3], row("ours", took(40.0), protocol="stream")))
    assert "no graph" in found
    assert "launched one by one, no CUDA graph: the paper's protocol" in " ".join(found.split())
    assert "40.00 8.00x" in cells(found)


def test_times_fold_in_a_narrow_terminal_and_are_not_cut() -> None:
    found = text(ROWS, width=60)
    assert "20.00" in found
    assert "…" not in found


def test_wrong_kernel_of_ours_is_not_compared() -> None:
    rows = (row("ours", Timing("wrong", "far off")), row("eager", took(15.0)))
    assert compare(rows) == {}
    assert "wrong" in text(rows)
    assert not document(rows, {})["ok"]


def test_inaccurate_baseline_is_marked_and_still_counts() -> None:
    rows = (row("ours", took(10.0)), row("eager", took(15.0, "wrong")))
    (found,) = compare(rows).values()
    assert found.speedup == 1.5
    assert "15.00! 3.00x" in cells(text(rows))


def test_refusal_is_no_fault() -> None:
    rows = (row("ours", Timing("refused", "no schedule fits")), row("eager", took(15.0)))
    assert document(rows, {})["ok"]
    assert "refused" in text(rows)


def test_placements_are_siblings_and_no_baselines() -> None:
    rows = (row("ours", took(20.0)), row("ours-l2", took(10.0)), row("eager", took(15.0)))
    (found,) = compare(rows).values()
    assert (found.variant, found.baseline, found.speedup) == ("ours", "eager", 0.75)
    (line,) = (line for line in text(rows).splitlines() if "S8" in line)
    assert line.rstrip("│ ").endswith("ours-l2")


def test_placement_is_compared_where_ours_was_not_measured() -> None:
    rows = (row("ours-global", took(20.0)), row("ours-l2", took(10.0)), row("eager", took(15.0)))
    (found,) = compare(rows).values()
    assert (found.variant, found.speedup) == ("ours-l2", 1.5)
    assert "1.50x eager (ours-l2)" in cells(text(rows))


def test_one_kernel_of_ours_needs_no_column_for_the_fastest() -> None:
    assert "fastest of ours" not in text(ROWS)


def test_spills_and_serial_products_are_reported() -> None:
    usage = ResourceUsage("main_1", 168, 8, 16, 0, 0, 2, ("C7510",))
    found = text((row("ours", Timing("ok", "", 20.0, resources=(usage,))),))
    assert "ours (cold, graph): main_1: 24 bytes spilled, ptxas C7510" in found


def test_mean_of_nothing_is_nothing() -> None:
    assert mean_speedup([]) is None


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "bench.png"
    plot((*ROWS, row("ours", took(40.0), protocol="stream")), path)
    assert path.read_bytes().startswith(b"\x89PNG")
