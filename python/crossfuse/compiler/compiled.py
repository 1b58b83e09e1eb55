"""`compile`: choose a kernel and build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import ClusterSize, checked
from crossfuse.compiler.choose import Wanted, choose
from crossfuse.compiler.source import Source, read_source
from crossfuse.errors import ArtefactRefused, refuse
from crossfuse.files import scratch_folder
from crossfuse.hardware import Device, device
from crossfuse.measure.choice import Measured
from crossfuse.measure.timer import timing
from crossfuse.runtime.tensors import is_torch, to_torch
from crossfuse.schema import typed

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.lower.extract import Lowered
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan
    from crossfuse.relax.torch_import import Imported
    from crossfuse.runtime import Artefact, LoadedKernel


@dataclass(frozen=True)
class Compiled:
    """A kernel from source to library.

    Attributes
    ----------
    source : Source
        What was compiled.
    schedule : Any
        The ``tvm.s_tir.Schedule``, with its trace.
    lowered : Lowered
        Generated CUDA, launches, shared memory plan.
    artefact : Artefact
        The shared library and its manifest.
    target : Device
        What it was compiled for.
    plan : Plan | CascadePlan | None
        What it follows; None where a rule chose the tiles, or the caller scheduled it. The
        manifest's metadata have its place, tiles and microseconds, and those of not fusing, or why
        nothing was planned.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> "__global__" in kernel.lowered.image.cuda
    True
    >>> y = kernel(A, B_gate, B_up, D)  # on a GPU: torch tensors or numpy arrays  # doctest: +SKIP
    """

    source: Source
    schedule: Any
    lowered: Lowered
    artefact: Artefact
    target: Device
    plan: Plan | CascadePlan | None = None

    @property
    def measured(self) -> Measured | None:
        """Times of the kernels that it was chosen from, and of separate ones; None: not measured.

        Where `crossfuse.measure.choice.Measured.fuse` is False, separate kernels are faster.
        """
        found = self.artefact.manifest.metadata.get("measured")
        return None if found is None else typed(Measured, found)

    @cached_property
    def kernel(self) -> LoadedKernel:
        """The loaded library: called with all buffers, see `crossfuse.runtime.LoadedKernel`."""
        from crossfuse.runtime import load

        return load(self.artefact.shared_object)

    def __call__(self, *inputs: Any) -> Any:
        """Run on the GPU.

        Parameters
        ----------
        *inputs : tensor
            Of a torch module: its inputs, as CUDA tensors; the module's weights are used as they
            were when it was compiled. Of anything else: all inputs of the function, as torch CUDA
            tensors or numpy arrays.

        Returns
        -------
        tensor
            The output, in the framework of the first input.

        Raises
        ------
        EnvironmentRefused, ArtefactRefused
            If there is no GPU, or an argument does not fit.
        """
        outlined, imported = self.source.outlined, self.source.imported
        if outlined is None or imported is None:
            return self.kernel.run(*inputs)

        self._check_inputs(inputs, imported)
        values = [*inputs, *on_device(imported.params, inputs[0].device, self._weights)]
        output = self.kernel.run(*outlined.arrange(values))
        return output.reshape(outlined.output_shape)

    def _check_inputs(self, inputs: Sequence[Any], imported: Imported) -> None:
        """Refuse what a module was not compiled for: its kernel sees reshaped tensors only."""
        found = [_kind_of(each) for each in inputs]
        if found != self._due:
            raise refuse(
                ArtefactRefused,
                "argument-module",
                f"inputs {', '.join(imported.inputs)}",
                found=", ".join(found) or "none",
                limit=f"CUDA tensors of torch: {', '.join(self._due)}",
                instead="pass what the module was compiled for, or compile it for these inputs too",
            )

    @cached_property
    def _due(self) -> list[str]:
        """Types and shapes of the module's inputs, once for all calls."""
        imported = self.source.imported
        assert imported is not None
        kinds = [each.ty for each in imported.mod["main"].params[: len(imported.inputs)]]
        return [f"{each.dtype}{[int(size) for size in each.shape]}" for each in kinds]

    @cached_property
    def _weights(self) -> dict[Any, list[Any]]:
        """Copies of the module's weights, by device."""
        return {}


def _kind_of(value: Any) -> str:
    """Type and shape of a tensor of torch, else what it is instead."""
    if not is_torch(value):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


@checked
def compile(
    source: Any,
    *,
    example_inputs: Sequence[Any] | None = None,
    target: str | Device | None = None,
    rule: str = "auto",
    placement: str = "auto",
    cluster: ClusterSize | None = None,
    plan: Plan | CascadePlan | None = None,
    constant_weights: bool | None = None,
    fewer_rows: bool = False,
    database: str | Path | None = None,
    measure: bool = False,
    early: bool = False,
    directory: str | Path | None = None,
    name: str = "main",
) -> Compiled:
    """Compile a GEMM, GEMM chain, gated FFN or cascade of reductions into the best kernel of it.

    Without options that is the one with the least estimated time of all that Crossfuse builds:
    kernels of the Hopper pipeline (TMA, wgmma) in the tiles that the planner chooses, and of what
    has none, such as products of float32, kernels of ordinary instructions. Where the planner
    finds it faster not to fuse, the best fused kernel is compiled all the same, and its plan and
    its metadata say so. A cascade is written as one stream over its axis, see `crossfuse.cascade`.

    Parameters
    ----------
    source : Any
        The text of a workload or its spec, a torch module or exported program, a Relax module, a
        function, or a schedule: see `crossfuse.compiler.read_source`.
    example_inputs : Sequence[torch.Tensor] | None
        Inputs of a torch module.
    target : str | Device | None
        ``"nvidia-h100"`` or ``"nvidia-h200"``.
    rule : str
        Of chains. ``"tensor"``: the Hopper pipeline alone. ``"threads"``: one kernel of ordinary
        instructions that passes slices through DSM, with plain FMA: general, not fast.
        ``"auto"``: what the planner finds fastest of the Hopper pipeline and of kernels of few rows
        by plain FMA, else the second.
    placement : str
        Where the intermediate of a chain lives. ``"l2"``: one persistent kernel
        that all CTAs run at the same time, see `grid_stage`. ``"dsm"``: the shared memory of a
        cluster, see `dsm_shuffle`. ``"registers"``: those of the CTA that makes it; a
        cluster sums its parts. ``"global"``: one kernel for each product. ``"auto"``: the kernel
        with the least estimated time of all that rules build, place and tiles, see
        `crossfuse.plan`. Kernels of a given `cluster` have the tiles of the
        rules, in the place that the planner puts first. Of a cascade: where the state of a row is.
        ``"registers"``: one CTA makes it; ``"dsm"``: those of a cluster do; ``"global"``: several
        do, and a second kernel merges.
    cluster : int | None
        CTAs in a cluster of a chain's kernel; None leaves it to the planner.
    plan : Plan | CascadePlan | None
        What to compile, instead of what the planner chooses; placement ``"auto"``, and not rule
        ``"threads"``.
    constant_weights : bool | None
        Whether no kernel writes the weights shortly before this one reads them, so that it may
        load them before the kernel before is over. None: what the source says. Parameters of a
        torch module or of an exported program are constant, and the weights of a workload that is
        named; arguments of a Relax module or a function are not.
    fewer_rows : bool
        Whether the kernels also take fewer rows than the workload has, see `accept_fewer_rows`.
        The Hopper pipeline alone, and no torch or Relax module.
    database : str | Path | None
        Folder of a tuning session (``crossfuse tune --work-dir``): the fastest kernel that was
        measured there is compiled, whatever rule and placement say.
    measure : bool
        Whether to time the first few kernels of the plan on the GPU of this machine, beside torch's
        separate kernels where torch knows the source, and to compile the fastest kernel; see
        `Compiled.measured`. What was timed once is kept, for each GPU.
    early : bool
        Whether the kernels start while the kernel before them runs, and wait for it before they
        touch what it may write: for kernels that are called one behind the other, of which the
        first is called by `crossfuse.runtime.LoadedKernel.as_first`. Constant weights are loaded
        before that.
    directory : str | Path | None
        Where ``<name>.so`` and ``<name>.json`` go; None makes a directory that goes with the
        process.
    name : str
        Name of the function in the library.

    Returns
    -------
    Compiled
        Schedule, generated code and library.

    Raises
    ------
    WorkloadRefused, ScheduleRefused, LoweringRefused
        If there is no correct kernel of this kind, with the reason.
    EnvironmentRefused
        If nvcc or a C++ compiler is missing; to measure, without torch, or a Hopper GPU that the
        target names.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64")
    >>> kernel.plan.family  # where the planner keeps the intermediate
    'registers'
    """
    from crossfuse.runtime import build_library

    read = read_source(source, example_inputs)
    spec = device(target)
    given = (rule, placement, cluster, plan, constant_weights, fewer_rows, database, early)
    wanted = Wanted(*given)
    with timing(spec) if measure else nullcontext() as timer:
        chosen = choose(read, spec, wanted, name, timer)
    size = chosen.lowered.image.launches[0].cluster_size
    artefact = build_library(
        chosen.lowered.image,
        directory if directory is not None else scratch_folder(),
        device=spec,
        metadata={"source": read.summary, "cluster": size, **chosen.why},
        schedule_trace=_trace(chosen.schedule),
    )
    return Compiled(read, chosen.schedule, chosen.lowered, artefact, spec, chosen.option.plan)


def _trace(schedule: Any) -> str:
    """The schedule's trace as JSON text."""
    from crossfuse.schedule.records import trace_json

    return trace_json(schedule.trace)


# A module's weights as tensors of the device that the kernel runs on.


def on_device(
    params: Mapping[str, np.ndarray], device: Any, copies: dict[Any, list[Any]]
) -> list[Any]:
    """A module's weights in order, copied to `device` at the first call.

    `copies` caches them by device, and is extended here.
    """
    if device not in copies:
        copies[device] = [to_torch(array).to(device) for array in params.values()]
    return copies[device]
