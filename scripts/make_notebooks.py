"""Executes the tutorials and writes them as notebooks, with their outputs and plots.

    python scripts/make_notebooks.py             # all of them; `make notebooks`
    python scripts/make_notebooks.py 4 6         # these pages
    python scripts/make_notebooks.py --check     # which notebooks are stale? Executes nothing

`tutorials/NN_name.py` is the source of `NN_name.ipynb`. Notebooks are executed without a GPU, also
where there is one, so that every machine makes the same; what was measured comes from
``benchmarks/results``. A notebook is stale if its cells are not those of the source, or if data
that the page reads have changed since it was executed: ``support.py``, ``matplotlibrc``, records,
the planner's rates and trees. Other changes of the package show when pages print something else:
``tests/cpu/test_tutorials.py`` looks at that, which runs them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

ROOT = Path(__file__).resolve().parent.parent
#: Its numbers are in the estimates that pages print: rates of devices, and trees, of one GPU.
PLANNER = ROOT / "python" / "crossfuse" / "planner"
#: Seconds that a cell may take.
TIMEOUT = 600
#: Kernels see these: no GPU, and lines as wide everywhere.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "NO_COLOR": "1"}
#: Links to other pages lead from notebook to notebook.
_LINK = re.compile(r"\]\((\d\d_\w+)\.py\)")
_RECORD = re.compile(r"[\w-]+\.(?:jsonl?|txt)")
#: Paths of users and of temporary files, and addresses of objects.
_OF_MACHINE = re.compile(r"(?:/tmp|/home|/root|/Users|/var/folders)/\S*|\b0x[0-9a-f]{8,}\b")


def pages() -> list[Path]:
    """Sources of the tutorials, in order."""
    return sorted((ROOT / "tutorials").glob("[0-9]*.py"))


def cells_of(page: Path) -> Any:
    """The notebook of a page, not executed, with the same ids of cells each time."""
    notebook = jupytext.read(page)
    for at, cell in enumerate(notebook.cells):
        cell.id = f"cell-{at}"
        cell.metadata = {}
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(r"](\1.ipynb)", cell.source)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "crossfuse": {"inputs": inputs_of(page)},
    }
    return notebook


def inputs_of(page: Path) -> str:
    """Hash of what a page reads: what pages share, the records it names, the planner's data."""
    named = sorted(set(_RECORD.findall(page.read_text(encoding="utf-8"))))
    results = page.parent.parent / "benchmarks" / "results"
    digest = hashlib.sha256()
    shared = [page.parent / each for each in ("support.py", "matplotlibrc")]
    learned = sorted(e for e in PLANNER.rglob("*.json") if e.parent.name != "ranks")
    for path in (*shared, *(results / each for each in named), *learned):
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def stale(page: Path) -> str:
    """Why the notebook of a page has to be made again; empty if it need not be."""
    path = page.with_suffix(".ipynb")
    if not path.is_file():
        return "is missing"
    held, due = nbformat.read(path, as_version=4), cells_of(page)
    if _sources(held) != _sources(due):
        return f"does not have the cells of {page.name}"
    if held.metadata.get("crossfuse") != due.metadata["crossfuse"]:
        return "was executed with another support.py, other records or other rates"
    return ""


def _sources(notebook: Any) -> list[tuple[str, str]]:
    return [(each.cell_type, each.source) for each in notebook.cells]


def execute(page: Path) -> Any:
    """The notebook of a page with its outputs.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell fails.
    ValueError
        If an output has something of this machine in it.
    """
    from nbclient import NotebookClient

    notebook = cells_of(page)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(page.parent)}},
    )
    client.execute(env={**os.environ, **ENVIRONMENT})
    notebook.metadata = cells_of(page).metadata  # the client adds the version of Python
    for cell in notebook.cells:
        for text in machine_texts(cell):
            raise ValueError(f"{page.name}: found {text!r} in the output of:\n{cell.source}")
    return notebook


def machine_texts(cell: Any) -> Iterator[str]:
    """What is in the outputs of a cell that would differ by machine or run: paths, addresses."""
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        for text in (output.get("text", ""), *(data[key] for key in data if "text/" in key)):
            yield from (each for each in (str(ROOT), tempfile.gettempdir()) if each in text)
            yield from _OF_MACHINE.findall(text)


def main() -> int:
    """Make the notebooks, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", type=int, help="pages to make, all by default")
    parser.add_argument("--check", action="store_true", help="say which are stale, make none")
    chosen = parser.parse_args()
    wanted = [
        each for each in pages() if not chosen.numbers or int(each.name[:2]) in chosen.numbers
    ]
    if chosen.check:
        reasons = {each: stale(each) for each in wanted}
        for page, reason in reasons.items():
            if reason:
                print(f"{page.stem}.ipynb {reason}: run make notebooks")
        return int(any(reasons.values()))
    for page in wanted:
        nbformat.write(execute(page), page.with_suffix(".ipynb"))
        size = page.with_suffix(".ipynb").stat().st_size
        print(f"{page.stem}.ipynb, {size / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
