"""How TVM and torch find us where the package is on the path without being installed.

An installed package has entry points, which both read. Without them ``import crossfuse`` does what
entry points do: at once where TVM or torch's dynamo is there already, else when it has been loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def offer() -> None:
    """Let TVM find primitives and pipelines, and ``torch.compile`` the backend; idempotent."""
    _after("tvm", _to_tvm)
    _after("torch._dynamo.backends.registry", _to_dynamo)


def _to_tvm() -> None:
    from crossfuse._autoload import register
    from crossfuse.relax.registration import register as register_pipeline

    register()
    register_pipeline()


def _to_dynamo() -> None:
    from importlib.metadata import EntryPoint

    # What dynamo makes of an entry point; it is loaded when the backend is asked for.
    backends: dict[str, Any] = sys.modules["torch._dynamo.backends.registry"]._BACKENDS
    name = "crossfuse"
    point = EntryPoint(name, "crossfuse.torch.backend:crossfuse", "torch_dynamo_backends")
    backends.setdefault(name, point)


def _after(name: str, run: Callable[[], None]) -> None:
    """Call a function as soon as a module is loaded."""
    module = sys.modules.get(name)
    if module is None:
        if not any(isinstance(each, _Waiting) and each.name == name for each in sys.meta_path):
            sys.meta_path.insert(0, _Waiting(name, run))
    elif not getattr(module.__spec__, "_initializing", False):
        run()
    # TVM that is being imported has come here by its entry point, and goes on to register us.


class _Waiting(MetaPathFinder):
    """Finder that wraps one module's loader, so that a function is called once it is loaded."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name, self._run = name, run

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The spec that other finders give, with a loader that calls the function afterwards."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec, spec.loader, self._run)
        return spec


class _Calling(Loader):
    """Loader that delegates to a module's own loader and then calls a function."""

    def __init__(self, spec: ModuleSpec, loader: Loader, run: Callable[[], None]) -> None:
        self._spec, self._loader, self._run = spec, loader, run

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that the wrapped loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module under its own loader, put back because resources look it up."""
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._run()
