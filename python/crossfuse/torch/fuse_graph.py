"""Fusion of one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from crossfuse.hardware import Device
from crossfuse.measure.timer import Timer
from crossfuse.relax.chains.choice import choose_chains
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.relax.graph import read_graph
from crossfuse.torch.fuse_cascades import fuse_cascades
from crossfuse.torch.fuse_rows import fuse_rows
from crossfuse.torch.graph_cache import Fused, Record, Step, replaced
from crossfuse.torch.kernels import offer_kernels
from crossfuse.torch.options import Given
from crossfuse.torch.report import Report, in_torch
from crossfuse.torch.rewrite import is_frozen
from crossfuse.torch.separate import Timing
from crossfuse.torch.translate import Translation, translate


def fuse_chains(
    module: fx.GraphModule,
    target: Device,
    always: bool,
    cpu: bool,
    timing: Timing | None = None,
) -> Fused:
    """Replace the chains of a graph of static shapes by kernels, in place.

    The graph has aten operators without mutation in between; its nodes carry ``meta["val"]``.
    `always` also fuses chains that are estimated to be slower than separate kernels. `cpu` runs the
    scheduled functions on the CPU instead of kernels. `timing` times kernels and takes the fastest;
    with None estimates choose. There is an outcome for each pair of layers.
    """
    translation = translate(module.graph)
    graph = read_graph(translation.module["main"])
    measuring = None if timing is None else timing.of(translation.nodes)
    kernels = ChainKernels(
        translation.module,
        target,
        constant_weights=False,
        named=False,
        measuring=measuring,
        weights=_weights(module, translation),
    )
    chosen = choose_chains("main", graph, kernels, always, frozenset(translation.nodes))
    step = Step()
    if chosen.replacements:
        made = offer_kernels(chosen.replacements, kernels.module, target, cpu)
        step = replaced(module, translation.nodes, chosen.replacements, made)
    outcomes = tuple(in_torch(each, translation.names) for each in chosen.outcomes)
    return Fused(outcomes, step, translation.untranslated)


def _weights(module: fx.GraphModule, translation: Translation) -> tuple[Any, ...]:
    """Variables of weights that no call changes, which torch promises of frozen ones alone.

    A copy of others would be out of date whenever their memory is written, which no counter of
    torch shows: ``parameter.data`` has its own, and CUDA graphs are replayed without any code.
    """
    if not is_frozen(module):
        return ()
    return tuple(each for each, node in translation.nodes.items() if node.op == "get_attr")


def fuse_graph(
    module: fx.GraphModule,
    options: Given,
    target: Device,
    sequential: bool,
    timer: Timer | None = None,
) -> tuple[Record, bool]:
    """Fuse a graph that the cache does not have, in place; False if a part of that went wrong.

    Chains are in the graph already when cascades are looked for, so that a failure there leaves
    them. `sequential` and `timer` are what `cpu` and `timing` are to `fuse_chains`.
    """
    where = (target, options.always, sequential)
    mode = (options.mode or "default") if options.rest == "inductor" else None
    timing = None if timer is None else Timing(timer, mode)
    chains = fuse_chains(module, *where, timing)
    rows = fuse_rows(module, *where, options.bins, partial(_apart, options), timing)
    failed: tuple[ChainOutcome, ...] = ()
    cascades = Fused()
    try:
        cascades = fuse_cascades(module, *where, timing) if options.cascades else cascades
    except Exception as error:  # whatever it is, the graph is right without cascades
        text = f"{type(error).__name__}: {error}"
        failed = (ChainOutcome("main", ("cascades",), "", "", None, None, text),)
        warnings.warn(f"crossfuse left cascades of a graph to torch: {text}", stacklevel=2)
    outcomes = chains.outcomes + rows + cascades.outcomes + failed
    report = Report(outcomes, chains.untranslated)
    return Record(report, (chains.step, cascades.step)), not failed


def _apart(options: Given, module: fx.GraphModule) -> Callable[..., Any]:
    """The callable that computes a chain of symbolic rows where no kernel does."""
    if options.rest != "inductor":
        return module
    return torch.compile(module, dynamic=True, mode=options.mode or None)
