"""Measures one cascade in this process: inputs on the GPU, some rows checked against float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from crossfuse import hardware
from crossfuse.bench import variants
from crossfuse.bench.floor import Floor, roofs_of
from crossfuse.bench.job import Variant
from crossfuse.bench.problem import Bound, Problem
from crossfuse.errors import CheckFailed
from crossfuse.measure.timing import TimingConditions, copies_needed
from crossfuse.workload import cascade_spec
from crossfuse.workload.cascade_spec import CascadeSpec

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


@dataclass
class CascadeProblem(Problem):
    """A cascade, whose inputs are drawn on the GPU; some rows of each set are checked."""

    spec: CascadeSpec
    checked: bool = True

    def variant(self, name: str, device: str) -> Variant:
        """A way to compute it."""
        return variants.make(name, self.spec, device)

    def bind(self, variant: Variant, how: TimingConditions, device: str) -> Bound:
        """Draw several sets of inputs, so that none is in the L2 cache when it is read next."""
        size = self.spec.bytes
        wanted = copies_needed(size, how.calls, how.l2)
        count = max(1, min(wanted, _MOST_SETS * max(1, how.calls), _SET_BYTES // size))
        sets = [draw(self.spec, number, device) for number in range(count)]
        calls = [partial(variant.call, *each.values()) for each in sets]
        judges = [partial(_judge, self.spec, each) for each in sets]
        return Bound(how, calls, judges if self.checked else ())


def draw(spec: CascadeSpec, seed: int, device: str) -> dict[str, Any]:
    """Draw inputs on the device, as `crossfuse.workload.cascade_numerics` draws them on the host.

    They are named, in the order of the function's parameters; equal seeds give equal inputs on
    equal devices.
    """
    import torch

    from crossfuse.workload.cascade_numerics import FACTORS, WEIGHTS

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
    from crossfuse.workload.cascade_numerics import check

    part = sample(spec)
    made = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(zip((each.name for each in spec.outputs), made, strict=True))
    try:
        found = check(part.spec, part.take(inputs), part.take(named))
    except CheckFailed as error:
        return None, str(error)
    return max(each.worst for each in found.values()), ""


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
    chosen = _some(rng, spec.count, _FEWER.get(type(spec), ROWS))
    index = list(map(int, chosen))
    every = (*spec.operands, *spec.outputs)
    # Whatever has the rows as its first extent, and would not with another number of rows.
    fewer = spec.with_count(len(index))
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
