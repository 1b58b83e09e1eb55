"""`compile`: schedule by rule, lower, build; and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import ClusterSize, checked
from crossfuse.compiler.arguments import check_known, check_no_model, check_plan
from crossfuse.compiler.cascades import cascade_options, is_cascade
from crossfuse.compiler.option import Option
from crossfuse.compiler.placement import PLACEMENTS, tensor_options
from crossfuse.compiler.recorded import recorded_options
from crossfuse.compiler.source import Source, read_source
from crossfuse.compiler.threads import thread_options
from crossfuse.errors import LoweringRefused, RefusedError, ScheduleRefused, refuse
from crossfuse.files import scratch_folder
from crossfuse.hardware import Device, device
from crossfuse.schedule.rules.tiles import Tiles

if TYPE_CHECKING:
    from crossfuse.lower.extract import Lowered
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan
    from crossfuse.runtime import Artefact, LoadedKernel

#: Ways of scheduling a canonical function.
RULES = ("threads", "tensor")


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
        What it follows: of a cascade, and of rule ``"tensor"`` and placement ``"auto"``. The
        manifest's metadata have its place, tiles and microseconds, and those of not fusing.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64", cluster=4)
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
        from crossfuse.compiler.weights import on_device

        values = [*inputs, *on_device(imported.params, inputs[0].device, self._weights)]
        output = self.kernel.run(*outlined.arrange(values))
        return output.reshape(outlined.output_shape)

    @cached_property
    def _weights(self) -> dict[Any, list[Any]]:
        """Copies of the module's weights, by device."""
        return {}


@checked
def compile(
    source: Any,
    *,
    example_inputs: Sequence[Any] | None = None,
    target: str | Device = "nvidia-h100",
    cluster: ClusterSize | None = None,
    tiles: Tiles | None = None,
    ring: bool = True,
    scatter: bool = True,
    rule: str = "threads",
    placement: str = "auto",
    plan: Plan | CascadePlan | None = None,
    constant_weights: bool = False,
    fewer_rows: bool = False,
    database: str | Path | None = None,
    directory: str | Path | None = None,
    name: str = "main",
) -> Compiled:
    """Compile a GEMM, GEMM chain, gated FFN or cascade of reductions into one kernel.

    A cascade is written as one stream over its axis, see `crossfuse.cascade`; the options that say
    how chains are scheduled do not matter to it.

    Parameters
    ----------
    source : str | WorkloadSpec | CascadeSpec | torch.nn.Module | IRModule | PrimFunc | Schedule
        See `crossfuse.compiler.read_source`.
    example_inputs : Sequence[torch.Tensor] | None
        Inputs of a torch module.
    target : str | Device
        ``"nvidia-h100"`` or ``"nvidia-h200"``.
    cluster : int | None
        CTAs in a cluster; None takes the first size that fits, 8 and 4 first.
    tiles : Tiles | None
        Tile sizes; what is left out is chosen.
    ring : bool
        Chains: pass slices in ring order, see `dsm_shuffle`.
    scatter : bool
        Single products: reduce-scatter or all-exchange, see `dsm_reduce`.
    rule : str
        ``"threads"``: one kernel of ordinary instructions that passes slices through DSM.
        ``"tensor"``: kernels of the Hopper pipeline (TMA, wgmma); `ring`, `scatter` and `tiles` do
        not matter.
    placement : str
        Rule ``"tensor"``: where the intermediate of a chain lives. ``"l2"``: one persistent kernel
        that all CTAs run at the same time, see `grid_stage`. ``"dsm"``: the shared memory of a
        cluster, see `dsm_shuffle`; ``"dsm-unordered"``: the same, and TMA adds the partial sums of
        clusters in the order in which they come. ``"registers"``: those of the CTA that makes it; a
        cluster sums its parts. ``"global"``: one kernel for each product. ``"auto"``: the kernel
        with the least estimated time of all that rules build, place and tiles, see
        `crossfuse.plan`; even if not to fuse was estimated to be faster. Convolutions, and kernels
        of a given `cluster`, have the tiles of the rules, in the place that the planner puts
        first. Of a cascade: where the state of a row is. ``"registers"``: one CTA makes it;
        ``"dsm"``: those of a cluster do; ``"global"``: several do, and a second kernel merges.
    plan : Plan | CascadePlan | None
        Rule ``"tensor"`` with placement ``"auto"``, or a cascade: what to compile; None plans the
        source.
    constant_weights : bool
        Rule ``"tensor"``, and rows before a product: promises that no kernel writes the weights
        shortly before this one reads them. It may then load them before the kernel before is over.
    fewer_rows : bool
        Whether the kernels also take fewer rows than the workload has, see `accept_fewer_rows`.
        Rule ``"tensor"`` and its schedules alone, and no torch or Relax module.
    database : str | Path | None
        Folder of a tuning session (``crossfuse tune --work-dir``): the fastest kernel that was
        measured there is compiled, whatever rule, placement and tiles say.
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
        If nvcc or a C++ compiler is missing.

    Examples
    --------
    >>> import crossfuse
    >>> kernel = crossfuse.compile("gated_ffn:M=16,K=64,N=128,L=64", cluster=4)
    >>> kernel.lowered.image.launches[0].cluster
    (4, 1, 1)
    """
    from crossfuse.runtime import build_library

    read = read_source(source, example_inputs)
    spec = device(target)
    check_known("rule", rule, RULES)
    check_known("placement", placement, PLACEMENTS)
    cascade = is_cascade(read)
    check_plan(read, rule, placement, plan, cluster, cascade)
    wanted: Any = plan  # of what is compiled, as was checked
    if read.schedule is not None:
        options = [Option(lambda: read.schedule)]
    elif database is not None:
        options = recorded_options(read, database, spec, constant_weights)
    elif cascade:
        options = cascade_options(read, spec, wanted, constant_weights, placement)
    elif rule == "tensor":
        options = tensor_options(
            read, placement, spec, plan=wanted, cluster=cluster or 0, constant=constant_weights
        )
    else:
        options = thread_options(read.func, cluster, tiles, ring=ring, scatter=scatter)
    if fewer_rows:
        check_no_model(read)
        options = [replace(each, make=partial(_with_fewer_rows, each.make)) for each in options]
    option, schedule, lowered = _first_that_fits(read, options, spec, name)
    size = lowered.image.launches[0].cluster_size
    artefact = build_library(
        lowered.image,
        directory if directory is not None else scratch_folder(),
        device=spec,
        metadata={"source": read.summary, "cluster": size, **option.why},
        schedule_trace=_trace(schedule),
    )
    return Compiled(read, schedule, lowered, artefact, spec, option.plan)


def _first_that_fits(
    read: Source,
    options: Sequence[Option],
    spec: Device,
    name: str,
) -> tuple[Option, Any, Lowered]:
    """Schedule and lower in the first way that gives a correct kernel."""
    from crossfuse.lower.extract import lower

    refusals: list[RefusedError] = []
    for option in options:
        try:
            schedule = option.make()
            return option, schedule, lower(schedule, spec, name=name)
        except (ScheduleRefused, LoweringRefused) as error:
            refusals.append(error)
    raise _none_fits(read, refusals)


def _with_fewer_rows(make: Callable[[], Any]) -> Any:
    """A schedule whose kernels take fewer rows; the caller's own one stays as it is."""
    from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows

    schedule = make().copy()
    accept_fewer_rows(schedule)
    return schedule


def _none_fits(source: Source, refusals: list[RefusedError]) -> RefusedError:
    """The refusal itself, or of several the one that names them all."""
    reasons = dict.fromkeys(str(each.refusal.found) for each in refusals)
    if len(reasons) == 1:
        return refusals[0]
    return refuse(
        ScheduleRefused,
        "compile",
        source.summary,
        found="; ".join(list(reasons)[:3]),
        limit="a cluster size of 1 to 16 for which a rule has a schedule that fits",
        instead="give cluster and tiles, or write the schedule with the primitives",
    )


def _trace(schedule: Any) -> str:
    """The schedule's trace as JSON text."""
    from crossfuse.schedule.trace_json import trace_json

    return trace_json(schedule.trace)
