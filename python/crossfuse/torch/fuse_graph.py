"""Fusion of one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import tvm
from torch import fx

from crossfuse.hardware import Device
from crossfuse.measure.timer import Timer
from crossfuse.relax.choice import Chosen, choose
from crossfuse.relax.graph import Graph, read_graph
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.relax.replace import Replacement, with_replacements
from crossfuse.torch.fuse_cascades import CascadeKernels, legalised, may_have_attention
from crossfuse.torch.fuse_rows import TorchKernels, offered_rows, with_bins
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
    translated once: its chains become kernels, those of symbolic rows one for each bin; what is
    left of the translation is searched for cascades; and the graph then calls all kernels. A
    failure in cascades leaves the chains. `sequential` runs the scheduled functions on the CPU
    instead of kernels. `timer` times kernels and takes the fastest; with None estimates choose.
    """
    mode = (options.mode or "default") if options.rest == "inductor" else None
    translation = translate(module.graph)
    measuring = None if timer is None else Timing(timer, mode).of(module.graph, translation)
    where, always = (target, sequential), options.always
    kernels = TorchKernels(
        translation,
        target,
        bins=options.bins,
        measuring=measuring,
        weights=_weights(module, translation),
    )
    chains = choose("main", read_graph(translation.module["main"]), kernels, always)
    chains = in_torch(chains, translation.names)
    made, calls = _offered(translation, _static(chains), kernels.module, *where)
    rows = [each for each in chains.replacements if each.bins]
    apart = partial(_apart, options)
    rows_calls = offered_rows(rows, translation.nodes, kernels.module, *where, apart)
    cascades, failed = Chosen((), ()), False
    try:
        if options.cascades:
            of_cascades = CascadeKernels(target, translation.nodes, measuring)
            rest = _rest(translation, _static(chains), kernels.module)
            found = Chosen((), ()) if rest is None else choose("main", rest, of_cascades, always)
            cascades = in_torch(found, translation.names)
            more = _offered(translation, found.replacements, of_cascades.functions, *where)
            made, calls = (*made, *more[0]), (*calls, *more[1])
    except Exception as error:  # whatever it is, the graph is right without cascades
        text, failed = f"{type(error).__name__}: {error}", True
        cascades = Chosen((), (ChainOutcome("main", ("cascades",), "", "", None, None, text),))
        warnings.warn(f"crossfuse left cascades of a graph to torch: {text}", stacklevel=2)
    if calls or rows_calls:
        rewrite(module, calls, rows_calls)
    outcomes = (*map(with_bins, chains.outcomes), *cascades.outcomes)
    return Record(Report(outcomes, translation.untranslated), made, calls), not failed


def _static(chains: Chosen) -> list[Replacement]:
    return [each for each in chains.replacements if not each.bins]


def _weights(module: fx.GraphModule, translation: Translation) -> Collection[Any]:
    """Variables of weights that no call changes, which torch promises of frozen ones alone.

    A copy of others would be out of date whenever their memory is written, which no counter of
    torch shows: ``parameter.data`` has its own, and CUDA graphs are replayed without any code.
    """
    if not is_frozen(module):
        return ()
    return tuple(each for each, node in translation.nodes.items() if node.op == "get_attr")


def _rest(
    translation: Translation, replacements: Sequence[Replacement], functions: tvm.IRModule
) -> Graph | None:
    """What chains leave of a graph, to be searched for cascades; None if there can be none.

    They are looked for where products multiply batches by batches. Norms and softmaxes without
    products are left: inductor reads and writes them once too. Attention that is one operator of
    torch is left as well: it is a fused kernel of cuDNN or flash attention already, and inductor
    makes one of the usual formulas before we see them.
    """
    main = translation.module["main"]
    graph = read_graph(main)
    if not may_have_attention(graph):
        return None
    rest = functions.clone()
    rest.update_func(rest.get_global_var("main"), with_replacements(main, graph, replacements))
    return legalised(rest)


def _offered(
    translation: Translation,
    replacements: Sequence[Replacement],
    functions: Mapping[Any, Any],
    target: Device,
    cpu: bool,
) -> tuple[tuple[KeptKernel, ...], tuple[Call, ...]]:
    """Build the kernels of groups of static shapes, and give the calls that take their place."""
    kernels = offer_kernels(replacements, functions, target, cpu)
    name = {variable: node.name for variable, node in translation.nodes.items()}

    def call(found: Replacement) -> Call:
        shapes = tuple(tuple(map(int, each)) for each in found.shapes)
        (output,) = found.outputs
        given = tuple(name[each] for each in found.inputs)
        return Call(name[output], given, shapes, kernels[found.function].key)

    return tuple(kernels.values()), tuple(map(call, replacements))


def _apart(options: Given, module: fx.GraphModule) -> Callable[..., Any]:
    """The callable that computes a chain of symbolic rows where no kernel does."""
    if options.rest != "inductor":
        return module
    return torch.compile(module, dynamic=True, mode=options.mode or None)
