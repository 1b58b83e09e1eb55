"""Every call of `crossfuse.errors.refuse`, followed through functions that only pass facts on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from refusals.entries import FACTS, Entry
from refusals.native import native_entries
from refusals.render import Scope, classes, tells, text, texts
from refusals.sources import Function, Module, Sources, parameters, read_sources

_HOME = ("crossfuse.errors", "refuse")
_NAMES = ("error", "rule", "where", "found", "limit", "instead")
_DEEP = 4
_PLACEHOLDER = re.compile(r"<[^<>]*>")

Bound = dict[str, tuple[ast.expr, Scope]]


def find_entries(root: Path) -> list[Entry]:
    """All error texts of the package in a folder, those of its C++ sources too.

    Parameters
    ----------
    root : Path
        Folder of the package, such as ``python/crossfuse``.

    Returns
    -------
    list[Entry]
        Without repetitions, in the order of their modules and lines.
    """
    sources = read_sources(root)
    found = [*_python_entries(sources), *native_entries(root / "runtime" / "host")]
    # Callers that pass on what only the running program knows have one text.
    told = {(each.rules, _PLACEHOLDER.sub("<>", each.told)): each for each in reversed(found)}
    return list(reversed(told.values()))


def module_summaries(root: Path) -> dict[str, str]:
    """What each module is for: the first sentence of its docstring."""
    return {name: each.summary for name, each in read_sources(root).modules.items()}


def _python_entries(sources: Sources) -> Iterator[Entry]:
    for module in sources.modules.values():
        if module.name == _HOME[0]:
            continue
        # Of another name where it is imported as such.
        for call, function in (each for calls in module.calls.values() for each in calls):
            if _called(sources, module, call) == _HOME:
                scope = Scope(sources, module, function, {})
                facts = {name: (value, scope) for name, value in _bind(call, list(_NAMES)).items()}
                if "rule" in facts:  # else they come from the C++ sources, read apart
                    yield from _follow(facts, scope, _DEEP)
            elif isinstance(call.func, ast.Name) and call.func.id == "Refusal":
                yield _entry(_constructed(call, Scope(sources, module, function, {})), module.name)


def _constructed(call: ast.Call, scope: Scope) -> Bound:
    """Facts of a `Refusal` that is made without `refuse`."""
    held = _bind(call, list(_NAMES[1:]))
    error = ast.Name(id="VersionRefused")
    return {name: (value, scope) for name, value in {"error": error, **held}.items()}


def _called(sources: Sources, module: Module, call: ast.Call) -> tuple[str, str] | None:
    """The module and name of the function that is called, where both are plain."""
    if isinstance(call.func, ast.Name):
        return sources.home(module, call.func.id)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        package, name = module.imports.get(call.func.value.id, ("", ""))
        return f"{package}.{name}", call.func.attr
    return None


def _bind(call: ast.Call, names: list[str]) -> dict[str, ast.expr]:
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    bound = dict(zip(names, positional, strict=False))
    bound.update({each.arg: each.value for each in call.keywords if each.arg})
    return bound


def _follow(facts: Bound, scope: Scope, deep: int) -> Iterator[Entry]:
    """One entry; or where the function only passes facts on, one for each of its callers."""
    own = _entry(facts, scope.module.name)
    passed = _passed(facts, scope) if deep else set()
    found = list(_of_callers(facts, scope, deep)) if passed else []
    if passed & {"error", "rule", "limit"}:
        yield from found or [own]
        return
    # What callers found is told where they say more of it than a number.
    telling = [each for each in found if tells(each.found)]
    yield from telling
    if len(telling) < len(found) or not found:
        yield own


def _of_callers(facts: Bound, scope: Scope, deep: int) -> Iterator[Entry]:
    """The same facts with what each caller of the function passes to it."""
    function = scope.function
    assert function is not None
    for module, call, around in _callers(scope.sources, scope.module, function):
        there = Scope(scope.sources, module, around, {})
        bound = _defaults(function, scope)
        given = _bind(call, parameters(function))
        bound.update({name: (value, there) for name, value in given.items()})
        known = Scope(scope.sources, scope.module, function, bound)
        taken = {name: _substitute(*fact, scope, known) for name, fact in facts.items()}
        yield from _follow(taken, there, deep - 1)


def _substitute(value: ast.expr, held: Scope, scope: Scope, known: Scope) -> tuple[ast.expr, Scope]:
    """The same fact with the function's parameters bound, or what a parameter stands for."""
    if held is not scope:
        return value, _rebound(held, scope, known)
    if isinstance(value, ast.Name) and value.id in known.bound:
        return known.bound[value.id]
    return value, known


def _rebound(held: Scope, scope: Scope, known: Scope) -> Scope:
    """A scope whose bindings may speak of the function that is now known better."""
    bound = {name: _substitute(*each, scope, known) for name, each in held.bound.items()}
    return Scope(held.sources, held.module, held.function, bound)


def _defaults(function: Function, scope: Scope) -> Bound:
    """What parameters are where a call leaves them out."""
    held = function.args
    plain = [*held.posonlyargs, *held.args]
    pairs = [
        *zip(reversed(plain), reversed(held.defaults), strict=False),
        *zip(held.kwonlyargs, held.kw_defaults, strict=True),
    ]
    return {each.arg: (value, scope) for each, value in pairs if value is not None}


def _passed(facts: Bound, scope: Scope) -> set[str]:
    """Which facts are parameters of the function, so that its callers know them."""
    if scope.function is None:
        return set()
    names = set(parameters(scope.function))
    return {
        fact
        for fact in ("error", "rule", "found", "limit")
        if fact in facts
        and facts[fact][1] is scope
        and isinstance(facts[fact][0], ast.Name)
        and facts[fact][0].id in names
    }


def _callers(
    sources: Sources, home: Module, function: Function
) -> Iterator[tuple[Module, ast.Call, Function | None]]:
    """Calls of a function or method of a module, in all modules."""
    plain = any(each is function for each in home.tree.body)
    this = (home.name, function.name)
    for module in sources.modules.values():
        names = {function.name, *(as_ for as_, it in module.imports.items() if it == this)}
        for call, around in (each for name in names for each in module.calls.get(name, ())):
            target = _called(sources, module, call)
            if isinstance(call.func, ast.Attribute) and not plain:
                # A method: of its own module, or of one that took its class from there.
                same = home.name in {module.name, *(each for each, _ in module.imports.values())}
            else:
                same = plain and target == this
            if same and around is not function:
                yield module, call, around


def _entry(facts: Bound, module: str) -> Entry:
    held = {name: text(*facts[name]) if name in facts else "" for name in FACTS}
    rules = texts(*facts["rule"]) if "rule" in facts else ["<rule>"]
    family = " or ".join(dict.fromkeys(classes(*facts["error"])))
    return Entry(family, tuple(dict.fromkeys(rules)), **held, module=module)
