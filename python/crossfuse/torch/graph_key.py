"""Graphs of torch in words, for cache keys: graphs of equal words are compiled alike."""

from __future__ import annotations

import sys
from inspect import isfunction
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Untold(Exception):
    """Something has no words, so that no cache key could tell it from others."""


def environment() -> tuple[str, ...]:
    """Releases and settings that kernels depend on, beside those of `content_key`.

    `EnvironmentRefused` is raised without nvcc, whose release is one of them.
    """
    from crossfuse.runtime.nvcc import find_nvcc

    return f"torch {torch.__version__}", f"nvcc {find_nvcc().version}", _settings()


def _settings() -> str:
    """TVM's settings, which libraries depend on; a process without TVM has none."""
    tvm = sys.modules.get("tvm")
    if tvm is None:
        return "{}"
    return str(dict(tvm.ir.transform.PassContext.current().config))


def node_words(node: fx.Node, meta: str, functions: bool = False) -> str:
    """Describe a node in one line, with what it makes as ``node.meta[meta]`` has it.

    `meta` is ``"val"`` in graphs of AOTAutograd, ``"example_value"`` in those that torch captured.
    With `functions`, functions of Python count by their names, which do not say what they do.
    `Untold` is raised if a part of the node has no words.
    """
    value = _attribute(node) if node.op == "get_attr" else node.meta.get(meta)
    made = "" if node.op == "output" else value_words(value)
    given = argument_words((node.args, node.kwargs))
    return f"{node.name} = {node.op} {_target(node, functions)} {given} : {made}"


def _attribute(node: fx.Node) -> torch.Tensor:
    """The tensor that a graph holds; graphs nested in graphs have no words."""
    try:
        found = attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        raise Untold from None
    if not isinstance(found, torch.Tensor):
        raise Untold
    return found


def _target(node: fx.Node, functions: bool) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, BuiltinFunctionType) or (functions and isfunction(target)):
        return f"{target.__module__}.{target.__qualname__}"
    raise Untold


def argument_words(value: Any) -> str:
    """Describe an argument of an operator."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if value is None or value is Ellipsis or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(argument_words, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {argument_words(each)}' for key, each in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{argument_words((value.start, value.stop, value.step))}"
    raise Untold


def value_words(value: Any) -> str:
    """Describe what a node makes: shape, strides, type and device."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_words, value))}]"
    if not isinstance(value, torch.Tensor):
        return argument_words(value)
    if value.layout != torch.strided:
        raise Untold
    extents = (*value.shape, *value.stride())
    if not all(isinstance(each, int) for each in extents):
        raise Untold
    return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}"
