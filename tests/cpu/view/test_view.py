"""Pages of workloads, plans, candidates, traces and modules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import crossfuse
from crossfuse import _tvm as ir
from crossfuse.cli import app
from crossfuse.errors import RefusedError
from crossfuse.schedule.planned import trace_json
from crossfuse.view.write import linked, schedule_lines, view_page

SPEC = "gated_ffn:M=64,K=128,N=256,L=128"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Lines(HTMLParser):
    """Lines of a page: of the schedule by number, and of CUDA with what made them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.made: dict[str, str] = {}
        self.by: list[tuple[list[str], str]] = []
        self.sections: list[str] = []
        self._at: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self.sections.append(str(given["id"]))
        if tag == "li":
            self._at = given

    def handle_data(self, data: str) -> None:
        if "data-line" in self._at:
            self.made[str(self._at["data-line"])] = data
        elif "data-by" in self._at:
            self.by.append((str(self._at["data-by"]).split(), data))
        self._at = {}


@pytest.fixture(scope="module")
def schedule() -> ir.Schedule:
    return crossfuse.schedule(SPEC, crossfuse.plan(SPEC, only=("registers",)))


def test_a_workload_shows_plan_cluster_time_and_code() -> None:
    text = view_page(SPEC)
    found = Lines(text)
    assert found.sections[:4] == ["plan", "timeline", "cluster", "schedule-and-cuda"]
    outside = {each for each in re.findall(r"https?://[^\s\"'<)]+", text) if "w3.org" not in each}
    assert not {each for each in outside if f'src="{each}' in text or f'href="{each}' in text}


def test_lines_of_cuda_name_the_primitives_that_made_them(schedule: ir.Schedule) -> None:
    found = Lines(view_page(schedule))

    def made_by(primitive: str) -> list[str]:
        numbers = {number for number, text in found.made.items() if primitive in text}
        return [text for makers, text in found.by if numbers & set(makers)]

    assert any("mapa" in each for each in made_by("dsm_reduce"))
    assert any("clusterid" in each for each in made_by("sch.bind"))
    assert any("mbarrier" in each for each in made_by("crossfuse.stages"))
    assert any("A_map" in each for each in made_by("read_buffer_index=0"))


@pytest.mark.slow
def test_candidates_traces_plans_and_modules_are_files(
    schedule: ir.Schedule, tmp_path: Path
) -> None:
    plan = crossfuse.plan(SPEC, only=("registers",))
    trace = json.loads(trace_json(schedule.trace))
    files = {
        "candidate.json": [{"spec": SPEC, "family": "registers", "tiles": dict(plan.tiles)}],
        "trace.json": [{"spec": SPEC, "family": "trace", "trace": trace}],
        "plan.json": json.loads(plan.to_json()),
        "module.json": json.loads(ir.tvm.ir.save_json(schedule.mod)),
    }
    for name, value in files.items():
        path = tmp_path / name
        path.write_text(json.dumps(value))
        found = Lines(view_page(path, workload=SPEC))
        assert "schedule-and-cuda" in found.sections, name
        assert len(found.by) > 50, name


def test_a_plan_without_its_workload_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(crossfuse.plan(SPEC).to_json())
    assert Lines(view_page(path)).sections == ["plan", "timeline", "why-this-plan"]


def test_a_cascade_has_a_page() -> None:
    found = Lines(view_page("softmax:rows=64,cols=1024"))
    assert found.sections[0] == "plan"
    assert found.by


def test_scripts_are_read_and_refused(schedule: ir.Schedule, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("@T.prim_func\ndef broken(:\n")
    with pytest.raises(RefusedError, match=r"view: .*kernel.py: found .*; limit: a plan, a cand"):
        view_page(path)
    with pytest.raises(RefusedError, match=r"no such file.*limit: a plan"):
        view_page(tmp_path / "missing.json")


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eager.json"
    path.write_text(json.dumps([{"spec": SPEC, "family": "eager"}]))
    with pytest.raises(RefusedError, match=r"found a candidate that is not ours, but PyTorch's"):
        view_page(path)


def test_helpers_stand_apart_from_kernels(schedule: ir.Schedule) -> None:
    text = linked(schedule_lines(schedule), 'int helper();\nextern "C" __global__ void k() {}\n')
    assert text.helpers == "int helper();\n"
    assert len(text.lines) == 1


@pytest.mark.slow
def test_the_command_writes_a_page_with_measured_times(tmp_path: Path) -> None:
    page, stamps = tmp_path / "page.html", tmp_path / "stamps.json"
    event = {"name": "begin", "first": 0.0, "median": 0.1, "last": 0.3, "ctas": 8}
    stamps.write_text(json.dumps({"kernels": [{"kernel": "main_kernel", "events": [event]}]}))
    arguments = ["view", SPEC, "-o", str(page), "--measured", str(stamps), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["page"] == str(page)
    assert "measured, main_kernel" in page.read_text()
    stamps.write_text("[]")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "kernels with events" in refused.output


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH")
def test_a_browser_marks_what_belongs_together(schedule: ir.Schedule, tmp_path: Path) -> None:
    text = view_page(schedule)
    found = Lines(text)
    number = next(each for each, line in found.made.items() if "dsm_reduce" in line)
    click = f"document.querySelector('li[data-line=\"{number}\"]').click()"
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{click}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    run = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([*run, path.as_uri()], capture_output=True, text=True, timeout=60)
    marked = re.findall(r'<li data-by="([\d ]*)" class="of"', done.stdout)
    assert marked
    assert all(number in each.split() for each in marked)
