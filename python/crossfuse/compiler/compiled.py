"""`compile`: choose a kernel and build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfuse.calls import ClusterSize, checked
from crossfuse.compiler.options import (
    PLACEMENTS,
    Option,
    cascade_options,
    is_cascade,
    recorded_options,
    tensor_options,
)
from crossfuse.compiler.source import Source, read_source
from crossfuse.errors import (
    ArtefactRefused,
    LoweringRefused,
    RefusedError,
    Rule,
    ScheduleRefused,
    refuse,
)
from crossfuse.files import scratch_folder
from crossfuse.hardware import Device, device
from crossfuse.measure.choice import Measured
from crossfuse.measure.timer import timing
from crossfuse.planner.cascade.plan import CascadePlan
from crossfuse.runtime.tensors import is_torch, to_torch
from crossfuse.schema import typed

if TYPE_CHECKING:
    import numpy as np

    from crossfuse.lower.extract import Lowered
    from crossfuse.measure.timer import Timer
    from crossfuse.planner.cascade.plan import CascadePlan
    from crossfuse.planner.plan import Plan
    from crossfuse.relax.torch_import import Imported
    from crossfuse.runtime import Artefact, LoadedKernel

_refused = Rule(ScheduleRefused, "compile")

# The choice of a source's kernel: the options to schedule it, and the best of its kind.

# Checks of arguments of `compile` that do not go together, before anything is scheduled.


def check_known(what: str, found: str, known: tuple[str, ...]) -> None:
    """Refuse a name that is not among an argument's known names."""
    if found not in known:
        raise _refused(
            what,
            found=repr(found),
            limit=", ".join(map(repr, known)),
            instead=f"name one of these {what}s, or pass a schedule",
        )


def check_place(rule: str, placement: str, cascade: bool) -> None:
    """Refuse a placement of the intermediate for kernels of ordinary instructions."""
    if rule == "threads" and placement != "auto" and not cascade:
        raise _refused(
            "placement",
            found=f"{placement!r} with rule='threads'",
            limit="'auto': kernels of this rule keep an intermediate in DSM",
            instead="leave the rule out, or the placement",
        )


def check_plan(
    source: Source,
    rule: str,
    placement: str,
    plan: Plan | CascadePlan | None,
    cluster: int | None,
    cascade: bool = False,
) -> None:
    """Refuse a plan that would be ignored, or a cluster size beside a plan."""
    if plan is None:
        return
    if cascade or isinstance(plan, CascadePlan):
        _check_cascade_plan(source, plan, cascade)
        return
    known = rule != "threads" and placement == "auto" and source.func is not None
    if known and not cluster:
        return
    found = f"a plan with rule={rule!r} and placement={placement!r}"
    if known:
        found = f"a plan, which has clusters, and cluster={cluster}"
    raise _refused(
        "plan",
        found="a plan and a schedule" if source.schedule is not None else found,
        limit="a plan with rule='auto' or 'tensor' and placement='auto', of a source without a "
        "schedule, and no cluster",
        instead="pass these, or leave the plan out",
    )


def _check_cascade_plan(source: Source, plan: Plan | CascadePlan, cascade: bool) -> None:
    """Refuse a plan of anything but the cascade that is compiled."""
    if cascade and isinstance(plan, CascadePlan) and plan.shape.name == source.summary:
        return
    what = "a cascade" if cascade else "no cascade of reductions"
    of = f"a plan of {plan.shape.name}" if isinstance(plan, CascadePlan) else "a plan of a chain"
    raise _refused(
        "plan",
        found=f"{of} for {source.summary}, {what}",
        limit="a plan of what is compiled",
        instead="plan this workload, or leave the plan out",
    )


def check_no_model(read: Source) -> None:
    """Refuse a model, whose inputs and output are reshaped to the shapes it was compiled with."""
    if read.outlined is not None:
        raise _refused(
            "fewer_rows",
            found=read.summary,
            limit="a spec, a function or a schedule: a model has the shapes of its example inputs",
            instead="compile the model's chain as a spec",
        )


# Options to schedule a chain as one kernel of ordinary instructions, for any cluster size.

#: Tried in order where the caller leaves the cluster size open: portable sizes first.
_CLUSTER_SIZES = (8, 4, 16, 2, 7, 6, 5, 3, 1)


def thread_options(func: Any, cluster: int | None = None) -> list[Option]:
    """Options to schedule a canonical function by the rule for its number of products.

    There is one for each cluster size, or for the given one alone.
    """
    sizes = (cluster,) if cluster else _CLUSTER_SIZES
    return [Option(partial(_by_rule, func, each), why={"rule": "threads"}) for each in sizes]


def _by_rule(func: Any, cluster: int) -> Any:
    from crossfuse import _tvm as ir
    from crossfuse.blocks.chain import read_chain
    from crossfuse.schedule.rules.threads import schedule_ffn, schedule_split_k

    single = read_chain(ir.Schedule(func)).second is None
    return (schedule_split_k if single else schedule_ffn)(func, cluster=cluster)


#: Ways of scheduling a canonical function.
RULES = ("auto", "tensor", "threads")


@dataclass(frozen=True)
class Wanted:
    """The options of `crossfuse.compile` that narrow its choice of a kernel, documented there."""

    rule: str = "auto"
    placement: str = "auto"
    cluster: int | None = None
    plan: Plan | CascadePlan | None = None
    constant_weights: bool | None = None
    fewer_rows: bool = False
    database: str | Path | None = None
    early: bool = False


@dataclass(frozen=True)
class Chosen:
    """A kernel that was scheduled and lowered, but not built yet."""

    option: Option
    #: The ``tvm.s_tir.Schedule``.
    schedule: Any
    lowered: Lowered
    #: Why rules of higher preference were refused.
    refused: tuple[str, ...] = ()

    @property
    def why(self) -> dict[str, Any]:
        """The library's metadata about the choice, see `Option.why`."""
        return {**self.option.why, **({"refused": [*self.refused]} if self.refused else {})}


def choose(
    source: Source,
    target: Device,
    wanted: Wanted = Wanted(),
    name: str = "main",
    timer: Timer | None = None,
) -> Chosen:
    """Schedule and lower a source by the best option that gives a correct kernel.

    With a timer, the first few kernels are timed and the fastest is taken; else the first is. If no
    option lowers, the refusal is the one that all gave, or a `ScheduleRefused` that names the
    reasons.
    """
    from crossfuse.lower.extract import lower

    refusals: list[tuple[Any, RefusedError]] = []
    options = options_of(source, target, wanted)
    if timer is not None:
        from crossfuse.compiler.measure import measured_option

        how = repr((wanted, source.constant_weights))
        options = [measured_option(source, options, target, timer, how)]
    # What is planned lowers, if anything of the Hopper pipeline does; the next are to be measured.
    options = [each for each in options if each.plan is None or each is options[0]]
    for option in options:
        rule = option.why.get("rule")
        try:
            schedule = option.make()
            lowered = lower(schedule, target, name=name, early=wanted.early)
        except (ScheduleRefused, LoweringRefused) as error:
            refusals.append((rule, error))
        else:
            of_others = [error for other, error in refusals if other != rule]
            return Chosen(option, schedule, lowered, _reasons(of_others))
    raise _none_fits(source, [error for _, error in refusals])


def options_of(source: Source, target: Device, wanted: Wanted = Wanted()) -> Sequence[Option]:
    """Options to schedule a source, the best one first; see `choose`."""
    check_known("rule", wanted.rule, RULES)
    check_known("placement", wanted.placement, PLACEMENTS)
    cascade = is_cascade(source)
    check_place(wanted.rule, wanted.placement, cascade)
    check_plan(source, wanted.rule, wanted.placement, wanted.plan, wanted.cluster, cascade)
    constant = wanted.constant_weights
    if constant is None:
        constant = source.constant_weights
    plan: Any = wanted.plan  # of what is compiled, as was checked
    if source.schedule is not None:
        options = [Option(lambda: source.schedule)]
    elif wanted.database is not None:
        options = recorded_options(source, wanted.database, target, constant)
    elif cascade:
        options = cascade_options(source, target, plan, constant, wanted.placement)
    else:
        options = _of_chain(source, target, wanted, plan, constant)
    if wanted.fewer_rows:
        check_no_model(source)
        options = [replace(each, make=partial(_with_fewer_rows, each.make)) for each in options]
    return options


def _of_chain(
    source: Source, target: Device, wanted: Wanted, plan: Plan | None, constant: bool
) -> list[Option]:
    """The planner's options, then ordinary instructions for what the Hopper pipeline cannot do."""
    options: list[Option] = []
    if wanted.rule != "threads":
        # Of padded operands a call has all rows; a plan is of them, or of something else.
        padded = None if wanted.fewer_rows and plan is None else source.padded
        options += tensor_options(
            padded or source,
            wanted.placement,
            target,
            plan=plan,
            cluster=wanted.cluster or 0,
            constant=constant and padded is None,
            pipelined=wanted.rule == "tensor" or wanted.fewer_rows,
        )
    if wanted.rule != "tensor" and wanted.placement == "auto" and plan is None:
        options += thread_options(source.func, wanted.cluster)
    return options


def _with_fewer_rows(make: Callable[[], Any]) -> Any:
    """A schedule whose kernels accept fewer rows; the caller's own schedule is not changed."""
    from crossfuse.schedule.accept_fewer_rows import accept_fewer_rows

    schedule = make().copy()
    accept_fewer_rows(schedule)
    return schedule


def _reasons(refusals: Sequence[RefusedError]) -> tuple[str, ...]:
    """Distinct findings of the refusals."""
    return tuple(dict.fromkeys(str(each.refusal.found) for each in refusals))


def _none_fits(source: Source, refusals: list[RefusedError]) -> RefusedError:
    """The refusal itself if all found the same, else one that names each rule that was broken."""
    if len(_reasons(refusals)) == 1:
        return refusals[0]
    return _refused(
        source.summary,
        found=_of_each_rule(refusals),
        limit="a cluster size of 1 to 16 for which a rule has a schedule that fits",
        instead="give rule and cluster, or write the schedule with the primitives",
    )


#: Characters of findings that fit on a screen.
_SCREEN = 400


def _of_each_rule(refusals: Sequence[RefusedError]) -> str:
    """The shortest finding of each broken rule, these in their order by length.

    Where they are too long for a screen the rules alone are named.
    """
    shortest: dict[str, str] = {}
    for refusal in sorted((each.refusal for each in refusals), key=lambda each: len(each.found)):
        shortest.setdefault(refusal.rule, refusal.found)
    shown, left = "", dict(shortest)
    for rule, found in shortest.items():
        more = f"{shown}; {rule}: {found}" if shown else f"{rule}: {found}"
        if shown and len(more) > _SCREEN:
            break
        shown, _ = more, left.pop(rule)
    return f"{shown}; and {', '.join(left)}" if left else shown


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
    from crossfuse.schedule.planned import trace_json

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
