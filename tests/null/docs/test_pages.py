"""The generators of the site work without Sphinx, and say what the sources say."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from bench_page import read_records, write_bench_page
from cli_page import write_cli_page
from links import page_of, rewrite_links
from source_links import mend_back_links

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def test_links_lead_to_pages() -> None:
    text = "[a](docs/planner.md#plans) [b](CHANGELOG.md) [c](https://x.org/docs/a.md) [d](#here)"
    assert rewrite_links(text, "README.md", "generated/readme.md", ROOT) == (
        "[a](../planner.md#plans) [b](changelog.md) [c](https://x.org/docs/a.md) [d](#here)"
    )
    back = rewrite_links("[r](../benchmarks/README.md)", "docs/hopper.md", "hopper.md", ROOT)
    assert back == "[r](generated/recorded.md)"


def test_what_is_no_page_stays() -> None:
    assert page_of("python/crossfuse/cli/demo.py") is None
    assert page_of("tutorials/support.py") is None
    assert page_of("tutorials/01_first.py") == "tutorials/01_first.py"
    assert page_of("tutorials/01_first.ipynb") == "tutorials/01_first.py"
    assert rewrite_links("x[i](j)", "README.md", "generated/readme.md", ROOT) == "x[i](j)"


def test_sources_link_to_the_path_that_the_reference_has() -> None:
    back = '<a class="viewcode-back" href="x.html#{}">'
    documented = {"crossfuse.Verdict": "api/crossfuse", "crossfuse.errors.refuse": "api/errors"}
    body = "".join(map(back.format, ("crossfuse.Verdict", "crossfuse.refuse", "crossfuse.other")))
    mended = mend_back_links(body, documented, lambda page: f"../{page}.html")
    assert re.findall('href="(.*?)"', mended) == [
        "../api/crossfuse.html#crossfuse.Verdict",
        "../api/errors.html#crossfuse.errors.refuse",
        "x.html#crossfuse.other",
    ]


def test_no_page_is_left_out_of_the_site() -> None:
    """Each Markdown file of docs/ stands in a table of contents."""
    listed = {
        line.split("<")[-1].strip(" >").removesuffix(".md")
        for path in DOCS.glob("*.md")
        for block in re.findall(r"```\{toctree\}(.*?)```", path.read_text("utf-8"), re.DOTALL)
        for line in block.splitlines()
    }
    assert {path.stem for path in DOCS.glob("*.md")} - listed == {"index"}


def test_links_between_pages_lead_to_files() -> None:
    for path in [*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^()\s#]+)", path.read_text("utf-8")):
            if not target.startswith("generated/"):
                assert (path.parent / target).exists(), f"{target} in {path.name}"


def test_every_comparison_and_loss_is_on_the_page() -> None:
    page = write_bench_page(RESULTS)
    for path in sorted(RESULTS.iterdir()):
        assert path.name in page or f"## {path.stem}\n" in page, path.name
    lost = [
        each for record in read_records(RESULTS) for each in record.comparisons if each.speedup < 1
    ]
    assert lost, "the records have losses, so that an empty list is a mistake"
    losses = page.split("## Where ours is slower")[1].split("\n## ")[0]
    assert losses.count("| **") == len(lost)


def test_a_loss_is_shown_as_one(tmp_path: Path) -> None:
    place = {"workload": "S1", "M": 16, "l2": "cold", "protocol": "graph"}
    times = {"ours": 4.0, "best": 3.0, "baseline": "eager", "variant": "ours", "speedup": 0.75}
    record = {"environment": {}, "comparisons": [place | times], "rows": []}
    (tmp_path / "mine.json").write_text(json.dumps(record))
    assert "| S1 | 16 | 4.0 | 3.0 | eager | **0.75** | `mine.json` |" in write_bench_page(tmp_path)


def test_every_command_is_on_the_page() -> None:
    from crossfuse.cli import app

    page = write_cli_page()
    for command in app.registered_commands:
        assert f"## `crossfuse {command.name}`" in page
    assert "`--json`" in page


def test_every_environment_variable_is_documented() -> None:
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    read = set()
    for path in (ROOT / "python").rglob("*"):
        if path.suffix in {".h", ".cpp"} and "emulate" not in path.parts:
            read |= set(re.findall(r'getenv\("(\w+)"', path.read_text(encoding="utf-8")))
        if path.suffix == ".py":
            read |= set(re.findall(r'= "(CROSSFUSE_\w+)"', path.read_text(encoding="utf-8")))
    assert {"CROSSFUSE_COOPERATIVE", "CROSSFUSE_DUMP"} <= read
    assert [each for each in sorted(read) if f"`{each}`" not in page] == []


def test_the_configuration_names_extensions_that_are_installed_with_the_extra() -> None:
    """`make docs` installs the extra; conf.py may ask for nothing else."""
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    extensions = set(ast.literal_eval(values["extensions"]))
    assert {each for each in extensions if not each.startswith("sphinx.")} == {
        "crossfuse_site",
        "myst_nb",
    }
    extra = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\ndocs = [")[1]
    for package in ("furo", "myst-nb", "jupytext", "sphinx"):
        assert f'"{package}' in extra.split("]\n")[0]
