"""The backend of ``torch.compile``: chains become kernels of ours, all else is left to torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx

from crossfuse._discovery import collecting_later
from crossfuse.calls import checked
from crossfuse.errors import EnvironmentRefused, RefusedError, WorkloadRefused, refuse
from crossfuse.hardware import Device, device, find_gpus, local_devices
from crossfuse.measure.timer import Timer, timing
from crossfuse.relax.outcome import ChainOutcome
from crossfuse.runtime.dispatch_table import BINS
from crossfuse.torch.collectives import (
    fuse_collectives,
    has_collectives,
    without_collectives,
)
from crossfuse.torch.graph_cache import Record, graph_key, recall, remember
from crossfuse.torch.rank_products import fuse_products
from crossfuse.torch.ranks import connected
from crossfuse.torch.report import BACKWARD, FORWARD, Report, keep, left_to_torch
from crossfuse.torch.rewrite import is_frozen

_LOG = logging.getLogger(__name__)
#: Who compiles what is left; how inductor may, in the words of ``torch.compile``; and what becomes
#: of models on the CPU: nothing, sequential functions, or kernels that only a GPU can run.
_KNOWN = {
    "rest": ("inductor", "eager"),
    "cpu": ("", "llvm", "build"),
    "mode": ("", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
}


@checked
@dataclass(frozen=True)
class Backend:
    """Options of the backend, and the backend with them.

    Attributes
    ----------
    rest : str
        Who compiles the rest of the graph: ``"inductor"``, or ``"eager"``: nobody.
    always : bool
        Whether chains are fused that are estimated to be slower than not to fuse them.
    target : str
        What to compile for; empty takes the GPU that the tensors are on.
    cpu : str
        Of tensors on the CPU: ``"llvm"`` runs the scheduled functions there, one thread after the
        other, to see what they compute without a GPU. ``"build"`` builds what a GPU would run, to
        see what is fused and how long that takes; calls then fail. Empty leaves such graphs to
        torch.
    cascades : bool
        Whether products between reductions, such as attention and products behind norms, are fused
        too.
    products : bool
        Whether single products of few rows by stored weights, as of a decoder that makes one token,
        become kernels too, where these are estimated to be faster than torch.
    bins : tuple[int, ...]
        Where the number of rows is symbolic: rows that kernels are made for, at most. Calls of more
        rows are computed by torch.
    mode : str
        How inductor compiles the rest, as ``torch.compile`` names it: ``"max-autotune"``,
        ``"reduce-overhead"``, ... Empty is torch's default. The modes ``max-autotune`` measure.
    measure : bool
        Whether the first few kernels of each group, and what torch has for it, are timed on the
        GPU, and the fastest is taken. What was timed once is kept, for each GPU; without a GPU
        estimates choose, and the report says so.
    early : bool
        Whether a kernel of ours that needs what another one makes in the same graph starts before
        what lies between is over, and loads its weights before it waits: inputs and constants of
        the graph that nothing in it writes (programmatic dependent launch). Of few rows, kernels
        that inductor writes start early too, which a second start loads by Triton then.

    Examples
    --------
    >>> from crossfuse.workload import chain_module
    >>> here = Backend(rest="eager", always=True, cpu="llvm")  # kernels as functions of the CPU
    >>> fn = torch.compile(chain_module(32, 64), backend=here)
    >>> with torch.inference_mode():
    ...     tuple(fn(torch.zeros(16, 32, dtype=torch.bfloat16)).shape)  # [M, K] to [M, L]
    (16, 32)
    """

    rest: str = "inductor"
    always: bool = False
    target: str = ""
    cpu: str = ""
    cascades: bool = True
    bins: tuple[int, ...] = BINS
    mode: str = ""
    measure: bool = False
    early: bool = True
    products: bool = True

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if (value := getattr(self, name)) not in known:
                raise _refused(name, repr(value), " or ".join(map(repr, known)))
        if not self.bins or min(self.bins) < 1:
            raise _refused("bins", repr(self.bins), f"positive numbers, such as {BINS}")
        if self.target:
            device(self.target)
        if self.mode and self.rest != "inductor":
            raise _refused("mode", repr(self.mode), "'': nobody compiles the rest")

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph that torch captured.

        Parameters
        ----------
        module : torch.fx.GraphModule
            What torch captured.
        inputs : Sequence[Any]
            Its example inputs.
        mode, options
            What ``torch.compile`` was told besides, see `crossfuse.torch.crossfuse`.

        Returns
        -------
        Callable
            What torch calls instead of the graph.

        Raises
        ------
        WorkloadRefused
            For options that are none.
        """
        chosen = self._with({**({"mode": mode} if mode else {}), **(options or {})})
        if chosen.rest == "inductor":
            from crossfuse.torch.inductor import compile_with_inductor

            return compile_with_inductor(module, inputs, chosen)

        return compile_eager(module, inputs, chosen.fuse)

    def _with(self, options: Mapping[str, Any]) -> Backend:
        known = [each.name for each in fields(self)]
        for name in options:
            if name not in known:
                raise _refused("options", repr(name), ", ".join(known))
        return replace(self, **options) if options else self

    def fuse(self, module: fx.GraphModule, part: str = "", *, wait: bool = True) -> Record | None:
        """Replace the chains of a graph of aten operators, in place.

        What goes wrong on the way leaves the graph as it was, with a warning.

        Parameters
        ----------
        module : torch.fx.GraphModule
            The graph, with the values of its nodes in their ``meta``.
        part : str
            What `Report.part` says of it.
        wait : bool
            Whether its kernels are built when it returns; else `crossfuse.torch.kernels.wait_for`
            has to be called, which may refuse.

        Returns
        -------
        Record | None
            What was done; None if the cache cannot say it to another process.
        """
        record = None
        try:
            with collecting_later():
                report, record = self._fused(module, wait)
        except Exception as error:  # whatever it is, the graph is right without us
            report = left_to_torch(error)
        report = replace(report, part=part)
        keep(report)
        _LOG.info("%s", report.text())
        return record and replace(record, report=report)

    def _fused(self, module: fx.GraphModule, wait: bool) -> tuple[Report, Record | None]:
        place = _place(module)
        if not self.runs_on(place):
            reason = f"its tensors are on {place}, and kernels need a GPU"
            return Report(reason=reason), None
        target, sequential = self.device_of(place), self.sequential(place)
        sums = self.fuse_over_ranks(module)
        frozen = is_frozen(module)
        # Functions on the CPU are compiled each time.
        key = "" if sequential else graph_key(module.graph, target, (*self.choices, frozen))
        record = recall(module, key) if key else None
        if record is None:
            # TVM is loaded with it, which what is kept does without.
            from crossfuse.torch.fuse_graph import fuse_graph

            with ExitStack() as stack:
                timer, note = self._timer(target, place, stack)
                record, whole = fuse_graph(module, self, target, sequential, timer, wait)
            record = replace(record, report=replace(record.report, note=note))
            key = key if whole else ""
            if key:
                remember(key, record)
        if sums:
            left = without_collectives(record.report.untranslated)
            outcomes = (*sums, *record.report.outcomes)
            record = replace(
                record, report=replace(record.report, outcomes=outcomes, untranslated=left)
            )
        return record.report, record if key else None

    def fuse_over_ranks(self, module: fx.GraphModule) -> tuple[ChainOutcome, ...]:
        """Let kernels of ours do a graph's collectives, and products beside them, in place.

        What goes wrong is raised, and leaves the graph as it was. All ranks have to do so, even one
        that leaves the rest of a graph to torch.

        Parameters
        ----------
        module : torch.fx.GraphModule
            The graph.

        Returns
        -------
        tuple[ChainOutcome, ...]
            What became of each.
        """
        if not has_collectives(module.graph):
            return ()
        place, kept = _place(module), deepcopy(module.graph)
        try:
            return (*fuse_products(module, self, place), *fuse_collectives(module, self, place))
        except Exception:
            module.graph = kept
            module.recompile()
            raise

    def _timer(
        self, target: Device, place: torch.device, stack: ExitStack
    ) -> tuple[Timer | None, str]:
        """A timer if kernels are to be timed; else why there is none, if one was asked for."""
        if not self.measures:
            return None, ""
        if self.sequential(place):
            return None, "functions on the CPU are no kernels"
        try:
            return stack.enter_context(timing(target, _index(place))), ""
        except EnvironmentRefused as error:
            return None, f"{error.refusal.found}; estimates chose"

    @property
    def measures(self) -> bool:
        """Whether kernels are timed."""
        return self.measure or self.mode.startswith("max-autotune")

    @property
    def choices(self) -> tuple[Any, ...]:
        """Options that decide what becomes of a graph of static shapes."""
        # What was measured holds for the GPUs that there are, and against who compiles the rest.
        against = (self.rest, *(each.name for each in find_gpus())) if self.measures else ()
        return (
            *(self.always, self.cascades, self.mode, against, self.early, self.products),
            connected(),
        )

    def runs_on(self, place: torch.device) -> bool:
        """Whether kernels run where tensors are.

        Parameters
        ----------
        place : torch.device
            Where they are.

        Returns
        -------
        bool
            On a GPU always; on the CPU with the option `cpu`.
        """
        return place.type == "cuda" or (place.type == "cpu" and bool(self.cpu))

    def sequential(self, place: torch.device) -> bool:
        """Whether scheduled functions run in the place of kernels.

        Parameters
        ----------
        place : torch.device
            Where the tensors are.

        Returns
        -------
        bool
            On the CPU with the option ``cpu="llvm"``.
        """
        return place.type == "cpu" and self.cpu == "llvm"

    def device_of(self, place: torch.device) -> Device:
        """What to compile for, for tensors at a place.

        Parameters
        ----------
        place : torch.device
            Where the tensors are.

        Returns
        -------
        Device
            The option `target`, else the GPU; on the CPU that of this machine, or an H100.

        Raises
        ------
        WorkloadRefused
            If the GPU there is no Hopper.
        """
        if self.target or place.type != "cuda":
            return device(self.target or None)
        capability = torch.cuda.get_device_capability(place)
        name = torch.cuda.get_device_name(place)
        if capability != (9, 0):
            raise refuse(
                WorkloadRefused,
                "torch-backend",
                str(place),
                found=f"{name} of compute capability {capability[0]}.{capability[1]}",
                limit="9.0, a Hopper GPU",
                instead="use another backend there",
            )
        here = dict(enumerate(local_devices())).get(_index(place))
        return device(here.name if here is not None else None)


@checked
def crossfuse(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="crossfuse")`` finds.

    Two layers of matrix products with what is computed between and after them, attention that is
    written as a formula, and single products of few rows become one kernel each where that is
    estimated to be faster; see `crossfuse.torch.reports`. Everything else is compiled by inductor,
    as without us. In training the graphs of the forward and of the backward pass are searched each
    for itself.

    Parameters
    ----------
    module : torch.fx.GraphModule
        What torch captured.
    inputs : Sequence[Any]
        Its example inputs.
    mode : str | None
        How inductor compiles the rest, such as ``"max-autotune"``; ``torch.compile`` passes it on.
    options : Mapping[str, Any] | None
        Fields of `Backend`, such as ``{"rest": "eager"}``; ``torch.compile`` passes them on.

    Returns
    -------
    Callable
        What torch calls instead of the graph.

    Raises
    ------
    WorkloadRefused
        For options that are none.

    Examples
    --------
    >>> fn = torch.compile(torch.nn.Linear(8, 4), backend="crossfuse", options={"rest": "eager"})
    >>> with torch.inference_mode():
    ...     tuple(fn(torch.zeros(2, 8)).shape)  # one layer, and no GPU: left to torch
    (2, 4)
    >>> graph = torch.fx.symbolic_trace(torch.nn.Identity())
    >>> crossfuse(graph, (), options={"bin": 16})
    Traceback (most recent call last):
    ...
    crossfuse.errors.WorkloadRefused: torch-backend: options: found 'bin'; limit: rest, always, ...
    """
    return Backend()(module, inputs, mode=mode, options=options)


def _refused(where: str, found: str, limit: str) -> RefusedError:
    return refuse(
        WorkloadRefused,
        "torch-backend",
        where,
        found=found,
        limit=limit,
        instead="name one of these",
    )


def _index(place: torch.device) -> int:
    """Index of the tensors' GPU; of tensors on the CPU, of the GPU that kernels would be for."""
    if place.type != "cuda":
        return 0
    return torch.cuda.current_device() if place.index is None else place.index


def _place(module: fx.GraphModule) -> torch.device:
    """The device of a graph's tensors, a GPU before the CPU; several GPUs are refused."""
    values = (each.meta.get("val") for each in module.graph.nodes)
    devices = dict.fromkeys(each.device for each in values if isinstance(each, torch.Tensor))
    gpus = [each for each in devices if each.type != "cpu"]
    if len(gpus) > 1:
        raise refuse(
            WorkloadRefused,
            "torch-backend",
            "graph",
            found=f"tensors on {', '.join(map(str, devices))}",
            limit="one GPU",
            instead="compile the parts of each GPU for themselves",
        )
    return next(iter([*gpus, *devices]), torch.device("cpu"))


def compile_eager(
    module: fx.GraphModule, inputs: Sequence[Any], fuse: Callable[[fx.GraphModule, str], Any]
) -> Callable[..., Any]:
    """Fuse a captured graph; the rest is compiled by nobody, torch runs it operator by operator.

    `fuse` replaces chains in a graph of aten operators, in place. With gradients these are two, cut
    as inductor cuts them, so that the same groups are found with either rest.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiler(part: str) -> Callable[..., Any]:
        def compile_part(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            fuse(graph, part)
            return make_boxed_func(graph.forward)

        return compile_part

    compiled = aot_autograd(
        fw_compiler=compiler(FORWARD),
        bw_compiler=compiler(BACKWARD),
        inference_compiler=compiler(""),
        partition_fn=min_cut_rematerialization_partition,
    )
    return compiled(module, inputs)
