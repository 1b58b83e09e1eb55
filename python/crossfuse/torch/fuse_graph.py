"""All that is fused in one graph: chains, chains of symbolic rows, and cascades."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from crossfuse.hardware import Device
from crossfuse.measure.timer import Timer
from crossfuse.relax.chains.outcome import ChainOutcome
from crossfuse.torch.fuse import fuse_chains
from crossfuse.torch.fuse_cascades import fuse_cascades
from crossfuse.torch.fuse_rows import fuse_rows
from crossfuse.torch.fused import Fused
from crossfuse.torch.known import Record
from crossfuse.torch.options import Given
from crossfuse.torch.report import Report
from crossfuse.torch.separate import Timing


def fuse_graph(
    module: fx.GraphModule,
    options: Given,
    target: Device,
    sequential: bool,
    timer: Timer | None = None,
) -> tuple[Record, bool]:
    """Find, plan and build what no earlier process kept, and replace it in place.

    Chains are in the graph already when cascades are looked for, so that what goes wrong there
    leaves these.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The graph, with the values of its nodes in their ``meta``.
    options : Given
        What is fused, and who computes rows that no kernel is for.
    target : Device
        What to build for.
    sequential : bool
        Whether the scheduled functions run on the CPU instead.
    timer : Timer | None
        Times kernels, so that the fastest is taken; None: estimates choose.

    Returns
    -------
    tuple[Record, bool]
        What was done; and whether nothing went wrong.
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
    """What computes a chain of symbolic rows that no kernel is for."""
    if options.rest != "inductor":
        return module
    return torch.compile(module, dynamic=True, mode=options.mode or None)
