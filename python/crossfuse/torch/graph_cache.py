"""What became of graphs and of whole programs that torch captured, cached by their texts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import isfunction
from operator import attrgetter
from types import BuiltinFunctionType
from typing import Any
from uuid import uuid4

import torch
from torch import fx

from crossfuse.cache import Entry, content_key, shelf
from crossfuse.errors import RefusedError
from crossfuse.hardware import Device
from crossfuse.schema import read
from crossfuse.torch.kernels import KeptKernel, offer_kept
from crossfuse.torch.report import Report
from crossfuse.torch.rewrite import Call, rewrite

# Graphs of torch in words, for cache keys: graphs of equal words are compiled alike.

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


# Graphs that were fused before: what became of them, from the cache, without TVM.
#
# A graph is known by all that decides what becomes of it: its operators, shapes, strides, types and
# constants, but not the values of tensors; the options; the device; the releases of torch, TVM and
# nvcc; and this package's own files. Where any of it cannot be put in words, the graph has no key
# and is worked out again.

_GRAPH = "graph"


@dataclass(frozen=True)
class Record:
    """What became of a graph, in a form that another process can repeat."""

    report: Report
    #: Kernels that the graph calls.
    kernels: tuple[KeptKernel, ...] = ()
    #: What takes the place of which nodes.
    calls: tuple[Call, ...] = ()

    @property
    def label(self) -> str:
        """Describe it for people."""
        names = ", ".join(dict.fromkeys(self.report.fused)) or "no kernels"
        return f"graph of {len(self.report.outcomes)} groups: {names}"


def graph_key(graph: fx.Graph, target: Device, options: Sequence[Any]) -> str:
    """Cache key of a graph of aten operators; empty if it has none.

    Nodes carry ``meta["val"]``. `options` are what else decides which groups become kernels, told
    apart by ``repr``. Graphs of symbolic shapes and those with parts that have no words have no
    key. `EnvironmentRefused` is raised without nvcc, whose release is part of the key.
    """
    try:
        lines = [node_words(each, "val") for each in graph.nodes]
    except Untold:
        return ""
    return content_key(target, _GRAPH, *environment(), *map(repr, options), "\n".join(lines))


def recall(module: fx.GraphModule, key: str) -> Record | None:
    """Repeat, in place, what was done to a graph before.

    None, and no change, where the graph or one of its kernels is not in the cache.
    """
    record = shelf(_GRAPH).read(key, lambda entry: read(Record, entry.data))
    try:
        if record is None or not _fits(record, module) or not offer_kept(record.kernels):
            return None
    except RefusedError:
        return None
    if record.calls:
        rewrite(module, record.calls)
    return record


def remember(key: str, record: Record) -> None:
    """Cache what became of a graph, under its key before that.

    All kernels of the record must be in the cache.
    """
    data = json.dumps(asdict(record)).encode()
    shelf(_GRAPH).write(key, Entry(data, {"label": record.label}))


def _fits(record: Record, module: fx.GraphModule) -> bool:
    """Whether the calls of a record name nodes of a graph, and kernels of their own."""
    names = {each.name for each in module.graph.nodes}
    keys = {each.key for each in record.kernels}
    return all(
        {*each.outputs, *each.inputs} <= names
        and each.key in keys
        and len(each.inputs) == len(each.shapes)
        for each in record.calls
    )


# Captured graphs that torch's own caches have whole, and the kernels that these call.
#
# With a hit in the cache of AOTAutograd nothing of ours is asked any more: no graph of aten
# operators is made. So the kernels are offered before, from a record of ours. What torch keeps is
# tagged with a number that only the record has: without the record, or one of its kernels, torch
# finds nothing.

_PROGRAM = "program"


@dataclass(frozen=True)
class Program:
    """A captured graph that torch's caches may have whole."""

    #: Its cache key, see `program_key`.
    key: str
    #: Tag of what torch keeps of it.
    number: str
    #: What became of the graphs of aten operators that were made of it.
    records: tuple[Record, ...] = ()


def program_key(
    module: fx.GraphModule, inputs: Sequence[Any], target: Device, options: Sequence[Any]
) -> str:
    """Cache key of a captured graph; empty if it has none.

    Torch's key says what is computed; this one only has to say which kernels that may need. Graphs
    of symbolic shapes and those with parts that have no words have none. `EnvironmentRefused` is
    raised without nvcc, whose release is part of the key.
    """
    try:
        lines = [node_words(each, "example_value", functions=True) for each in module.graph.nodes]
        lines += [f"{value_words(each)} {_has_gradient(each)}" for each in inputs]
    except Untold:
        return ""
    modes = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    words = map(repr, (*modes, *options))
    return content_key(target, _PROGRAM, *environment(), *words, "\n".join(lines))


def _has_gradient(value: Any) -> bool:
    """Whether a graph may have to make a gradient for an input, which no words of values say."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def program(key: str) -> Program | None:
    """Look up a captured graph in the cache, and offer its kernels.

    It has records if these and all of their kernels are there, else a fresh number, under which
    torch finds nothing. None where our cache keeps nothing, so that torch is not to keep anything
    either.
    """
    found = _read(key)
    records = () if found is None else found.records
    kernels = dict.fromkeys(kernel for each in records for kernel in each.kernels)
    with contextlib.suppress(RefusedError, OSError):
        if records and offer_kept(tuple(kernels)):
            return found
    fresh = Program(key, uuid4().hex)
    write_program(fresh)
    return fresh if _read(key) == fresh else None


def write_program(made: Program, records: Sequence[Record] = ()) -> None:
    """Cache what became of a captured graph, with further records."""
    made = replace(made, records=tuple(dict.fromkeys((*made.records, *records))))
    label = "; ".join(each.label for each in made.records) or "not compiled yet"
    entry = Entry(json.dumps(asdict(made)).encode(), {"label": f"program, {label}"})
    shelf(_PROGRAM).write(made.key, entry)


def to_file() -> bool:
    """Whether torch's ``aot_compile`` asks, which writes what is compiled to a file."""
    from torch._functorch import config as functorch

    return bool(getattr(functorch, "bypass_autograd_cache_key", False))


@contextlib.contextmanager
def torch_caches(made: Program | None) -> Iterator[None]:
    """Let torch cache whole programs under a program's number; without one only what follows us.

    A program that goes to a file is torch's entry for it, which must not be one of another time,
    whose kernels are not offered: it has a number of its own.
    """
    from torch._functorch import config as functorch

    if made is None and not to_file():
        with functorch.patch(enable_autograd_cache=False):
            yield
        return
    settings = torch.compiler.config
    number = uuid4().hex if made is None else made.number
    with settings.patch(cache_key_tag=f"{settings.cache_key_tag}crossfuse-{number}"):
        yield


def _read(key: str) -> Program | None:
    return shelf(_PROGRAM).read(key, lambda entry: read(Program, entry.data))
