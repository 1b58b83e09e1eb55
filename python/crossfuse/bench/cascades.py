"""Measures one cascade in this process: inputs on the GPU, some rows checked against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crossfuse import hardware
from crossfuse.bench.floor import Floor, roofs_of
from crossfuse.bench.job import OWN, Job, Timing
from crossfuse.bench.variant import no_such
from crossfuse.errors import CheckFailed
from crossfuse.measure.timing import How
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import CascadeSpec

if TYPE_CHECKING:
    from crossfuse.runtime.resources import ResourceUsage

#: Sets of inputs at most, and their bytes at most: a large set flushes the cache by itself.
_MOST_SETS = 16
_SET_BYTES = 8 * 10**9


def cascade_floor(spec: CascadeSpec) -> Floor:
    """Roofline of a cascade: every input read and every output written once, or its products.

    Causal attention counts the scores that are visible.
    """
    eight_bits = isinstance(spec, cascade_spec.QuantGemm)
    return Floor(spec.bytes, spec.flops, roofs_of(hardware.device()), eight_bits)


def rows_of(spec: CascadeSpec) -> int:
    """Rows of the first operand, by which tables tell cascades of one kind apart."""
    return prod(spec.operands[0].shape[:-1])


@dataclass(frozen=True)
class CascadeProblem:
    """What candidates of a cascade are checked against; references of rows are computed anew."""

    #: Text of the spec.
    what: str
    spec: CascadeSpec


@dataclass(frozen=True)
class CascadeWay:
    """A way to compute a cascade, with what is known of its kernels."""

    #: Takes the inputs in order, gives the output or outputs.
    run: Callable[..., Any]
    note: str = ""
    resources: tuple[ResourceUsage, ...] = ()


def measure_cascade(job: Job, spec: CascadeSpec, device: str = "cuda") -> Timing:
    """Check, time, and check again a cascade; see `crossfuse.bench.worker.measure_job`."""
    return measure_way(job, spec, _way(job.variant, spec, device), device)


def measure_way(job: Job, spec: CascadeSpec, way: CascadeWay, device: str = "cuda") -> Timing:
    """Check, time, and check again one way to compute a cascade; see `measure_cascade`."""
    import torch

    from crossfuse.measure.timing import groups, measure, quietest, steps

    with torch.no_grad():
        sets = draw_sets(job, spec, device)
        bound = [_bound(way, each) for each in sets]
        for each in bound:
            each()
        worst, message = _judge(spec, sets[0], bound[0]())
        if message and job.variant in OWN:
            return Timing("wrong", message, copies=len(sets), resources=way.resources)
        timed = steps(job, bound)
        times = quietest(lambda: measure(job, timed, device))
        # Nothing of an earlier run may be taken for the result of the last one.
        for output in _several(timed[-1].run()):
            output.fill_(float("nan") if output.is_floating_point() else -1)
        last = groups(len(sets), job.calls, job.l2)[len(timed) - 1][-1]
        after, late = _judge(spec, sets[last], timed[-1].run())
    found = Timing(
        "ok",
        way.note,
        worst_before=worst,
        worst_after=after,
        copies=len(sets),
        calls=timed[0].calls,
        resources=way.resources,
    )
    return found.judged(job, message or late, times)


def library_way(library: Path, device: str = "cuda") -> CascadeWay:
    """The way of a kernel of ours that has been built as a shared library."""
    from crossfuse.bench.ours import note_of
    from crossfuse.runtime import load

    kernel = load(library, check_device=device == "cuda")
    return CascadeWay(kernel.run, note_of(kernel.manifest), kernel.manifest.resources)


def eager_way(spec: CascadeSpec) -> CascadeWay:
    """The way of PyTorch's plain formula."""
    from crossfuse.bench.cascade_torch import formula

    return CascadeWay(formula("eager", spec))


def _way(name: str, spec: CascadeSpec, device: str) -> CascadeWay:
    from crossfuse.bench.cascade_torch import formula
    from crossfuse.bench.ours import compile_kernel, has_cascade, note_of

    if name == "unfused":
        return _apart(spec)
    if name not in OWN:
        return CascadeWay(formula(name, spec))
    if not has_cascade(name):
        raise no_such(name, spec, "a chain, which has an intermediate to place", "measure ours")
    kernel = compile_kernel(spec, OWN[name], hardware.device().name).kernel

    def run(*inputs: Any) -> Any:
        return kernel.run(*inputs)

    return CascadeWay(run, note_of(kernel.manifest), kernel.manifest.resources)


def _apart(spec: CascadeSpec) -> CascadeWay:
    """A norm and the feed-forward block behind it by two kernels of ours; others are refused."""
    from crossfuse.bench.ours import compile_kernel, norm_and_chain, note_of

    if not isinstance(spec, cascade_spec.NormFfn):
        limit = "a norm and a feed-forward block, which are kernels of their own too"
        raise no_such("unfused", spec, limit, "leave unfused out")
    target = hardware.device().name
    norm, chain = (compile_kernel(e, None, target).kernel for e in norm_and_chain(spec))
    count = len(spec.parameters)

    def run(x: Any, *others: Any) -> Any:
        rows = norm.run(x, *others[:count])
        return chain.run(rows, *others[count:], *((x,) if spec.residual else ()))

    note = "; ".join(note_of(each.manifest) for each in (norm, chain))
    resources = (*norm.manifest.resources, *chain.manifest.resources)
    return CascadeWay(run, note, resources)


def _bound(way: CascadeWay, inputs: dict[str, Any]) -> Callable[[], Any]:
    values = tuple(inputs.values())
    return lambda: way.run(*values)


def draw_sets(job: How, spec: CascadeSpec, device: str) -> list[dict[str, Any]]:
    """Draw several sets of inputs, so that none is in the L2 cache when it is read next."""
    from crossfuse.measure.timing import copies_needed

    size = spec.bytes
    wanted = copies_needed(size, job.calls, job.l2)
    count = max(1, min(wanted, _MOST_SETS * max(1, job.calls), _SET_BYTES // size))
    return [draw(spec, number, device) for number in range(count)]


def draw(spec: CascadeSpec, seed: int, device: str) -> dict[str, Any]:
    """Draw inputs on the device, as `crossfuse.workload.cascade_inputs` draws them on the host.

    They are named, in the order of the function's parameters; equal seeds give equal inputs on
    equal devices.
    """
    import torch

    from crossfuse.workload.cascade_inputs import FACTORS, WEIGHTS

    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for each in spec.operands:
        how: dict[str, Any] = {"device": device, "generator": generator}
        if each.dtype == "int32":
            most = spec.operands[0].shape[-1]
            found[each.name] = torch.randint(0, most, each.shape, dtype=torch.int32, **how)
            continue
        values = torch.randn(each.shape, **how)
        if each.name in FACTORS:
            values = (values / 2).exp_()
        elif each.name in WEIGHTS and len(each.shape) > 1:
            values /= each.shape[-1] ** 0.5
        found[each.name] = values.to(getattr(torch, each.dtype))
    return found


def _judge(spec: CascadeSpec, inputs: dict[str, Any], outputs: Any) -> tuple[float | None, str]:
    """Hold some rows against the float64 rule.

    Gives the largest error over the allowed one and no message, or None and how the rule is broken.
    """
    from crossfuse.workload.cascade_inputs import check

    part = sample(spec)
    named = dict(zip((each.name for each in spec.outputs), _several(outputs), strict=True))
    try:
        found = check(part.spec, part.take(inputs), part.take(named))
    except CheckFailed as error:
        return None, str(error)
    return max(each.worst for each in found.values()), ""


def _several(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


# Rows of a cascade that are few enough to be checked against float64.
#
# Rows of a cascade do not depend on each other, so that the expected values of some rows of the
# outputs are those of the same cascade with fewer rows.

#: Rows that are checked; of attention, heads.
ROWS = 32
_HEADS = 2
#: Of what is large, fewer.
_FEWER = {cascade_spec.MlaDecode: 1, cascade_spec.Variance: 8, cascade_spec.MomentOfInertia: 8}


@dataclass(frozen=True)
class Sample:
    """Some rows of a cascade, and how to cut them out of its tensors."""

    #: The cascade of these rows alone.
    spec: CascadeSpec
    #: Index into each operand and output that has rows; others are taken whole.
    picks: Mapping[str, Any]

    def take(self, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Cut the rows out of tensors on any device; returns them by name, on the host."""
        from crossfuse.runtime.tensors import to_numpy

        shapes = {each.name: each.shape for each in (*self.spec.operands, *self.spec.outputs)}
        found = {}
        for name, tensor in tensors.items():
            part = tensor[self.picks[name]] if name in self.picks else tensor
            found[name] = to_numpy(part.contiguous()).reshape(shapes[name])
        return found


def sample(spec: CascadeSpec, seed: int = 0) -> Sample:
    """Choose at most `ROWS` rows, among them the first and the last; reproducible by its seed."""
    rng = np.random.default_rng(seed)
    if isinstance(spec, cascade_spec.Attention):
        return _heads(spec, rng)
    total = getattr(spec, spec.counted)
    chosen = _some(rng, total, _FEWER.get(type(spec), ROWS))
    index = list(map(int, chosen))
    every = (*spec.operands, *spec.outputs)
    # Whatever has the rows as its first extent, and would not with another number of rows.
    changed: dict[str, Any] = {spec.counted: len(index)}
    fewer = replace(spec, **changed)
    shapes = {each.name: each.shape for each in (*fewer.operands, *fewer.outputs)}
    picks = {each.name: index for each in every if shapes[each.name] != each.shape}
    return Sample(fewer, picks)


def _heads(spec: cascade_spec.Attention, rng: np.random.Generator) -> Sample:
    """Single heads of single sequences, each with the keys and values of its group."""
    share = spec.heads // spec.kv_heads
    picks: list[tuple[int, int]] = []
    for number in _some(rng, spec.batch * spec.heads, _HEADS):
        picks.append(divmod(int(number), spec.heads))
    batches = [batch for batch, _ in picks]
    heads = [head for _, head in picks]
    of_keys = (batches, [head // share for head in heads])
    fewer = replace(spec, batch=len(picks), heads=1, kv_heads=1)
    own = (batches, heads)
    return Sample(fewer, {"q": own, "k": of_keys, "v": of_keys, "out": own})


def _some(rng: np.random.Generator, total: int, count: int) -> np.ndarray:
    if total <= count:
        return np.arange(total)
    middle = 1 + rng.choice(total - 2, count - 2, replace=False) if count > 2 else np.array([], int)
    return np.sort(np.concatenate(([0], middle, [total - 1])))
