"""Graphs of torch in words: two that are told alike are compiled alike."""

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
    """Something in a graph that has no words."""


def environment() -> tuple[str, ...]:
    """Releases and settings that kernels depend on, beside those of `content_key`.

    Raises
    ------
    EnvironmentRefused
        Without nvcc, whose release is part of it.
    """
    from crossfuse.runtime.nvcc import find_nvcc

    return f"torch {torch.__version__}", f"nvcc {find_nvcc().version}", _settings()


def _settings() -> str:
    """TVM's settings, which libraries depend on; those of a process without TVM are none."""
    tvm = sys.modules.get("tvm")
    if tvm is None:
        return "{}"
    return str(dict(tvm.ir.transform.PassContext.current().config))


def node_words(node: fx.Node, meta: str, functions: bool = False) -> str:
    """A node in words, with what it makes as ``node.meta[meta]`` has it.

    Parameters
    ----------
    node : torch.fx.Node
        The node.
    meta : str
        ``"val"`` in graphs of AOTAutograd, ``"example_value"`` in those that torch captured.
    functions : bool
        Whether functions of Python are told by their names, which do not say what they do.

    Returns
    -------
    str
        One line.

    Raises
    ------
    Untold
        If a part of it has none.
    """
    value = _attribute(node) if node.op == "get_attr" else node.meta.get(meta)
    made = "" if node.op == "output" else value_words(value)
    given = argument_words((node.args, node.kwargs))
    return f"{node.name} = {node.op} {_target(node, functions)} {given} : {made}"


def _attribute(node: fx.Node) -> torch.Tensor:
    """A tensor that a graph holds; graphs inside of graphs are not told."""
    try:
        found = attrgetter(str(node.target))(node.graph.owning_module)
    except AttributeError:
        raise Untold from None
    if not isinstance(found, torch.Tensor):
        raise Untold
    return found


def _target(node: fx.Node, functions: bool) -> str:
    """What a node calls."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, BuiltinFunctionType) or (functions and isfunction(target)):
        return f"{target.__module__}.{target.__qualname__}"
    raise Untold


def argument_words(value: Any) -> str:
    """An argument of an operator."""
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
    """Shape, strides, type and device of what a node makes."""
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
