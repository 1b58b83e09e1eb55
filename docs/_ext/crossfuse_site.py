"""The Sphinx extension: writes generated pages before sources are read, and mends links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from links import page_of, rewrite_links, write_copies, write_if_new
from source_links import mend_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"


def write_pages() -> None:
    """Write every page that sources and records decide."""
    from api_pages import write_api
    from bench_page import write_bench_page
    from cli_page import write_cli_page
    from refusals import find_entries, write_page
    from refusals.find import module_summaries

    package = ROOT / "python" / "crossfuse"
    write_copies(ROOT, DOCS)
    summaries = module_summaries(package)
    write_api(GENERATED / "api", summaries)
    write_if_new(GENERATED / "cli.md", write_cli_page())
    write_if_new(GENERATED / "tutorials.md", _tutorials())
    errors = write_page(find_entries(package), summaries)
    write_if_new(GENERATED / "errors.md", errors)
    write_if_new(GENERATED / "benchmarks.md", write_bench_page(ROOT / "benchmarks" / "results"))


def _tutorials() -> str:
    """The list of tutorials: every numbered file of ``tutorials/``, in order."""
    names = sorted(each.stem for each in (ROOT / "tutorials").glob("[0-9]*.py"))
    text = (
        "Each page is a file of `tutorials/` that was run without a GPU when this site was built. "
        "Open it there as a notebook in Jupyter (`.ipynb`), or run it with Python (`.py`)."
    )
    lines = ["# Tutorials", "", text, ""]
    tree = ["```{toctree}", ":maxdepth: 1", ""]
    tree += [f"../tutorials/{each}" for each in names] + ["```", ""]
    return "\n".join([*lines, *(tree if names else [])])


def _before_reading(app: Any) -> None:
    write_pages()


def _read(app: Any, docname: str, source: list[str]) -> None:
    """Links of a page as they lead here; `source` holds its text."""
    path = Path(app.env.doc2path(docname)).resolve()
    if GENERATED in path.parents or DOCS / "tutorials" in path.parents:
        return  # written with the links changed
    here = path.relative_to(ROOT).as_posix()
    source[0] = rewrite_links(source[0], here, page_of(here) or here, ROOT)


def setup(app: Any) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("builder-inited", _before_reading)
    app.connect("source-read", _read)
    app.connect("html-page-context", mend_page)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
