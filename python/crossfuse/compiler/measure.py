"""Times on this machine's GPU: of a compiled kernel, and of a source's options to choose among."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from crossfuse.calls import checked
from crossfuse.compiler.options import Option
from crossfuse.compiler.source import Source
from crossfuse.errors import EnvironmentRefused, LoweringRefused, RefusedError, refuse
from crossfuse.hardware import Device
from crossfuse.measure.choice import FEW, Entrant, Measured, measured_choice
from crossfuse.measure.job import LIBRARY, PROGRAM, SPEC, Given, Way
from crossfuse.measure.timer import Timer
from crossfuse.measure.timing import TimingConditions, measure, quietest, steps
from crossfuse.planner.explain.tables import tiles_text
from crossfuse.runtime.tensors import to_torch

if TYPE_CHECKING:
    from crossfuse.compiler.compiled import Compiled
    from crossfuse.compiler.problem import Problem
    from crossfuse.lower.extract import Lowered


# A compiled kernel.

RUNS = 30
#: One call at a time, on one set of inputs: nothing of it is in the L2 cache, which is flushed.
ONE_CALL = TimingConditions(repeats=RUNS, calls=1)


@dataclass(frozen=True)
class Timing:
    """Median time of one run with a cold L2 cache, replayed from a CUDA graph."""

    #: Median over the runs.
    microseconds: float
    #: The same for the torch module in eager mode, where the source is one.
    baseline: float | None
    #: Name of the GPU.
    device: str
    #: Number of timed runs.
    runs: int


@checked
def time_kernel(compiled: Compiled, problem: Problem) -> Timing:
    """Time a kernel, and the torch module it came from, on the same inputs.

    Parameters
    ----------
    compiled : Compiled
        The kernel.
    problem : Problem
        Its inputs, see `crossfuse.compiler.problem.make_problem`.

    Returns
    -------
    Timing
        Medians in microseconds.

    Raises
    ------
    EnvironmentRefused
        Without torch or a CUDA device.

    Examples
    --------
    >>> import crossfuse
    >>> from crossfuse.compiler.checks import make_problem
    >>> kernel = crossfuse.compile("S8")  # doctest: +SKIP
    >>> problem = make_problem(kernel.source, kernel.schedule)  # doctest: +SKIP
    >>> time_kernel(kernel, problem)  # doctest: +SKIP
    """
    torch = _torch()
    buffers = compiled.lowered.image.buffers
    tensors = [
        torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="cuda")
        if each.output
        else to_torch(problem.inputs[each.name]).cuda()
        for each in buffers
    ]
    fused = median_microseconds(lambda: compiled.kernel(*tensors))
    baseline = None
    if compiled.source.module is not None:
        import copy

        module = copy.deepcopy(compiled.source.module).cuda()
        inputs = [each for each, spec in zip(tensors, buffers, strict=True) if not spec.output]
        with torch.no_grad():
            baseline = median_microseconds(lambda: module(inputs[0]))
    return Timing(fused, baseline, torch.cuda.get_device_name(), RUNS)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        found = "no torch"
    else:
        if torch.cuda.is_available():
            return torch
        found = "no CUDA device"
    raise refuse(
        EnvironmentRefused,
        "measure",
        "this machine",
        found=found,
        limit="torch and a GPU of compute capability 9.0",
        instead="run the command on such a machine; the checks above need none",
    )


def median_microseconds(run: Callable[[], Any]) -> float:
    """Median microseconds of a CUDA graph of one call, the L2 cache flushed before each replay.

    `run` launches on torch's current stream; it is called once before it is captured.
    """
    torch = _torch()
    run()
    torch.cuda.synchronize()
    timed = steps(ONE_CALL, [run])
    return statistics.median(quietest(lambda: measure(ONE_CALL, timed)))


# The choice among options.


def measured_option(
    source: Source, options: Sequence[Option], target: Device, timer: Timer, how: str
) -> Option:
    """The option whose kernel is the fastest, with all times in its metadata.

    Options come by estimate, and the first few that lower are timed; `how` is whatever decides how
    they are scheduled beside their plans, as a part of the cache key. The choice is a kernel of
    ours, even where separate kernels are faster. If none lowers or none runs, `LoweringRefused` is
    raised.
    """
    way = "" if source.spec is None and source.cascade is None else SPEC
    way = PROGRAM if source.module is not None else way
    with TemporaryDirectory(prefix="crossfuse-measure-") as folder:
        found = measured_choice(
            timer,
            target,
            [_content(source, options), how, str(FEW), way],
            source.summary,
            lambda: entrants(source, options, target, Path(folder)),
            lambda: baseline(source, Path(folder)),
        )
    best = found.best
    if best is None:
        raise _none_runs(source, found)
    chosen = options[best.place]
    return replace(chosen, why={**chosen.why, "measured": found.to_json()})


def entrants(
    source: Source, options: Sequence[Option], target: Device, folder: Path, few: int = FEW
) -> list[Entrant]:
    """Build libraries of the first `few` options that lower; at least one.

    An entrant that nvcc refuses has no way to run. If no option lowers, the refusal of the first
    one is raised.
    """
    from crossfuse.lower.extract import lower
    from crossfuse.runtime import build_library

    lowered: list[tuple[int, Lowered]] = []
    refusals: list[RefusedError] = []
    for place, option in enumerate(options):
        try:
            lowered.append((place, lower(option.make(), target, name="main")))
        except RefusedError as error:
            refusals.append(error)
        if len(lowered) == few:
            break
    if not lowered:
        raise refusals[0]

    def build(place: int, made: Lowered) -> Entrant:
        option = options[place]
        estimate = None if option.plan is None else option.plan.microseconds
        blank = Entrant(place, name_of(option, place), estimate, None)
        try:
            library = build_library(made.image, folder / str(place), device=target)
        except LoweringRefused as error:
            return replace(blank, message=str(error))
        given = [each for each in made.image.buffers if not each.output]
        inputs = tuple(
            Given(each.shape, each.dtype, cold=at > 0 or source.cascade is not None)
            for at, each in enumerate(given)
        )
        return replace(blank, way=Way(LIBRARY, str(library.shared_object), inputs))

    with ThreadPoolExecutor(len(lowered)) as pool:
        return list(pool.map(build, *zip(*lowered, strict=True)))


def baseline(source: Source, folder: Path) -> Way | None:
    """How torch computes a source, maybe by an exported program in `folder`; None if it cannot."""
    spec = source.cascade or source.spec
    if spec is not None:
        return Way(SPEC, str(spec))
    if source.module is None or source.imported is None:
        return None
    import torch

    variables = source.imported.mod["main"].params[: len(source.imported.inputs)]
    given = tuple(
        Given(tuple(map(int, each.ty.shape.values)), str(each.ty.dtype), cold=False)
        for each in variables
    )
    place = next((each.device for each in source.module.parameters()), None)
    inputs = tuple(
        torch.zeros(each.shape, dtype=getattr(torch, each.dtype), device=place) for each in given
    )
    path = folder / "program.pt2"
    torch.export.save(torch.export.export(source.module, inputs), path)
    return Way(PROGRAM, str(path), given)


def name_of(option: Option, place: int) -> str:
    """An option's family and tiles, for people."""
    if option.plan is None:
        return f"kernel {place + 1}"
    return f"{option.plan.family} ({tiles_text(option.plan.tiles)})"


def _content(source: Source, options: Sequence[Option]) -> str:
    """Cache key text of all that decides what is timed."""
    from crossfuse import _tvm as ir

    func = source.func if source.func is not None else source.schedule.mod
    plans = [None if each.plan is None else each.plan.to_json() for each in options]
    whys: list[Any] = [each.why for each in options]
    return json.dumps([ir.tvm.ir.save_json(func), plans, whys], default=str)


def _none_runs(source: Source, found: Measured) -> RefusedError:
    return refuse(
        LoweringRefused,
        "measure",
        source.summary,
        found="; ".join(each.text for each in found.ours),
        limit="a kernel that runs on the GPU of this machine",
        instead="leave measure out, and check the kernel with crossfuse.check",
    )
