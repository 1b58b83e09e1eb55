"""Whole modules that are compiled ahead: a second process takes the program, and traces nothing.

Of a second start through ``torch.compile`` most is Dynamo's trace and imports of inductor that only
compiling needs. Torch can write the whole program, with its guards; here it is kept in our cache.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from crossfuse._discovery import collecting_later
from crossfuse.cache import Entry, itself, shelf
from crossfuse.calls import checked
from crossfuse.files import scratch
from crossfuse.schema import parse
from crossfuse.torch.backend import Backend
from crossfuse.torch.graph_cache import Untold
from crossfuse.torch.module_key import Identities, module_key, sources, unchanged

_KIND = "ahead"
_LOG = logging.getLogger(__name__)


class _Whole(torch.nn.Module):
    """A module as a part of another, so that Dynamo treats torch's own classes like any others."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **named)


@dataclass(frozen=True)
class Ahead:
    """A module that was compiled ahead.

    Attributes
    ----------
    module : torch.nn.Module
        The module; its parameters are read at each call.
    found : bool
        Whether an earlier process had compiled it.
    reason : str
        Why it is compiled at its first call, as by ``torch.compile``; empty if it was ahead.
    program : Any
        What torch made of it; None with a `reason`.
    backend : Backend
        Options.

    Examples
    --------
    >>> with torch.inference_mode():
    ...     fn = compile_ahead(torch.nn.Linear(8, 4), (torch.zeros(2, 8),))
    ...     [tuple(fn(torch.zeros(rows, 8)).shape) for rows in (2, 3)]  # 3: as by torch.compile
    [(2, 4), (3, 4)]
    """

    module: torch.nn.Module
    found: bool
    reason: str
    program: Any
    backend: Backend

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the module.

        Parameters
        ----------
        *inputs, **named
            What the module takes.

        Returns
        -------
        Any
            What the module returns.
        """
        if self.program is None or not _fits(self.program, self.whole, inputs, named):
            return self.usual(*inputs, **named)
        return self.program(self.whole, *inputs, **named)

    @cached_property
    def whole(self) -> torch.nn.Module:
        """What the program was made of, which has the module as its part."""
        return _Whole(self.module)

    @cached_property
    def usual(self) -> Callable[..., Any]:
        """For calls that the program's guards refuse: what ``torch.compile`` makes of the module.

        Returns
        -------
        Callable
            Takes what the module takes.
        """
        compiled: Callable[..., Any] = torch.compile(self.module, backend=self.backend)
        return compiled


@checked
def compile_ahead(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any] | None = None,
    *,
    backend: Backend | None = None,
) -> Ahead:
    """Compile a module for some inputs, or take the program that an earlier process kept.

    Torch makes one graph of the module, for the extents of these inputs, and our backend compiles
    it. The program is kept by the module's classes and tensors, the inputs, the options, the GPU,
    torch's settings, and the releases of all that it was made with. It is taken if the files that
    torch read are what they were, and its guards hold; else the module is compiled again. Guards
    are tested at each call; what they refuse is compiled as by ``torch.compile``. So is what cannot
    be kept, with a warning that says why: modules with graph breaks or hooks, kernels on the CPU,
    other parts than inductor for the rest, a torch that does not write programs (2.11 does).

    Parameters
    ----------
    module : torch.nn.Module
        The module, such as a model, where its weights are to stay.
    inputs : Sequence[Any]
        What it will be called with: extents, types and devices count.
    named : Mapping[str, Any], optional
        The same by name.
    backend : Backend, optional
        Options; the defaults if not given.

    Returns
    -------
    Ahead
        What to call instead of the module, under the same modes, such as inference mode.

    Examples
    --------
    >>> x = torch.zeros(16, 32)
    >>> with torch.inference_mode():
    ...     fn = compile_ahead(torch.nn.Linear(32, 8), (x,))
    ...     tuple(fn(x).shape)  # [rows, columns]
    (16, 8)
    """
    backend, named = backend or Backend(), named or {}
    found, program, reason = False, None, ""
    try:
        with collecting_later():
            key, whole = _key(module, inputs, named, backend), _Whole(module)
            program = _kept(key, whole, inputs, named)
        found = program is not None
        if not found:
            program = _compiled(key, whole, inputs, named, backend)
    except Untold as error:
        reason = str(error) or "a part of it has no words"
    except Exception as error:  # whatever torch cannot write, it can compile
        reason = f"{type(error).__name__}: {error}"
    if reason:
        warnings.warn(f"crossfuse compiles a module at its first call: {reason}", stacklevel=3)
    return Ahead(module, found, reason, program, backend)


def _fits(program: Any, whole: _Whole, inputs: Any, named: Any) -> bool:
    return bool(program.guard_check(whole, *inputs, **named))


def _key(module: torch.nn.Module, inputs: Any, named: Any, backend: Backend) -> str:
    from torch.utils._pytree import tree_leaves

    if not hasattr(torch.compiler, "load_compiled_function"):
        raise Untold(f"torch {torch.__version__} does not write programs; 2.11 does")
    leaves = tree_leaves((tuple(inputs), dict(named)))
    places = {each.device for each in leaves if isinstance(each, torch.Tensor)}
    if len(places) != 1:
        raise Untold(f"its inputs are on {len(places)} devices")
    return module_key(module, inputs, named, backend.device_of(places.pop()), (backend,))


def _kept(key: str, whole: _Whole, inputs: Any, named: Any) -> Any:
    """Load the program of an earlier process; None if there is none that fits the module now."""
    entry = shelf(_KIND).read(key, itself)
    if entry is None:
        return None
    try:
        about = parse(entry.about["stands_on"])
        read = about["sources"]
        if sources(tuple(read)) != read or not unchanged(about["seen"], whole):
            return None
        modules = {name: import_module(each) for name, each in about["modules"].items()}
        program = torch.compiler.load_compiled_function(
            io.BytesIO(entry.data), f_globals={**globals(), **modules}
        )
        if not _fits(program, whole, inputs, named):
            return None
        program.disable_guard_check()  # `Ahead` tests them
    except Exception as error:  # a kernel or a file that is lost, or another GPU: compile again
        _LOG.info("a program that was kept is not taken: %s", error)
        return None
    return program


def _compiled(key: str, whole: _Whole, inputs: Any, named: Any, backend: Backend) -> Any:
    from torch._dynamo import config as dynamo

    seen = Identities(whole)
    # Torch 2.11 has it behind this switch.
    switch = {"enable_aot_compile": True} if hasattr(dynamo, "enable_aot_compile") else {}
    with dynamo.patch(switch), _defaults_that_can_be_read():
        fn: Any = torch.compile(
            whole.forward,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            options={"guard_filter_fn": seen.keep},
        )
        program = fn.aot_compile((tuple(inputs), dict(named)))
    if seen.untold:
        raise Untold(f"no words say what {', '.join(seen.untold)} is")
    read = [each.module for each in program.source_info().inlined_sources]
    stands_on = {"seen": seen.seen, "sources": sources(read), "modules": _modules()}
    about = {"label": f"program of {type(whole.module).__qualname__}"}
    data = _written(program)
    shelf(_KIND).write(key, Entry(data, {**about, "stands_on": json.dumps(stands_on)}))
    program.disable_guard_check()
    return program


@contextmanager
def _defaults_that_can_be_read() -> Iterator[None]:
    """Let guards of default arguments be read again.

    Torch 2.11 writes them with more arguments than it makes them of.
    """
    from torch._dynamo.source import DefaultsSource

    def reduced(source: Any) -> tuple[Any, ...]:
        given = tuple(getattr(source, each.name) for each in fields(source) if each.init)
        return type(source), given

    before = DefaultsSource.__reduce__
    DefaultsSource.__reduce__ = reduced
    try:
        yield
    finally:
        DefaultsSource.__reduce__ = before


def _modules() -> dict[str, str]:
    """Modules that Dynamo gave names among our globals, which its bytecode reads."""
    found = ((name, each) for name, each in globals().items() if name.startswith("___"))
    return {name: each.__name__ for name, each in found if isinstance(each, ModuleType)}


def _written(program: Any) -> bytes:
    with scratch() as folder:
        path = folder / "program"
        program.save_compiled_function(str(path))
        return path.read_bytes()
