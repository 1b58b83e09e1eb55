"""Tutorials: every page runs as printed, its wrong edits end in the texts that it promises.

What a page prints is what its notebook shows, but for numbers, which differ by machine in their
last digits.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crossfuse.hardware import find_gpus

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
PAGES = sorted(FOLDER.glob("[0-9]*.py"))
#: Those that take longest; the primitives and the emulator are tried by day.
LATER = ("04_when_dsm_loses", "07_tuning", "08_cascades", "09_models", "11_extending")

#: What pages need beyond the extra ``bench``; without it they run in part.
NEEDS = {"09_models": ("torch", "onnx")}
#: Runs one page after the other, by number: to import what they need takes most of the time.
RUN = """
import contextlib, io, json, runpy, sys, traceback
for line in sys.stdin:
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_path(line.strip(), run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


def _page(path: Path) -> object:
    marks = [pytest.mark.nightly] if path.stem in LATER else []
    return pytest.param(path, id=path.stem, marks=marks)


def _refusals(path: Path) -> list[str]:
    """Texts of ``with refused(text):`` in the order of the page."""
    calls = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)]
    found = [each for each in calls if getattr(each.func, "id", "") == "refused"]
    return [str(ast.literal_eval(each.args[0])) for each in sorted(found, key=lambda e: e.lineno)]


def _printed(path: Path) -> str:
    """What the notebook of a page shows as text."""
    cells = json.loads(path.with_suffix(".ipynb").read_text())["cells"]
    outputs = [each for cell in cells for each in cell.get("outputs", ())]
    return "".join("".join(each["text"]) for each in outputs if each.get("name") == "stdout")


def _without_numbers(text: str) -> list[str]:
    """Words; lines are broken by what is in them."""
    return _NUMBER.sub("#", text).split()


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Path], tuple[str, str]]]:
    """What a page prints, and the traceback of what it ended in."""
    folders = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(folders)}
    command, pipe = [sys.executable, "-c", RUN], subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def page(path: Path) -> tuple[str, str]:
            print(path, file=stdin, flush=True)
            printed, error = json.loads(stdout.readline())
            return printed, error

        yield page
        stdin.close()


@pytest.mark.parametrize("path", [_page(each) for each in PAGES])
def test_page_runs_and_prints_its_refusals(
    path: Path, run: Callable[[Path], tuple[str, str]]
) -> None:
    for each in NEEDS.get(path.stem, ()):
        pytest.importorskip(each, reason=f"the extra '{each}' is not installed")
    text, error = run(path)
    assert not error, error
    printed = " ".join(text.split())
    at = 0
    for refusal in _refusals(path):
        at = printed.find(refusal, at)
        assert at >= 0, f"not printed, or not in this order: {refusal}"
    # Releases of torch name operators as they like, and notebooks are made without a GPU.
    if path.stem not in NEEDS and not find_gpus():
        shown = _without_numbers(_printed(path))
        assert _without_numbers(text) == shown, "the notebook is stale: run make notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda each: each.stem)
def test_page_has_its_parts(path: Path) -> None:
    text = path.read_text()
    number = int(path.stem.split("_")[0])
    assert text.startswith(f"# %% [markdown]\n# # {number}. ")
    assert re.search(r"^# ## Exercises$", text, re.M) and re.search(r"^# ## Next$", text, re.M)
    exercises = text.split("# ## Exercises")[1]
    assert "with refused(" in exercises and "with refused(" in text.split("# ## Exercises")[0]
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    assert linked and all((FOLDER / each).is_file() for each in linked), linked
    assert f"({path.stem}.ipynb)" in (FOLDER / "README.md").read_text()
    # A first line of each cell of text is markdown, or jupytext shows it as code.
    assert all(each.startswith("\n# ") for each in text.split("# %% [markdown]")[1:])
