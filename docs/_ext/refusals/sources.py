"""The modules of the package as syntax trees, with what their names stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from syntax_trees import trees

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """A parsed module: its constants, imports, constants of classes, and calls by name."""

    name: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    attributes: dict[str, list[ast.expr]] = field(default_factory=dict)
    calls: dict[str, list[tuple[ast.Call, Function | None]]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first sentence of its docstring, in one line."""
        text = ast.get_docstring(self.tree) or ""
        return " ".join(text.split("\n\n")[0].split())


@dataclass(frozen=True)
class Sources:
    """All modules below a package's folder."""

    modules: dict[str, Module]

    def home(self, module: Module, name: str) -> tuple[str, str]:
        """Where a name is defined: module and name there, behind all re-exports."""
        seen = set()
        here = module
        while name in here.imports and (here.name, name) not in seen:
            seen.add((here.name, name))
            source, original = here.imports[name]
            if source not in self.modules:
                return source, original
            here, name = self.modules[source], original
        return here.name, name

    def constant(self, module: Module, name: str) -> tuple[ast.expr, Module] | None:
        """The expression of a module's constant, and the module it is written in."""
        home, original = self.home(module, name)
        if home not in self.modules or original not in self.modules[home].constants:
            return None
        return self.modules[home].constants[original], self.modules[home]


def read_sources(root: Path) -> Sources:
    """Parse every module of the package in a folder.

    Parameters
    ----------
    root : Path
        Folder of the package, such as ``python/crossfuse``.
    """
    modules = {}
    for path, tree in trees(root):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = _read_module(name, _with_functions(tree))
    return Sources(modules)


def _with_functions(tree: ast.Module) -> ast.Module:
    """A module with a function for each `Rule`, which refuses as the object does when called."""
    body: list[ast.stmt] = []
    for each in tree.body:
        value = each.value if isinstance(each, ast.Assign) else None
        if isinstance(value, ast.Call) and _last_name(value.func) == "Rule":
            assert isinstance(each, ast.Assign)
            body.append(_function_of(_last_name(each.targets[0]), value, each))
        elif not isinstance(each, ast.ClassDef) or each.name != "Rule":
            body.append(each)
            if isinstance(each, ast.ImportFrom) and any(name.name == "Rule" for name in each.names):
                each.names.append(ast.alias("refuse"))
    return ast.Module(body, tree.type_ignores)


def _function_of(name: str, rule: ast.Call, at: ast.stmt) -> ast.FunctionDef:
    instead = next((ast.unparse(each.value) for each in rule.keywords), '""')
    fixed = ", ".join(map(ast.unparse, rule.args))
    text = f"def {name}(where, found, limit, instead={instead}):\n"
    text += f" return refuse({fixed}, where, found=found, limit=limit, instead=instead)"
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.FunctionDef)
    for node in ast.walk(made):
        ast.copy_location(node, at)
    return made


def _read_module(name: str, tree: ast.Module) -> Module:
    module = Module(name, tree)
    for statement in tree.body:
        module.constants.update(_assignments(statement))
    _read_below(tree, None, module)
    return module


def _read_below(node: ast.AST, function: Function | None, module: Module) -> None:
    """Take imports, constants of classes, and calls with the innermost function around each."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            module.calls.setdefault(_last_name(child.func), []).append((child, function))
        elif isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                module.imports[alias.asname or alias.name] = (child.module, alias.name)
        elif isinstance(child, ast.ClassDef):
            for statement in child.body:
                for target, value in _assignments(statement):
                    module.attributes.setdefault(target, []).append(value)
        _read_below(child, child if isinstance(child, Function) else function, module)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Plain names that a statement gives a value, alone or several at once."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _pairs(target, statement.value)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield from _pairs(statement.target, statement.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, each in zip(target.elts, value.elts, strict=False):
            yield from _pairs(name, each)


def local_values(function: Function, name: ast.Name) -> list[ast.expr]:
    """What a name of a function may hold at a line: the last value given to it before.

    Where branches of one condition give values, those of all branches.
    """
    given = [each for each in _given(function) if each[1].lineno <= name.lineno]
    values = [value for target, value in given if target == name.id]
    if not values:
        return []
    last = max(values, key=lambda each: each.lineno)
    for node in _conditions(function):
        if (node.end_lineno or 0) < name.lineno and node.lineno <= last.lineno <= node.end_lineno:
            return [each for each in values if node.lineno <= each.lineno]
    return [last]


@cache
def _given(function: Function) -> list[tuple[str, ast.expr]]:
    return [
        pair
        for node in ast.walk(function)
        if isinstance(node, ast.stmt)
        for pair in _assignments(node)
    ]


@cache
def _conditions(function: Function) -> list[ast.If]:
    return [node for node in ast.walk(function) if isinstance(node, ast.If)]


def parameters(function: Function) -> list[str]:
    """Names of a function's parameters, in order, without that of the instance."""
    held = function.args
    names = [each.arg for each in (*held.posonlyargs, *held.args)]
    if names and names[0] in {"self", "cls"}:
        names = names[1:]
    return names + [each.arg for each in held.kwonlyargs]
