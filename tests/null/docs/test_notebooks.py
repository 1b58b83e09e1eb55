"""Notebooks of the tutorials, and the plot of the README, are those that the sources make."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from null.script import load

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
SPEED = load("plot_speed")
#: What all pages read, and page 4.
SHARED = ("support.py", "matplotlibrc")
RECORD = "benchmarks/results/candidates-h100.jsonl"
#: Pages whose point is a plot, and how many plots they have at least.
PLOTS = {"01": 2, "04": 4, "06": 2, "07": 1, "08": 2}


@cache
def maker() -> ModuleType:
    """The program that makes notebooks; to import what it needs takes seconds."""
    return load("make_notebooks")


@pytest.mark.parametrize("page", PAGES, ids=lambda each: each.stem)
def test_notebook_is_not_stale(page: Path) -> None:
    reason = maker().stale(page)
    assert not reason, f"{page.stem}.ipynb {reason}: run make notebooks"


@pytest.mark.parametrize("page", PAGES, ids=lambda each: each.stem)
def test_notebook_was_executed_and_says_nothing_of_the_machine(page: Path) -> None:
    nbformat = maker().nbformat
    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    code = [each for each in notebook.cells if each.cell_type == "code"]
    assert [each.execution_count for each in code] == list(range(1, len(code) + 1))
    assert not any(out.output_type == "error" for each in code for out in each.outputs)
    assert not any(list(maker().machine_texts(each)) for each in code)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "crossfuse"}
    plots = sum("image/png" in out.get("data", {}) for each in code for out in each.outputs)
    assert plots >= PLOTS.get(page.name[:2], 0)


def test_notebooks_are_small_and_are_those_of_the_pages() -> None:
    sizes = {path.stem: path.stat().st_size for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert sorted(sizes) == [page.stem for page in PAGES]
    assert max(sizes.values()) < 300_000
    assert sum(sizes.values()) < 3_000_000


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A page with all that its notebook is made from, in a folder of its own."""
    page = next(each for each in PAGES if each.name.startswith("04"))
    folder = tmp_path / "tutorials"
    folder.mkdir()
    for path in (page, page.with_suffix(".ipynb"), *(page.parent / each for each in SHARED)):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    assert maker().stale(folder / page.name) == ""
    return folder / page.name


def test_a_changed_page_makes_its_notebook_stale(copied: Path) -> None:
    copied.write_text(copied.read_text() + "\n# %%\nprint(1)\n")
    assert "does not have the cells of 04_when_dsm_loses.py" in maker().stale(copied)
    copied.with_suffix(".ipynb").unlink()
    assert maker().stale(copied) == "is missing"


@pytest.mark.parametrize("name", [*(f"tutorials/{each}" for each in SHARED), RECORD])
def test_what_a_page_reads_makes_its_notebook_stale(copied: Path, name: str) -> None:
    read = copied.parent.parent / name
    read.write_text(read.read_text() + "\n")
    assert "other records" in maker().stale(copied)


def test_other_rates_make_notebooks_stale(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = copied.parent / "planner"
    shutil.copytree(maker().PLANNER, planner, ignore=shutil.ignore_patterns("*.py"))
    monkeypatch.setattr(maker(), "PLANNER", planner)
    assert maker().stale(copied) == ""
    rates = planner / "devices" / "nvidia-h100.json"
    rates.write_text(rates.read_text().replace("0.105203129", "0.2"))
    assert "other rates" in maker().stale(copied)


def test_what_no_page_reads_does_not(copied: Path) -> None:
    (copied.parent.parent / "benchmarks" / "results" / "fp8-h100.json").unlink()
    assert maker().stale(copied) == ""


@pytest.mark.parametrize(
    "text", [f"in {ROOT}/docs", "at /home/ann/x.py", "/tmp/tuned-1/a", "<f at 0x7f33a8c0d1f0>"]
)
def test_paths_and_addresses_in_outputs_are_found(text: str) -> None:
    nbformat = maker().nbformat
    stream = nbformat.v4.new_output("stream", text=text)
    shown = nbformat.v4.new_output("display_data", data={"text/html": f"<p>{text}</p>"})
    for output in (stream, shown):
        cell = nbformat.v4.new_code_cell("f()", outputs=[output])
        assert list(maker().machine_texts(cell))
    fine = nbformat.v4.new_output("stream", text="bits 0x3f80, 100 us, docs/planner.md")
    assert not list(maker().machine_texts(nbformat.v4.new_code_cell("f()", outputs=[fine])))


def test_plot_of_the_readme_is_not_stale() -> None:
    made = SPEED.points(list(SPEED.times(SPEED.RESULTS, SPEED.GPU)))
    drawn = SPEED.PLOT.read_text(encoding="utf-8")
    assert SPEED.digest(made) in drawn, "docs/speed-h100.svg is stale: run make notebooks"
    assert f"({SPEED.PLOT.relative_to(ROOT).as_posix()})" in (ROOT / "README.md").read_text()
    assert {each.group for each in made} == set(SPEED.GROUPS)
    assert any(each.speedup < 1 for each in made), "the records have losses"


def _record(path: Path, date: str, times: dict[str, float], gpu: str) -> None:
    """Write times by workload and variant; those below 0 are of wrong numbers."""
    rows = []
    for name, time in times.items():
        workload, variant = name.split()
        job = {"l2": "cold", "protocol": "graph", "variant": variant}
        timing = {"microseconds": abs(time), "status": "ok" if time > 0 else "wrong"}
        rows.append({"workload": workload, "M": 16, "job": job, "timing": timing})
    environment = {"gpu": {"name": gpu}, "date": date}
    path.write_text(json.dumps({"environment": environment, "comparisons": [], "rows": rows}))


def test_points_are_the_newest_default_over_the_fastest_right_baseline(tmp_path: Path) -> None:
    new = {"S1 ours": 10.0, "S1 ours-l2": 2.0, "S1 eager": 20.0}
    others = {"R5 ours": 3.0, "R5 eager": 6.0, "R5 compile": -1.0}  # of wrong numbers
    places = {"G1 ours-l2": 5.0, "G1 ours-dsm": 4.0, "G1 eager": 8.0}
    _record(tmp_path / "a.json", "2026-01-02", new | others | places, "X")
    _record(tmp_path / "b.json", "2026-01-01", {"S1 ours": 1.0, "S1 compile": 9.0}, "X")
    _record(tmp_path / "c.json", "2026-01-03", {"S1 ours": 5.0}, "Y")
    made = {each.workload[:2]: each for each in SPEED.points(list(SPEED.times(tmp_path, "X")))}
    found = {name: (each.group, each.baseline, each.speedup) for name, each in made.items()}
    assert found == {
        "S1": ("gated FFNs", "compile", 0.9),
        "R5": (SPEED.REST, "eager", 2.0),
        "G1": ("chains of two products", "eager", 2.0),
    }


def test_times_of_models_are_read_from_their_table(tmp_path: Path) -> None:
    (tmp_path / "models-x.txt").write_text(
        "# X, 1980 MHz\n"
        "model part tokens ours eager compile mlp eager mlp% eager/ours\n"
        "bert layer 16 1.0 2.0 3.0 9.0 43% 2.0\n"
        "bert whole 16 4.0 6.0 5.0 - - 1.5\n"
        "bert whole 16 ours: least 4.0\n"
    )
    (point,) = SPEED.points(list(SPEED.times(tmp_path, "X")))
    assert (point.group, point.baseline, point.speedup) == ("whole models", "compile", 1.25)
