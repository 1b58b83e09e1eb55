"""From a graph of torch to its kernels: translate, choose, build, rewrite."""

from __future__ import annotations

from torch import fx

from crossfuse.hardware import Device
from crossfuse.relax.chains.choice import choose_chains
from crossfuse.relax.chains.kernels import ChainKernels
from crossfuse.relax.dataflow import read_dataflow
from crossfuse.torch.kernels import offer_kernels
from crossfuse.torch.report import Report, in_torch
from crossfuse.torch.rewrite import rewrite
from crossfuse.torch.translate import translate


def fuse_chains(module: fx.GraphModule, target: Device, always: bool, cpu: bool) -> Report:
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

    Returns
    -------
    Report
        What became of each pair of layers.
    """
    translation = translate(module.graph)
    dataflow = read_dataflow(translation.module["main"])
    kernels = ChainKernels(translation.module, target, constant_weights=False)
    chosen = choose_chains("main", dataflow, kernels, always, frozenset(translation.nodes))
    if chosen.replacements:
        made = kernels.module
        keys = offer_kernels(chosen.replacements, made, target, cpu)
        rewrite(module, translation.nodes, chosen.replacements, keys)
    outcomes = tuple(in_torch(each, translation.names) for each in chosen.outcomes)
    return Report(outcomes, translation.untranslated)
