"""Rows of a cascade that are few enough to be checked against float64.

Rows of a cascade do not depend on each other, so that the expected values of some rows of the
outputs are those of the same cascade with fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossfuse.workload import cascade_products, cascade_spec
from crossfuse.workload.cascade_spec import CascadeSpec

#: Rows that are checked; of attention, heads.
ROWS = 32
_HEADS = 2
#: The extent that counts rows, by kind; of the others each has a rule of its own.
_COUNTED = {
    cascade_spec.Softmax: "rows",
    cascade_spec.LogSoftmax: "rows",
    cascade_spec.CrossEntropy: "rows",
    cascade_spec.LayerNorm: "rows",
    cascade_spec.RmsNorm: "rows",
    cascade_spec.Variance: "rows",
    cascade_spec.MomentOfInertia: "bodies",
    cascade_products.MlaDecode: "batch",
    cascade_products.MoeRouting: "tokens",
    cascade_products.QuantGemm: "tokens",
    cascade_products.RmsNormGemm: "tokens",
}
#: Of what is large, fewer.
_FEWER = {cascade_products.MlaDecode: 1, cascade_spec.Variance: 8, cascade_spec.MomentOfInertia: 8}


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
    if isinstance(spec, cascade_products.Attention):
        return _heads(spec, rng)
    name = _COUNTED[type(spec)]
    total = getattr(spec, name)
    chosen = _some(rng, total, _FEWER.get(type(spec), ROWS))
    index = list(map(int, chosen))
    every = (*spec.operands, *spec.outputs)
    # Whatever has the rows as its first extent, and would not with another number of rows.
    changed: dict[str, Any] = {name: len(index)}
    fewer = replace(spec, **changed)
    shapes = {each.name: each.shape for each in (*fewer.operands, *fewer.outputs)}
    picks = {each.name: index for each in every if shapes[each.name] != each.shape}
    return Sample(fewer, picks)


def _heads(spec: cascade_products.Attention, rng: np.random.Generator) -> Sample:
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
