"""From a graph of torch to its kernels: translate, choose, build, rewrite."""

from __future__ import annotations

from typing import Any

from torch import fx

from crossfuse.hardware import Device
from crossfuse.relax.chains.choice import choose_chains
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.dataflow import read_dataflow
from crossfuse.torch.fused import Fused, Step, replaced
from crossfuse.torch.kernels import offer_kernels
from crossfuse.torch.report import in_torch
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
    """Replace the chains of a graph whose shapes are numbers by kernels, in place.

    Parameters
    ----------
    module : torch.fx.GraphModule
        A graph of aten operators without mutation in between; its nodes carry ``meta["val"]``.
    target : Device
        What to build for.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    cpu : bool
        Whether the scheduled functions run on the CPU instead.
    timing : Timing | None
        Times kernels, so that the fastest is taken; None: estimates choose.

    Returns
    -------
    Fused
        What became of each pair of layers.
    """
    translation = translate(module.graph)
    dataflow = read_dataflow(translation.module["main"])
    measuring = None if timing is None else timing.of(translation.nodes)
    kernels = ChainKernels(
        translation.module,
        target,
        constant_weights=False,
        named=False,
        measuring=measuring,
        weights=_weights(module, translation),
    )
    chosen = choose_chains("main", dataflow, kernels, always, frozenset(translation.nodes))
    step = Step()
    if chosen.replacements:
        made = offer_kernels(chosen.replacements, kernels.module, target, cpu)
        step = replaced(module, translation.nodes, chosen.replacements, made)
    outcomes = tuple(in_torch(each, translation.names) for each in chosen.outcomes)
    return Fused(outcomes, step, translation.untranslated)


def _weights(module: fx.GraphModule, translation: Translation) -> tuple[Any, ...]:
    """Variables of weights that no call changes: torch says so of frozen ones alone.

    Of others a copy would be out of date whenever their memory is written, which no counter of
    torch tells: ``parameter.data`` has its own, and CUDA graphs are replayed without any code.
    """
    if not is_frozen(module):
        return ()
    return tuple(each for each, node in translation.nodes.items() if node.op == "get_attr")
