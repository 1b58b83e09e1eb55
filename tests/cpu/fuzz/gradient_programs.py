"""Random programs of reductions and element-wise blocks with quasi-affine indices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import te, tirx

#: Iterations of a block at most.
MOST = 1500
ELEMENTS = ("x", "x * y", "x + y", "tanh", "x * x", "sigmoid * y", "max", "min", "abs", "select")


@dataclass(frozen=True)
class Index:
    """An index in loop variables, given by their places."""

    kind: str
    parts: tuple[Index, ...] = ()
    number: int = 0

    def of(self, variables: Any) -> Any:
        """The index where variables are these: TVM's, or arrays of numpy."""
        if self.kind == "constant":
            return self.number
        if self.kind == "variable":
            return variables[self.number]
        one, *others = (each.of(variables) for each in self.parts)
        if self.kind == "sum":
            return one + others[0]
        if self.kind == "product":
            return one * others[0]
        if self.kind == "times":
            return one * self.number
        if isinstance(one, (int, np.ndarray)):
            return one // self.number if self.kind == "quotient" else one % self.number
        return (tirx.floordiv if self.kind == "quotient" else tirx.floormod)(one, self.number)

    @property
    def is_affine(self) -> bool:
        """Whether no variables are multiplied."""
        return self.kind != "product" and all(each.is_affine for each in self.parts)

    def bounds(self, extents: tuple[int, ...]) -> tuple[int, int]:
        """Least and largest value."""
        found = np.asarray(self.of(np.indices(extents).reshape(len(extents), prod(extents))))
        return int(found.min()), int(found.max())


@dataclass(frozen=True)
class Read:
    """A load of a buffer, 0 beyond it."""

    buffer: int
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class Stage:
    """A block."""

    shape: tuple[int, ...]
    reduced: tuple[int, ...]
    reads: tuple[Read, ...]
    element: str
    combine: str

    @property
    def extents(self) -> tuple[int, ...]:
        return (*self.shape, *self.reduced)


@dataclass(frozen=True)
class Random:
    """Shapes of inputs, then blocks that read them and one another; the last is the output."""

    inputs: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]

    @property
    def is_affine(self) -> bool:
        """Whether all indices have inverses."""
        reads = (each for stage in self.stages for each in stage.reads)
        return all(index.is_affine for each in reads for index in each.indices)

    def function(self) -> Any:
        """The s_tir function."""
        inputs = [te.placeholder(s, "float64", f"X{at}") for at, s in enumerate(self.inputs)]
        tensors = list(inputs)
        for at, stage in enumerate(self.stages):
            tensors.append(_computed(stage, tensors, f"S{at}"))
        return te.create_prim_func([*inputs, tensors[-1]])


def _computed(stage: Stage, tensors: list[Any], name: str) -> Any:
    axes = [te.reduce_axis((0, each)) for each in stage.reduced]

    def element(*places: Any) -> Any:
        variables = [*places, *(each.var for each in axes)]
        loads = [_read(each, tensors, variables, stage.extents) for each in stage.reads]
        value = _element(stage.element, *loads)
        if not axes:
            return value
        return _REDUCE[stage.combine](value, axis=axes)

    return te.compute(stage.shape, element, name=name)


_REDUCE = {
    "sum": te.sum,
    "max": te.max,
    "min": te.min,
    "product": te.comm_reducer(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype), "prod"),
}


def _read(read: Read, tensors: list[Any], variables: list[Any], extents: tuple[int, ...]) -> Any:
    tensor, guards = tensors[read.buffer], []
    indices = [each.of(variables) for each in read.indices]
    for index, found, extent in zip(read.indices, indices, tensor.shape, strict=True):
        least, most = index.bounds(extents)
        if least < 0:
            guards.append(found >= 0)
        if most >= int(extent):
            guards.append(found < extent)
    load = tensor(*indices)
    if not guards:
        return load
    condition = tirx.all(*guards) if len(guards) > 1 else guards[0]
    return tirx.if_then_else(condition, load, tirx.const(0.0, "float64"))


def _element(kind: str, x: Any, y: Any) -> Any:
    zero = tirx.const(0.0, "float64")
    return {
        "x": lambda: x,
        "x * y": lambda: x * y,
        "x + y": lambda: x + y,
        "tanh": lambda: tirx.tanh(x),
        "x * x": lambda: x * x,
        "sigmoid * y": lambda: tirx.sigmoid(x) * y,
        "max": lambda: tirx.max(x, y),
        "min": lambda: tirx.min(x, y),
        "abs": lambda: tirx.abs(x) + y,
        "select": lambda: tirx.Select(y > zero, x * y, x),
    }[kind]()


# How they are drawn.


KINDS = st.sampled_from(
    ["leaf"] * 12 + ["sum"] * 12 + ["times"] * 9 + ["quotient", "remainder"] * 6 + ["product"]
)
STEPS = {"times": st.sampled_from([2, 2, 3, 4, -1]), "quotient": st.integers(2, 4)}
STEPS["remainder"] = STEPS["quotient"]


def index(draw: st.DrawFn, count: int, depth: int = 0) -> Index:
    """An index in a number of variables; sometimes two of them are multiplied."""
    kind = draw(KINDS) if depth < 3 else "leaf"
    if kind == "leaf":
        place = draw(st.integers(-1, 3 * count - 1))
        if place < 0:
            return Index("constant", (), draw(st.integers(-2, 3)))
        return Index("variable", (), place % count)
    one = index(draw, count, depth + 1)
    if kind in STEPS:
        return Index(kind, (one,), draw(STEPS[kind]))
    return Index(kind, (one, index(draw, count, depth + 1)))


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> Random:
    inputs = tuple(draw(st.lists(shapes, min_size=1, max_size=2)))
    known, stages = list(inputs), []
    for at in range(draw(st.integers(1, 3))):
        shape = draw(shapes)
        reduced = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        while prod((*shape, *reduced)) > MOST:
            shape = shape[1:]
        count = len(shape) + len(reduced)
        reads = []
        for place in range(2):
            # A block reads the one before it, so that all of them matter.
            buffer = len(known) - 1 if at and not place else draw(st.integers(0, len(known) - 1))
            reads.append(Read(buffer, tuple(index(draw, count) for _ in known[buffer])))
        element, combine = draw(st.sampled_from(ELEMENTS)), draw(st.sampled_from(sorted(_REDUCE)))
        stages.append(Stage(shape, reduced, tuple(reads), element, combine))
        known.append(shape)
    return Random(inputs, tuple(stages))
