"""Compiled graphs with their kernels, as files that a later process loads."""

from __future__ import annotations

import ast
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass
from importlib import import_module
from inspect import getsource, isfunction
from operator import attrgetter
from sys import modules
from types import CodeType
from typing import Any

import torch
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._dynamo.utils import get_runtime_metrics_context
from torch._functorch._aot_autograd.aot_autograd_result import BundledCompiledForward
from torch._inductor import config
from torch._inductor.codecache import code_hash, output_code_log, torch_key
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.triton_bundler import TritonBundler

from crossfuse.cache import Entry, itself, package_hash, shelf
from crossfuse.errors import ArtefactRefused, RefusedError, refuse
from crossfuse.runtime.artefact import LIBRARIES
from crossfuse.schema import typed
from crossfuse.torch.graph_cache import Record
from crossfuse.torch.kernels import offer_kept
from crossfuse.torch.report import keep

# Compiled graphs that torch can write to a file: with the kernels that they call.
#
# ``torch.compile(..., fullgraph=True).aot_compile`` wants something that becomes bytes and is made
# of bytes again in another process. What inductor made has that from torch; in front of it go the
# libraries of our kernels, so that a file needs neither our cache nor a compiler.

#: Releases of torch of which it is known what they do to load a compiled graph.
RELEASES = ("2.11", "2.13")


class SavedProgram(SerializableCallable):
    """A compiled graph in the form that torch writes, with the libraries of its kernels.

    `records` say what became of its graphs of aten operators; `called` are keys of the kernels that
    these call.
    """

    def __init__(self, compiled: Any, records: Sequence[Record], called: Sequence[str]) -> None:
        self.compiled = compiled
        self.records = tuple(records)
        self.called = tuple(called)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        return self.compiled(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavedProgram) -> bytes:
        """Serialise a graph together with the libraries of its kernels.

        `ArtefactRefused` is raised if it calls kernels that the cache has no library of, or torch
        cannot write the rest.
        """
        kernels = {each.key: each for record in fn.records for each in record.kernels}
        libraries = {}
        for key in fn.called:
            entry = _library(kernels[key].kept_as) if key in kernels else None
            if entry is None:
                raise _unwritten(f"the kernel '{key}', which this process alone has")
            libraries[kernels[key].kept_as] = (entry.data, dict(entry.about))
        if getattr(fn.compiled, "serialize", None) is None:
            raise _unwritten("a graph that torch's cache of AOTAutograd does not take")
        rest = BundledAOTAutogradSerializableCallable(_Kept(fn.compiled))
        made = BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(rest)
        records = [asdict(each) for each in fn.records]
        return pickle.dumps((package_hash(), records, libraries, made))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Any:
        """Load a graph from its bytes, and make its kernels known.

        `ArtefactRefused` is raised if other files of this package made it, or a kernel does not fit
        the GPU.
        """
        release, values, libraries, made = pickle.loads(data)
        if release != package_hash():
            raise refuse(
                ArtefactRefused,
                "torch-artefact",
                "package",
                found=f"files of this package of hash {package_hash()[:16]}",
                limit=f"{release[:16]}, those that compiled it",
                instead="compile the model again, or install the release that did",
            )
        records = typed(tuple[Record, ...], values)
        kernels = tuple(
            dict.fromkeys(
                each for record in records for each in record.kernels if each.kept_as in libraries
            )
        )
        entries = {key: Entry(*each) for key, each in libraries.items()}
        if not offer_kept(kernels, entries):
            raise _unwritten("kernels without a manifest")
        for record in records:
            keep(record.report)
        return BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(made)


def _library(key: str) -> Entry | None:
    return shelf(LIBRARIES.name).read(key, itself)


class _Kept:
    """What inductor made, written so that it loads itself in the `RELEASES` known to allow that."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def serialize(self) -> Any:
        entry = self._compiled.serialize()
        if ".".join(torch.__version__.split(".")[:2]) not in RELEASES:
            return entry

        return loading_itself(entry)


def _unwritten(found: str) -> RefusedError:
    return refuse(
        ArtefactRefused,
        "torch-artefact",
        "graph",
        found=found,
        limit="an inference graph of static shapes, whose kernels are for a GPU and kept",
        instead="compile it so, with a cache, or call it in this process",
    )


# What inductor's code calls beside its own kernels, without importing inductor's compiler.

#: Operators that are there without inductor's lowerings, which define some in Python.
OPERATORS = frozenset({"_quantized", "aten", "crossfuse", "inductor"})

_CONSTANT = (bool, int, float, str, type(None))


class Extern:
    """Stands for ``torch._inductor.select_algorithm.extern_kernels`` in code that is cached.

    Code that inductor wrote imports that module, and with it all of inductor's lowerings, to call
    ``torch.mm``. `known` are its functions by name; a name that is not among them is asked for
    there.

    Examples
    --------
    >>> extern_kernels = Extern(mm=torch.mm)
    >>> extern_kernels.mm is torch.mm, extern_kernels.addmm is torch.addmm  # the second is imported
    (True, True)
    """

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        from torch._inductor.select_algorithm import extern_kernels

        vars(self)[name] = found = getattr(extern_kernels, name)
        return found


def written_extern(names: Iterable[str]) -> tuple[str, str]:
    """Write code that makes an `Extern` named ``extern_kernels`` where torch is imported.

    The first text is a line; the second are lines that may come anywhere behind it, with inductor's
    own functions as they are written there. Names that are neither one of these nor a function of
    torch are left out.
    """
    from torch._inductor.select_algorithm import extern_kernels

    calls, functions = [], []
    for name in sorted(set(names)):
        value: Any = getattr(extern_kernels, name, None)
        path = _path(value)
        if path:
            calls.append(f"{name}={path}")
        elif _stands_alone(value):
            functions += ["", getsource(value), f"extern_kernels.{name} = {value.__name__}\n"]
    made = f"extern_kernels = Extern({', '.join(calls)})"
    return f"from crossfuse.torch.inductor_artifact import Extern; {made}", "\n".join(functions)


def _path(value: Any) -> str:
    """The path from ``torch`` to a function, where importing torch is enough; else empty."""
    import torch

    name = str(getattr(value, "__name__", ""))
    paths = [name, f"ops.{value}"] if str(value).split(".")[0] in OPERATORS else [name]
    for path in paths:
        try:
            if attrgetter(path)(torch) is value:
                return f"torch.{path}"
        except AttributeError:
            continue
    return ""


def _stands_alone(value: Any) -> bool:
    """Whether a function of inductor is complete in its text, where torch is imported."""
    if not isfunction(value) or not value.__module__.startswith("torch."):
        return False
    code = value.__code__
    if value.__closure__ or any(isinstance(each, CodeType) for each in code.co_consts):
        return False
    given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if value.__annotations__ or not all(isinstance(each, _CONSTANT) for each in given):
        return False
    if not {each for each in code.co_names if each in value.__globals__} <= {"torch"}:
        return False
    try:
        return getsource(value).startswith(f"def {value.__name__}(")
    except OSError:  # there is no text
        return False


# Graphs that inductor compiled, loaded without inductor's compiler.
#
# To run what inductor compiled takes its code and its kernels. Loading it as torch does imports all
# lowerings too: the code asks for two names that live there, and torch's loader for a hook of its
# tests. On a GPU the loader also hashes all of Triton, for a cache that only its authors have. So
# what is kept says where else the names are, and is of a class that loads itself.

_ALIGN = "from torch._inductor.codegen.memory_planning import _align as align"
_EXTERN = "from torch._inductor.select_algorithm import extern_kernels"


@dataclass
class KeptForward(BundledCompiledForward[CompiledFxGraph]):
    """An inference graph that loads itself, without inductor's compiler."""

    #: Torch's hash of its own files, by which its code finds Triton's kernels.
    torch_key: bytes

    def post_compile(self, result: CompiledFxGraph, fx_config: Any) -> Any:
        """Load the code and the kernels, as ``FxGraphCache.cache_hit_post_compile`` does.

        What is returned takes the inputs in a list. `fx_config` says what torch knows of CUDA
        graphs.
        """
        if _more_is_asked():
            return super().post_compile(result, fx_config)
        constants = CompiledFxGraphConstants()
        with _kernels(result, self.torch_key):
            result.after_deserialization(constants)
        result.post_compile(self.example_inputs, constants, fx_config)
        return _called(result)


def loading_itself(entry: Any) -> Any:
    """Change what torch writes of a compiled graph so that it loads itself, see `KeptForward`.

    `entry` is a ``BundledAOTAutogradResult``. It is copied, or returned as it is where anything in
    it is not as it is known to be.
    """
    forward = entry.compiled_fw
    if entry.compiled_bw is not None or type(forward) is not BundledCompiledForward:
        return entry
    if type(forward.result) is not CompiledFxGraph:
        return entry
    code = without_lowerings(forward.result.source_code)
    if code is None:
        return entry
    graph = copy(forward.result)
    graph.prepare_for_serialization()
    # The file that the code is written to is named by the key.
    graph.source_code, graph.cache_key = code, code_hash(code)
    changed = copy(entry)
    changed.compiled_fw = KeptForward(graph, torch_key())
    return changed


def without_lowerings(code: str) -> str | None:
    """Change the imports of inductor's code to need no lowerings; None if it may need them."""
    from torch._inductor import utils
    from torch._inductor.codegen import memory_planning

    lines = code.splitlines()
    if lines.count(_ALIGN) != 1 or lines.count(_EXTERN) != 1:
        return None
    if memory_planning._align is not utils._align:
        return None
    tree = ast.parse(code)  # comments name operators too, of the graph that inductor was given
    if not OPERATORS.issuperset(_names_of("torch.ops", tree)):
        return None
    made, functions = written_extern(_names_of("extern_kernels", tree))
    code = code.replace(_ALIGN, "from torch._inductor.utils import _align as align")
    return code.replace(_EXTERN, made) + functions


def _names_of(owner: str, tree: ast.AST) -> set[str]:
    return {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == owner
    }


def _more_is_asked() -> bool:
    """Whether torch is set to do more on loading a graph than running it needs."""
    return bool(
        config.is_fbcode()
        or config.bundled_autotune_remote_cache
        or getattr(config, "cudagraph_policy", None) is not None
        or output_code_log.isEnabledFor(logging.DEBUG)
        or "TORCH_TRACE" in os.environ
    )


def _called(graph: CompiledFxGraph) -> Callable[[list[Any]], Any]:
    """A graph as it is called, without what each call looks up in ``torch._inductor.debug``.

    As long as nobody imported that module, nothing can be asked of it; once it is there, calls go
    through torch again.
    """

    def run(inputs: list[Any]) -> Any:
        if "torch._inductor.debug" in modules or torch.autograd.profiler._is_profiler_enabled:
            import_module("torch._inductor.debug")
            return graph(inputs)
        try:
            return graph.current_callable(inputs)
        finally:
            get_runtime_metrics_context().finish()

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _kernels(graph: CompiledFxGraph, key: bytes) -> Iterator[None]:
    """Let the code of a graph find its kernels of Triton, which torch wrote with it.

    They are compiled, so no process is started that could compile others. Nor are torch's files
    hashed again to find them, if this process has not done so.
    """
    bundle = graph._triton_bundle
    if bundle:
        TritonBundler.read_and_emit(bundle)
    if not bundle or not bundle.static_autotuners:
        yield
        return
    with _hash_of_torch(key), config.patch(compile_threads=1):
        yield


@contextmanager
def _hash_of_torch(key: bytes) -> Iterator[None]:
    """Set torch's hash of its files while a graph loads; cleared then, as nothing was hashed."""
    known = False
    try:
        torch_key.set(key)
    except (AssertionError, RuntimeError):  # it is known
        known = True
    try:
        yield
    finally:
        if not known:
            torch_key.clear()
