"""Expressions as the text that a user sees, with placeholders for what depends on the case."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from refusals.sources import Function, Module, Sources, local_values

# Attributes that only say how an object is shown.
_SILENT = frozenset({"name", "name_hint", "text", "value", "loop_var", "var", "tag", "where"})
# Functions that only show their last argument.
_SHOWING = frozenset({"list", "sorted", "map", "repr", "name of", "text of", "tuple", "set"})
_DEEP = 12
_LONG = 48


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: module, function, and what parameters are bound to."""

    sources: Sources
    module: Module
    function: Function | None
    bound: dict[str, tuple[ast.expr, Scope]]


def texts(node: ast.expr, scope: Scope, deep: int = 0) -> list[str]:
    """The texts that an expression may have; several where it chooses between some."""
    if deep > _DEEP:
        return [f"<{label(node)}>"]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return texts(node.body, scope, deep + 1) + texts(node.orelse, scope, deep + 1)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        return [found for each in node.values for found in texts(each, scope, deep + 1)]
    if isinstance(node, ast.Name):
        return _of_name(node, scope, deep)
    if isinstance(node, ast.Attribute) and node.attr == "rule":
        return _of_classes(node, scope)
    if isinstance(node, ast.JoinedStr):
        parts = (_of_part(each, scope, deep + 1) for each in node.values)
        return ["".join(parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [text(node.left, scope, deep + 1) + text(node.right, scope, deep + 1)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return texts(node.args[0], scope, deep + 1) if node.args else [""]
    return [f"<{label(node)}>"]


def text(node: ast.expr, scope: Scope, deep: int = 0) -> str:
    """One text; where there are several, one behind the other."""
    found = list(dict.fromkeys(each for each in texts(node, scope, deep)))
    return " | ".join(each for each in found if each) or ""


def classes(node: ast.expr, scope: Scope) -> list[str]:
    """Names of the classes that an expression may stand for."""
    if isinstance(node, ast.IfExp):
        return classes(node.body, scope) + classes(node.orelse, scope)
    if not isinstance(node, ast.Name) or node.id[:1].isupper():
        return [label(node) if not isinstance(node, ast.Name) else node.id]
    if node.id in scope.bound:
        return classes(*scope.bound[node.id])
    values = local_values(scope.function, node) if scope.function is not None else []
    return [each for value in values for each in classes(value, scope)] or ["RefusedError"]


def _of_name(node: ast.Name, scope: Scope, deep: int) -> list[str]:
    if node.id in scope.bound:
        value, around = scope.bound[node.id]
        return texts(value, around, deep + 1)
    if scope.function is not None:
        values = local_values(scope.function, node)
        if values:
            found = [each for value in values for each in texts(value, scope, deep + 3)]
            lists = [each for each in found if each.endswith(", ...>")]
            if all(tells(each) or each in lists[:1] for each in found):
                return found
            return lists[:1] or [f"<{label(node)}>"]
    held = scope.sources.constant(scope.module, node.id)
    if held is not None and isinstance(held[0], ast.Constant | ast.JoinedStr | ast.BinOp):
        return texts(held[0], Scope(scope.sources, held[1], None, {}), deep + 1)
    return [f"<{label(node)}>"]


def _of_classes(node: ast.Attribute, scope: Scope) -> list[str]:
    """What classes of the project have as that attribute."""
    held = (each.attributes.get(node.attr, ()) for each in scope.sources.modules.values())
    values = [value.value for each in held for value in each if isinstance(value, ast.Constant)]
    return list(map(str, values)) or [f"<{label(node)}>"]


def tells(found: str) -> bool:
    """Whether a text is more than a placeholder."""
    return bool(re.sub(r"<[^<>]*>", "", found).strip())


def _of_part(node: ast.expr, scope: Scope, deep: int) -> str:
    if not isinstance(node, ast.FormattedValue):
        return text(node, scope, deep)
    if isinstance(node.value, ast.Name | ast.JoinedStr | ast.IfExp | ast.BoolOp):
        return text(node.value, scope, deep)
    return f"<{label(node.value)}>"


def label(node: ast.expr) -> str:
    """A few words for a value that is known when the program runs."""
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower().replace("_", " ")
    if isinstance(node, ast.Attribute):
        return label(node.value) if node.attr in _SILENT else node.attr.strip("_").replace("_", " ")
    if isinstance(node, ast.Subscript):
        return label(node.value)
    if isinstance(node, ast.Call):
        return _of_call(node)
    if isinstance(node, ast.Starred | ast.Await):
        return label(node.value)
    if isinstance(node, ast.List | ast.Tuple):
        return ", ".join(map(label, node.elts))
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return label(node.generators[0].iter)
    if isinstance(node, ast.Constant):
        return str(node.value)
    spelt = " ".join(ast.unparse(node).split())
    return spelt if len(spelt) <= _LONG else "value"


def _of_call(node: ast.Call) -> str:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else label(node.func)
    if name == "join" and node.args:
        return f"{label(node.args[0])}, ..."
    if name == "len" and node.args:
        return f"number of {label(node.args[0])}"
    if node.args and name in {
        "list",
        "sorted",
        "map",
        "repr",
        "name of",
        "text of",
        "tuple",
        "set",
    }:
        return label(node.args[-1])
    if isinstance(node.func, ast.Attribute) and name.endswith("partition"):
        return label(node.func.value)
    if isinstance(node.func, ast.Attribute) and not node.args:
        return label(node.func.value) if name in {"scope", "strip"} else name.replace("_", " ")
    return name.strip("_").replace("_", " ")
