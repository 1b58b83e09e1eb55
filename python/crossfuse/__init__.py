"""Operator fusion across the streaming multiprocessors of a Hopper GPU, on Apache TVM 0.27.

Public names are loaded when first used: importing the package checks the installed versions and
loads neither TVM nor torch, which find it by `crossfuse._discovery` when they are there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from crossfuse._compat import check_versions
from crossfuse._discovery import collecting_later, offer

__version__ = "0.1.0"

_HOME = {
    "CheckFailed": "errors",
    "Compiled": "compiler",
    "Plan": "planner.plan",
    "Refusal": "errors",
    "RefusedError": "errors",
    "Tiles": "schedule.rules.threads",
    "WorkloadSpec": "workload",
    "check": "compiler",
    "compile": "compiler",
    "compile_bins": "compiler",
    "compile_model": "compiler",
    "device": "hardware",
    "emulate_cuda": "emulate",
    "load": "runtime",
    "load_dispatch": "runtime",
    "load_kernels": "runtime",
    "load_model": "runtime",
    "plan": "planner.plan",
    "run_sequential": "emulate",
}

# A package that is called like a function, see its `__call__`.
_CALLED = "schedule"


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's ``__getattr__``, ``__dir__`` and ``__all__``, for modules that load on first use.

    `package` is the package's ``__name__``; `homes` gives for each public name the module below the
    package that defines it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collecting_later():  # modules stay, TVM's among them
            value = getattr(import_module(f"{package}.{homes[name]}"), name)
        # Found directly the next time; a module of the same name would stand there else.
        setattr(sys.modules[package], name, value)
        return value

    names = sorted(homes)
    return load, lambda: names, names


_load, _, _names = lazy_names(__name__, _HOME)
__all__ = sorted([*_names, _CALLED])

check_versions()
offer()


def __getattr__(name: str) -> Any:
    if name == _CALLED:
        return import_module(f"{__name__}.{_CALLED}")
    if name == "relay":
        from crossfuse.importers import GONE

        raise AttributeError(GONE)
    return _load(name)


def __dir__() -> list[str]:
    return __all__
