"""Modules that cascades were fused in before, from the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import tvm
from tvm.ir import GenericConst, GlobalVar

from crossfuse import _tvm as ir
from crossfuse.cache import shelf
from crossfuse.cache.answers import answered
from crossfuse.cache.keys import content_key
from crossfuse.hardware import Device
from crossfuse.schema import Damaged, read, shown, typed

#: Bytes of constants in a module that is looked up. Weights belong to the parameters: in the module
#: they would be hashed, and kept, with each of its versions.
_MOST = 16 * 2**20


def once(
    mod: Any,
    target: Device,
    options: Sequence[Any],
    row: type,
    make: Callable[[], tuple[Any, Sequence[Any]]],
) -> tuple[Any, tuple[Any, ...]]:
    """What a pass makes of a module, from the cache if it was asked for before.

    Parameters
    ----------
    mod : tvm.IRModule
        The module. One with many constants, or with libraries, is not looked up.
    target : Device
        What it is for.
    options : Sequence[Any]
        Options of the pass, told apart by their ``repr``.
    row : type
        The dataclass of a line of the report.
    make : Callable
        Runs the pass: the module, `mod` itself where nothing changed, and the report.

    Returns
    -------
    tuple[tvm.IRModule, tuple]
        What `make` gives.
    """
    if mod.attrs or _constant_bytes(mod) > _MOST:
        made, rows = make()
        return made, tuple(rows)

    def answer() -> str:
        made, rows = make()
        changes = replace(_changes(mod, made), rows=tuple(map(asdict, rows)))
        return json.dumps(asdict(changes))

    key = content_key(target, "cascades", *map(repr, options), tvm.ir.save_json(mod))
    names = ", ".join(str(each.name_hint) for each in mod.get_global_vars())
    label = f"{names[:80]} for {target.name}"
    return answered(shelf("cascades"), key, label, answer, partial(_read, mod, row))


@dataclass(frozen=True)
class _Changes:
    """What became of a module: functions that are new or others, and the names of those gone."""

    new: str
    gone: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...] = ()


def _read(mod: Any, row: type, text: str) -> tuple[Any, tuple[Any, ...]]:
    found = read(_Changes, text)
    return _changed(mod, found), tuple(typed(row, each) for each in found.rows)


def _changes(mod: Any, made: Any) -> _Changes:
    before, after = dict(mod.functions_items()), dict(made.functions_items())
    new = {
        name: func
        for name, func in after.items()
        if name not in before or not before[name].same_as(func)
    }
    gone = tuple(str(name.name_hint) for name in before if name not in after)
    return _Changes(tvm.ir.save_json(tvm.IRModule(new)) if new else "", gone)


def _changed(mod: Any, changes: _Changes) -> Any:
    """A module with `_changes`; what did not change, and global variables, are its own."""
    if not changes.new:
        return mod
    names = {str(each.name_hint): each for each in mod.get_global_vars()}

    def name_of(variable: Any) -> Any:
        return names.setdefault(str(variable.name_hint), variable)

    made = mod.clone()
    for variable, func in ir.load_json(changes.new, tvm.IRModule).functions_items():
        renamed = ir.mutate(func, (GlobalVar, lambda each, _: name_of(each)))
        made.update_func(name_of(variable), renamed)
    for name in changes.gone:
        if name not in names:
            raise Damaged(f"gone: {shown(name)}", "functions of the module")
        del made[names[name]]
    return made


def _constant_bytes(mod: Any) -> int:
    found: list[Any] = []
    for func in mod.functions.values():
        ir.walk(func, (GenericConst, found.append))
    return sum(each.value.numpy().nbytes for each in found)
