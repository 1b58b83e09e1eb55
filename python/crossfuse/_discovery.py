"""What happens when TVM and torch are loaded.

Both find us where the package is on the path without being installed. An installed package has
entry points, which both read. Without them ``import crossfuse`` does what entry points do: at once
where TVM or torch's dynamo is there already, else when it has been loaded. And commands load TVM
without torch.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offer() -> None:
    """Let TVM find primitives and pipelines, and ``torch.compile`` the backend; idempotent."""
    _after("tvm", _to_tvm)
    _after("torch._dynamo.backends.registry", _to_dynamo)


def without_torch() -> None:
    """Let TVM load without torch, for programs of which most need no more of torch.

    TVM imports torch where there is one, against a conflict of symbols on Windows, and then takes
    two or three times as long to load. Tensors of a torch that is loaded later reach it all the
    same, by their type's own DLPack functions.
    """
    if not {"torch", "tvm", "tvm_ffi"} & set(sys.modules):
        sys.meta_path[:0] = [_Waiting("tvm", _no_torch), _Waiting("tvm_ffi", _no_torch)]


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Pause garbage collection while much is made that stays: it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
    if "torch" in sys.modules:  # loaded since, or TVM is loading its FFI
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


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
            sys.meta_path.insert(0, _Waiting(name, lambda: _then(run)))
    elif not getattr(module.__spec__, "_initializing", False):
        run()
    # TVM that is being imported has come here by its entry point, and goes on to register us.


@contextlib.contextmanager
def _then(run: Callable[[], None]) -> Iterator[None]:
    yield
    run()


#: What a module is loaded in.
_Around = Callable[[], contextlib.AbstractContextManager[None]]


class _Waiting(MetaPathFinder):
    """Finder that wraps one module's loader, so that the module is loaded in a context.

    It stays until the module is loaded: many ask for a spec only to know whether a package is
    there.
    """

    def __init__(self, name: str, around: _Around) -> None:
        self.name, self._around = name, around

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """The spec of the finders behind this one, with a loader that enters the context."""
        if name != self.name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (each.find_spec(name, path, target) for each in behind)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec, spec.loader, self)
        return spec

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """What the module is loaded in; nobody waits for it any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        with self._around():
            yield


class _Loading(Loader):
    """Loader that delegates to a module's own loader, in a context."""

    def __init__(self, spec: ModuleSpec, loader: Loader, waiting: _Waiting) -> None:
        self._spec, self._loader, self._waiting = spec, loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that the wrapped loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module under its own loader, put back because resources look it up."""
        self._spec.loader = module.__loader__ = self._loader
        with self._waiting.loading():
            self._loader.exec_module(module)
