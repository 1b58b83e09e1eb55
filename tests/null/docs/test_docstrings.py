"""Sections of docstrings name what the code has: parameters, fields, and that it refuses.

Read from the sources, so that nothing is imported. That public functions have the sections at all
is asked in tests/cpu/docs/test_examples.py.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TypeAlias

from syntax_trees import trees

PACKAGE = Path(__file__).parents[3] / "python" / "crossfuse"
Function: TypeAlias = ast.FunctionDef
_HEADING = re.compile(r"^(\w[\w ]*)\n-+$", re.M)


def sections(node: Function | ast.ClassDef) -> dict[str, str]:
    """Texts of a numpydoc docstring by their headings."""
    parts = _HEADING.split(ast.get_docstring(node) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(section: str) -> set[str]:
    """What the entries of a section are for: names before the colon, several by commas."""
    heads = (line.split(" : ")[0] for line in section.splitlines() if line[:1].strip())
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def parameters(node: Function) -> set[str]:
    """Names of a function's parameters; those of its own business begin with an underscore."""
    every = node.args
    plain = [*every.posonlyargs, *every.args, *every.kwonlyargs]
    names = {each.arg for each in (*plain, every.vararg, every.kwarg) if each is not None}
    return {each for each in names - {"self", "cls"} if not each.startswith("_")}


def fields(node: ast.ClassDef) -> set[str]:
    """Names of the public fields of a dataclass that must be given."""
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and each.value is None
        and not each.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(each.annotation)
    }


def refuses(node: ast.AST) -> bool:
    """Whether a body raises anything itself; functions inside of it have bodies of their own."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if (isinstance(each, ast.Raise) and each.exc is not None) or refuses(each):
            return True
    return False


@cache
def definitions() -> dict[str, tuple[Function | ast.ClassDef, dict[str, str]]]:
    """Functions, classes and methods of all modules, with their sections if they have any."""
    found = {}
    for path, tree in trees(PACKAGE):
        where = path.relative_to(PACKAGE).as_posix()
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[f"{where}: {node.name}"] = node
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.FunctionDef):
                    found[f"{where}: {node.name}.{each.name}"] = each
    told = {name: (node, sections(node)) for name, node in found.items()}
    return {name: each for name, each in told.items() if each[1]}


def made_by(node: Function | ast.ClassDef) -> Function | None:
    """The function that takes the parameters: of a class its constructor, if it has its own."""
    if isinstance(node, ast.FunctionDef):
        return node
    own = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return next((each for each in own if each.name == "__init__"), None)


def test_sections_name_every_parameter_and_no_other() -> None:
    wrong = {
        name: sorted(described(said["Parameters"]) ^ parameters(code))
        for name, (node, said) in definitions().items()
        if "Parameters" in said and (code := made_by(node)) is not None
    }
    assert {name: each for name, each in wrong.items() if each} == {}


def test_functions_that_refuse_say_so() -> None:
    """Of those with sections; what has a line of text alone has no list of errors either."""
    lacking = [
        name
        for name, (node, said) in definitions().items()
        if isinstance(node, ast.FunctionDef)
        and said.keys() & {"Parameters", "Returns", "Yields"}
        and "Raises" not in said
        and refuses(node)
    ]
    assert lacking == []


def test_sections_name_every_field_that_must_be_given() -> None:
    lacking = {
        name: sorted(fields(node) - described(said["Attributes"]))
        for name, (node, said) in definitions().items()
        if isinstance(node, ast.ClassDef) and "Attributes" in said and _is_dataclass(node)
    }
    assert {name: each for name, each in lacking.items() if each} == {}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)
