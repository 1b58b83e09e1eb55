"""Graphs that inductor compiled, loaded without inductor's compiler.

To run what inductor compiled takes its code and its kernels. Loading it as torch does imports all
lowerings too: the code asks for two names that live there, and torch's loader for a hook of its
tests. On a GPU the loader also hashes all of Triton, for a cache that only its authors have. So
what is kept says where else the names are, and is of a class that loads itself.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from sys import modules
from typing import Any

import torch
from torch._dynamo.utils import get_runtime_metrics_context
from torch._functorch._aot_autograd.aot_autograd_result import BundledCompiledForward
from torch._inductor import config
from torch._inductor.codecache import code_hash, output_code_log, torch_key
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.triton_bundler import TritonBundler

from crossfuse.torch.extern import OPERATORS, written_extern

_ALIGN = "from torch._inductor.codegen.memory_planning import _align as align"
_EXTERN = "from torch._inductor.select_algorithm import extern_kernels"


@dataclass
class KeptForward(BundledCompiledForward[CompiledFxGraph]):
    """An inference graph that loads itself.

    Attributes
    ----------
    torch_key : bytes
        Torch's hash of its own files, by which its code finds Triton's kernels.
    """

    torch_key: bytes

    def post_compile(self, result: CompiledFxGraph, fx_config: Any) -> Any:
        """Load the code and the kernels, as ``FxGraphCache.cache_hit_post_compile`` does.

        Parameters
        ----------
        result : CompiledFxGraph
            What was kept.
        fx_config : _CompileFxKwargs
            What torch knows of CUDA graphs.

        Returns
        -------
        Callable
            What is called with the inputs in a list.
        """
        if _more_is_asked():
            return super().post_compile(result, fx_config)
        constants = CompiledFxGraphConstants()
        with _kernels(result, self.torch_key):
            result.after_deserialization(constants)
        result.post_compile(self.example_inputs, constants, fx_config)
        return _called(result)


def loading_itself(entry: Any) -> Any:
    """What torch writes of a compiled graph, so that it is loaded without inductor's compiler.

    Parameters
    ----------
    entry : BundledAOTAutogradResult
        As torch would write it.

    Returns
    -------
    BundledAOTAutogradResult
        A changed copy; the same where anything is not as it is known to be.
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
    """Inductor's code with the names of its header from elsewhere.

    Parameters
    ----------
    code : str
        As inductor wrote it.

    Returns
    -------
    str | None
        The code; None if it may need lowerings.
    """
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
    """What code asks a name for."""
    return {
        each.attr
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and ast.unparse(each.value) == owner
    }


def _more_is_asked() -> bool:
    """Whether torch is to do more while it loads a graph than what runs need."""
    return bool(
        config.is_fbcode()
        or config.bundled_autotune_remote_cache
        or getattr(config, "cudagraph_policy", None) is not None
        or output_code_log.isEnabledFor(logging.DEBUG)
        or "TORCH_TRACE" in os.environ
    )


def _called(graph: CompiledFxGraph) -> Callable[[list[Any]], Any]:
    """A graph as it is called, without what a call looks up in ``torch._inductor.debug``.

    That module is taken to be imported. As long as it is not, nothing can be asked of it.
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

    They are compiled: no process is started that could compile others. Nor are torch's files hashed
    again to find them, if this process has not done so.
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
    """Take torch's hash of its files to be known; it is forgotten, as nothing was hashed."""
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
