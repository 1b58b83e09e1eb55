"""The page of error texts is read from the sources, and every rule is on it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from crossfuse.emulate.cuda.run import KINDS
from refusals import Entry, find_entries, write_page
from refusals.entries import TASKS
from syntax_trees import trees

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "crossfuse"
# Of the rule that an error names, where that is written out.
_LITERAL = re.compile(r"\b(?:refuse|Rule)\(\s*(?:[A-Z]\w+,\s*)?\"([a-z][\w.-]+)\",")


@cache
def entries() -> tuple[Entry, ...]:
    return tuple(find_entries(PACKAGE))


@cache
def page() -> str:
    return write_page(entries(), {})


def package(tmp_path: Path, **modules: str) -> list[Entry]:
    """The entries of a package of some modules, beside one like `crossfuse.errors`."""
    root = tmp_path / "crossfuse"
    (root / "runtime" / "host").mkdir(parents=True)
    (root / "errors.py").write_text("def refuse(error, rule, where, *, found, limit, instead): ...")
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    return find_entries(root)


def test_every_rule_of_the_sources_is_on_the_page() -> None:
    shown = page()
    for path in PACKAGE.rglob("*.py"):
        for rule in _LITERAL.findall(path.read_text(encoding="utf-8")):
            assert f"`{rule}`" in shown, f"{rule} of {path.name}"


def test_no_call_is_lost() -> None:
    """What a call allows, where it is written out, is told by an entry."""
    told = {part for each in entries() for part in each.limit.split(" | ")}
    for path, tree in trees(PACKAGE):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "refuse":
                limits = [each.value for each in node.keywords if each.arg == "limit"]
                if limits and isinstance(limits[0], ast.Constant):
                    assert limits[0].value in told, f"{path}:{node.lineno}"


def test_every_entry_has_a_task_and_tells_something() -> None:
    for each in entries():
        assert each.task in TASKS
        assert each.rules
        assert re.sub(r"<[^<>]*>", "", each.told).strip(" :;."), each


def test_the_launcher_is_read_too() -> None:
    found = {rule: each for each in entries() for rule in each.rules}
    assert found["cuda-driver"].family == "EnvironmentRefused"
    assert found["argument-shape"].module == "crossfuse.runtime.host"
    assert found["cluster-fit"].limit and found["launch-index"].limit


def test_objects_of_rules_are_read_where_they_are_called(tmp_path: Path) -> None:
    text = """
from crossfuse.errors import Rule
INSTEAD = "take fewer rows"
refused = Rule(PlanRefused, "rows", instead=INSTEAD)
def check(n):
    if n > 8:
        raise refused("tile", f"{n} rows", "8 rows")
    raise refused("tile", "no rows", "a row", "add one")
"""
    limits = {each.limit: (each.rules, each.instead) for each in package(tmp_path, tiles=text)}
    assert limits == {
        "8 rows": (("rows",), "take fewer rows"),
        "a row": (("rows",), "add one"),
    }


def test_constants_and_choices_are_written_out(tmp_path: Path) -> None:
    text = """
from crossfuse.errors import refuse
RULE = "tiles"
def run(block, wide):
    what = f"{block.name} of {wide}"
    raise refuse(PlanRefused, RULE, what, found="a" if wide else "b", limit="c", instead="d")
"""
    (entry,) = package(tmp_path, mine=text)
    assert entry == Entry(
        "PlanRefused", ("tiles",), "<block> of <wide>", "a | b", "c", "d", "crossfuse.mine"
    )


def test_what_stands_for_nothing_is_written_out(tmp_path: Path) -> None:
    text = """
from crossfuse.errors import refuse
def run(names):
    found = ", ".join(names) or "no name"
    limit = f"one of {', '.join(names) or 'none'}"
    raise refuse(PlanRefused, "tiles", "here", found=found, limit=limit, instead="stop")
"""
    (entry,) = package(tmp_path, mine=text)
    assert entry.found == "<names, ...> | no name"
    assert entry.limit == "one of <names, ...> | none"


def test_functions_that_pass_facts_on_are_followed(tmp_path: Path) -> None:
    helper = """
from crossfuse.errors import refuse
def refused(found, limit, instead="stop"):
    return refuse(PlanRefused, "tiles", "here", found=found, limit=limit, instead=instead)
"""
    caller = """
from crossfuse.helper import refused as no
def run(size):
    limit, unit = "at most 4", "rows"
    raise no(f"{size} rows", limit)
"""
    (entry,) = package(tmp_path, helper=helper, caller=caller)
    assert (entry.found, entry.limit, entry.instead) == ("<size> rows", "at most 4", "stop")
    assert entry.module == "crossfuse.caller"


def test_the_page_shows_the_five_facts() -> None:
    entry = Entry("PlanRefused", ("tiles",), "here", "<n> rows", "4", "`x`", "crossfuse.planner.a")
    shown = write_page([entry], {"crossfuse.planner.a": "Tiles."})
    assert "## Planning" in shown
    assert "### `tiles`" in shown
    assert "`here` (PlanRefused)\n: found `<n> rows`\n: allowed: `4`" in shown
    assert "`` `x` ``" in shown


def test_troubleshooting_explains_every_finding_of_the_emulator() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"| `{kind}` |" not in text] == []


def test_rules_in_troubleshooting_exist() -> None:
    """Rules that headings and texts name are those of the sources."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rules = {rule for each in entries() for rule in each.rules}
    for line in re.findall(r"^Rules? (`.*)$", text, flags=re.MULTILINE):
        for rule in re.findall(r"`([a-z-]+)`", line.split(".")[0].split(":")[0]):
            assert rule in rules, rule
