"""Imports TVM's tensor intrinsics in seconds."""

from __future__ import annotations

import importlib
import inspect
import sys
from threading import Lock
from typing import Any

_NAME = "tvm.s_tir.tensor_intrin"
_lock = Lock()


def import_intrinsics() -> None:
    """Import what every ``TuneContext`` imports, before it does.

    TVM parses hundreds of functions there, and asks for the call stack at each. Python's `inspect`
    then looks for the module of each frame through all that are loaded; beside torch, which has
    thousands, the import takes minutes instead of seconds. Nobody uses the answer, so that here the
    module is looked up by its name alone.
    """
    with _lock:
        if _NAME in sys.modules:
            return
        usual = inspect.getmodule
        inspect.getmodule = _module_by_name  # type: ignore[assignment]
        try:
            importlib.import_module(_NAME)
        finally:
            inspect.getmodule = usual


def _module_by_name(value: Any, _filename: str | None = None) -> Any:
    return sys.modules.get(getattr(value, "__module__", None) or "")
