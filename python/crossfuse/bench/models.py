"""Variants of a model: our backend, torch.compile, and eager torch."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from crossfuse.bench.job import (
    COMPILE_MODES,
    OURS,
    OURS_AUTOTUNE,
    OURS_EAGER,
    Floor,
    Planned,
    Row,
    Variant,
    no_such,
    roofs_of,
)
from crossfuse.bench.plan import in_processes
from crossfuse.bench.problem import Bound, Problem, judged
from crossfuse.hardware import device
from crossfuse.measure.job import Job
from crossfuse.models.spec import Convolutions, ModelSpec, Widths, names_one, parse

if TYPE_CHECKING:
    from crossfuse.measure.timing import TimingConditions
    from crossfuse.models.zoo import Built
    from crossfuse.workload.tolerances import Tolerance

#: Who compiles what our kernels leave, by variant, as fields of the backend.
REST: dict[str, dict[str, Any]] = {
    OURS: {"rest": "inductor"},
    OURS_AUTOTUNE: {"rest": "inductor", "mode": COMPILE_MODES["autotune"]},
    OURS_EAGER: {"rest": "eager"},
}
#: Every variant that a model has.
VARIANTS = (*REST, "eager", *COMPILE_MODES)


def way(name: str, built: Built, **options: Any) -> tuple[Callable[[], Any], str]:
    """Compile a model as a variant and call it once; gives its computation and a note.

    The note has our kernels and the seconds of the first call, most of which is compilation. The
    computation runs on the model's inputs, on the current stream. Further `options` are those of
    `crossfuse.torch.Backend`, for variants of ours; names that are not in `VARIANTS` are refused.
    """
    import torch

    if name not in VARIANTS:
        limit = "variants of models: " + ", ".join(VARIANTS)
        raise no_such(name, built.spec, limit, "choose some of these")
    module: Any = built.module
    if name in REST:
        from crossfuse.torch import Backend

        backend = Backend(**{**REST[name], **options})
        module = torch.compile(built.module, backend=backend, dynamic=False)
    elif name in COMPILE_MODES:
        module = torch.compile(built.module, mode=COMPILE_MODES[name], dynamic=False)
    before = _seen() if name in REST else 0
    start = time.perf_counter()
    module(*built.inputs)
    seconds = time.perf_counter() - start
    kernels = f"{_fused(before)}; " if name in REST else ""
    return lambda: module(*built.inputs), f"{kernels}first call {seconds:.1f} s"


def _seen() -> int:
    from crossfuse.torch import reports

    return len(reports())


def _fused(before: int) -> str:
    """Kernels of ours in the graphs that this process compiled after the first `before`."""
    from crossfuse.torch import reports

    new = reports()[before:]
    found = Counter(name for each in new for name in each.fused)
    left = [each.reason for each in new if each.reason]
    named = [f"{name} x{count}" if count > 1 else name for name, count in found.items()]
    return ", ".join([*named, *left]) or "nothing fused"


# Compiles models in parallel, before they are timed one after another.

#: Bytes of weights of a model above which it is left to its job: several are on the GPU at once.
_MOST_BYTES = 4 * 10**9


def compile_models(planned: Sequence[Planned], workers: int, timeout: float) -> int:
    """Fill the caches of our kernels and of inductor for timed jobs; returns how many compiled.

    A model that fails, is too large to share the GPU, or is not done after `timeout` seconds, is
    left to its job, which says why. No workers: nothing is compiled.
    """
    wanted = dict.fromkeys(
        (each.job.spec, each.job.variant)
        for each in planned
        if names_one(each.job.spec)
        and each.job.variant != "eager"
        and each.compulsory <= _MOST_BYTES
    )
    return in_processes(_compile, list(wanted), workers, timeout)


def _compile(spec: str, variant: str, device: str = "cuda") -> bool:
    import torch

    from crossfuse.models.zoo import build

    torch.compiler.reset()
    with torch.no_grad():
        try:
            way(variant, build(parse(spec), device))
        except Exception:  # its job reports it
            return False
    return True


# Turns models of a command line into jobs.


def spread(text: str, rows: Sequence[int]) -> list[ModelSpec]:
    """Parse a model and spread it over numbers of new tokens, by default only that of its text."""
    spec = parse(text)
    return [replace(spec, tokens=each) for each in rows] or [spec]


def label(spec: ModelSpec) -> str:
    """The model without its tokens, which have a column of their own in tables."""
    words = str(spec).split(",")
    return ",".join(each for each in words if not each.startswith("tokens="))


def planned(spec: ModelSpec, job: Job) -> list[Planned]:
    """The job of a model; for eager torch also that of its feed-forward networks alone.

    Their share of the time bounds what fusing them can save.
    """
    specs = [spec]
    networks = not isinstance(spec.widths, Convolutions)
    if job.variant == "eager" and spec.part == "whole" and networks:
        specs.append(replace(spec, part="mlp", cache=0, head=False))
    return [_planned(each, job) for each in specs]


def _planned(spec: ModelSpec, job: Job) -> Planned:
    from crossfuse.models.zoo import cost

    moved, flops = cost(spec)
    least = Floor(moved, flops, roofs_of(device())).microseconds
    own = replace(job, spec=str(spec), calls=1)
    return Planned(label(spec), spec.rows, least, own, moved)


# What tables of times leave out about models: shares of feed-forward networks, and means.


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines about the models among some rows.

    For each model and state of the cache the share that its feed-forward networks have of eager's
    time, and the bound that sets; the kernels of each variant of ours; then geometric means of
    baselines over each of ours.
    """
    times = {
        (parse(row.planned.job.spec), row.planned.job.l2, row.planned.job.variant): row
        for row in rows
        if names_one(row.planned.job.spec)
    }
    places = dict.fromkeys((spec, l2) for spec, l2, _ in times)
    own = dict.fromkeys(name for _, _, name in times if name in REST)
    lines = [each for place in places for each in _shares(times, *place)]
    for name in own:
        for where in places:
            row = times.get((*where, name))
            if row is not None and row.timing.status == "ok":
                lines.append(f"{_place(*where)}: {name}: {row.timing.message}")
    return [*lines, *_means(times, own)]


_Times = dict[tuple[ModelSpec, str, str], Row]


def _shares(times: _Times, spec: ModelSpec, l2: str) -> list[str]:
    whole = _time(times, spec, l2, "eager")
    part = _time(times, replace(spec, part="mlp", cache=0, head=False), l2, "eager")
    if spec.part != "whole" or whole is None or part is None:
        return []
    share = f"{_place(spec, l2)}: feed-forward networks alone {part:.1f} of {whole:.1f} us"
    rest = whole - part
    bound = f"; at no time for them {whole / rest:.2f}x over eager" if rest > 0 else ""
    return [f"{share}, {part / whole:.0%}{bound}"]


def _means(times: _Times, own: Iterable[str]) -> list[str]:
    lines = []
    baselines = dict.fromkeys(name for _, _, name in times if name not in REST)
    wholes = dict.fromkeys((s, l2) for s, l2, _ in times if s.part == "whole")
    for name in own:
        for other in baselines:
            pairs = [(_time(times, *w, other), _time(times, *w, name)) for w in wholes]
            ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                lines.append(
                    f"{other} over {name}: {mean:.3f}x (geometric mean of {len(ratios)}), least "
                    f"{min(ratios):.3f}x"
                )
    return lines


def _time(times: _Times, spec: ModelSpec, l2: str, name: str) -> float | None:
    row = times.get((spec, l2, name))
    return None if row is None else row.timing.microseconds


def _place(spec: ModelSpec, l2: str) -> str:
    return f"{spec} ({l2})"


@dataclass
class ModelProblem(Problem):
    """A model, which is made, and computed in float64 too, when it is measured."""

    spec: ModelSpec
    checked: bool = True
    _limits: Tolerance | None = None

    def variant(self, name: str, device: str) -> Variant:
        """A way to compute it; a model that no CUDA graph takes is launched without one."""
        from crossfuse.models.zoo import build

        built = build(self.spec, device)
        # Before anything is compiled: the weights move.
        self._limits = tolerance(built) if self.checked else None
        call, note = way(name, built)
        return Variant(call, note, streams=True)

    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """There is one set of weights, and one call between two timestamps.

        Weights of layers are more than the L2 cache holds, and a cold cache is flushed before each.
        """
        limits = self._limits
        judges = [] if limits is None else [lambda output: judged(limits, output, str(self.spec))]
        return Bound(replace(how, calls=1), [variant.call], judges)


def tolerance(built: Built) -> Tolerance:
    """Allowed error of a variant of a model: twice that of eager torch in the same type."""
    import torch

    from crossfuse.runtime.tensors import to_numpy
    from crossfuse.workload.tolerances import plain_tolerance

    with torch.no_grad():
        eager = to_numpy(built.module(*built.inputs))
    return plain_tolerance(to_numpy(built.exact()), eager, _depth(built.spec))


def _depth(spec: ModelSpec) -> int:
    """Terms of the longest sum of the model."""
    widths = spec.widths
    return widths.intermediate if isinstance(widths, Widths) else 9 * max(widths.channels)
