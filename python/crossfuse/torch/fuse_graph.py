"""Fusion of one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from crossfuse.hardware import Device
from crossfuse.measure.timer import Timer
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.choice import Chosen, choose
from crossfuse.relax.graph import read_graph
from crossfuse.relax.measured import Measuring
from crossfuse.relax.replace import Replacement, with_replacements
from crossfuse.torch.fuse_cascades import CascadeKernels, legalised, may_have_attention
from crossfuse.torch.fuse_rows import chosen_chains, fuse_rows
from crossfuse.torch.graph_cache import Record
from crossfuse.torch.kernels import KeptKernel, offer_kernels
from crossfuse.torch.options import Given
from crossfuse.torch.report import Report, in_torch
from crossfuse.torch.rewrite import Call, is_frozen, rewrite
from crossfuse.torch.separate import Timing
from crossfuse.torch.translate import Translation, translate


def fuse_graph(
    module: fx.GraphModule,
    options: Given,
    target: Device,
    sequential: bool,
    timer: Timer | None = None,
) -> tuple[Record, bool]:
    """Fuse a graph that the cache does not have, in place; False if a part of that went wrong.

    The graph has aten operators without mutation in between; its nodes carry ``meta["val"]``. It is
    translated once: chains of static shapes become kernels in the translation, what is left of it
    is searched for cascades, and the graph then calls the kernels of both. A failure in cascades
    leaves the chains. `sequential` runs the scheduled functions on the CPU instead of kernels.
    `timer` times kernels and takes the fastest; with None estimates choose.
    """
    mode = (options.mode or "default") if options.rest == "inductor" else None
    timing = None if timer is None else Timing(timer, mode)
    always = options.always
    translation = translate(module.graph)
    measuring = None if timing is None else timing.of(translation.nodes)
    weights = _weights(module, translation)
    chains, made = chosen_chains(translation, target, always, measuring, weights=weights)
    kernels, calls = _offered(translation, chains, made, target, sequential)
    failed: tuple[ChainOutcome, ...] = ()
    cascades = Chosen((), ())
    try:
        if options.cascades:
            cascades, more = _cascades(translation, chains, made, target, always, measuring)
            found = _offered(translation, cascades, more, target, sequential)
            kernels, calls = (*kernels, *found[0]), (*calls, *found[1])
    except Exception as error:  # whatever it is, the graph is right without cascades
        text = f"{type(error).__name__}: {error}"
        cascades = Chosen((), ())
        failed = (ChainOutcome("main", ("cascades",), "", "", None, None, text),)
        warnings.warn(f"crossfuse left cascades of a graph to torch: {text}", stacklevel=2)
    if calls:
        rewrite(module, calls)
    apart = partial(_apart, options)
    rows = fuse_rows(module, target, always, sequential, options.bins, apart, timing)
    outcomes = chains.outcomes + rows + cascades.outcomes + failed
    return Record(Report(outcomes, translation.untranslated), kernels, calls), not failed


def _weights(module: fx.GraphModule, translation: Translation) -> Collection[Any]:
    """Variables of weights that no call changes, which torch promises of frozen ones alone.

    A copy of others would be out of date whenever their memory is written, which no counter of
    torch shows: ``parameter.data`` has its own, and CUDA graphs are replayed without any code.
    """
    if not is_frozen(module):
        return ()
    return tuple(each for each, node in translation.nodes.items() if node.op == "get_attr")


def _cascades(
    translation: Translation,
    chains: Chosen,
    made: Any,
    target: Device,
    always: bool,
    measuring: Measuring | None,
) -> tuple[Chosen, Mapping[Any, Any]]:
    """Cascades in what chains leave of a graph, and their functions.

    They are looked for where products multiply batches by batches. A kernel has to beat separate
    kernels of the products and of what lies between, as inductor makes them. Norms and softmaxes
    without products are left: inductor reads and writes them once too. Attention that is one
    operator of torch is left as well: it is a fused kernel of cuDNN or flash attention already, and
    inductor makes one of the usual formulas before we see them. ``products`` of outcomes are the
    operators that reduce.
    """
    main = translation.module["main"]
    graph = read_graph(main)
    if not may_have_attention(graph):
        return Chosen((), ()), {}
    rest = made.clone()
    rest.update_func(
        rest.get_global_var("main"), with_replacements(main, graph, chains.replacements)
    )
    kernels = CascadeKernels(target, translation.nodes, measuring)
    chosen = choose("main", legalised(rest), kernels, always)
    return in_torch(chosen, translation.names), kernels.functions


def _offered(
    translation: Translation,
    chosen: Chosen,
    functions: Mapping[Any, Any],
    target: Device,
    cpu: bool,
) -> tuple[tuple[KeptKernel, ...], tuple[Call, ...]]:
    """Build the kernels of chosen groups, and give the calls that take the groups' place."""
    kernels = offer_kernels(chosen.replacements, functions, target, cpu)
    name = {variable: node.name for variable, node in translation.nodes.items()}

    def call(found: Replacement) -> Call:
        shapes = tuple(tuple(map(int, each)) for each in found.shapes)
        (output,) = found.outputs
        given = tuple(name[each] for each in found.inputs)
        return Call(name[output], given, shapes, kernels[found.function].key)

    return tuple(kernels.values()), tuple(map(call, chosen.replacements))


def _apart(options: Given, module: fx.GraphModule) -> Callable[..., Any]:
    """The callable that computes a chain of symbolic rows where no kernel does."""
    if options.rest != "inductor":
        return module
    return torch.compile(module, dynamic=True, mode=options.mode or None)
