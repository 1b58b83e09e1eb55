"""How the elements of a value lie in the tensor that it is a view of: axes of several strides.

Reshapes, transpositions and broadcasts of a model move elements on paper alone. An axis is the
loops that run over it, each with the elements of the tensor between two of its steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from crossfuse.relax.graph import Graph
from crossfuse.relax.operators import RESHAPES, shape_of

#: Extent and stride of each loop, the outermost first.
Axis = tuple[tuple[int, int], ...]

TRANSPOSE_AXES, _BROADCAST = "relax.permute_dims", "relax.broadcast_to"
#: Operators that make views.
VIEWS = frozenset({*RESHAPES, TRANSPOSE_AXES})


def source_of(graph: Graph, value: Any, operators: Collection[str] = VIEWS) -> Any:
    """What a value is a view of, by some operators."""
    while graph.operator(value) in operators:
        (value,) = graph.arguments(value)
    return value


def axes_of(graph: Graph, value: Any, source: Any) -> list[Axis] | None:
    """The axes of a view of a tensor in its row-major order; None where a reshape tears loops."""
    steps = []
    while not value.same_as(source):
        steps.append(value)
        (value,) = graph.arguments(value)
    axes: list[Axis] | None = row_major(shape_of(source, "a view"))
    for each in reversed(steps):
        if axes is None:
            return None
        name, shape = graph.operator(each), shape_of(each, "a view")
        if name == TRANSPOSE_AXES:
            order = graph.makers[each].value.attrs.axes
            places = range(len(axes))[::-1] if order is None else [int(at) for at in order]
            axes = [axes[at] for at in places]
        elif name == _BROADCAST:
            axes = _broadcast(axes, shape)
        else:
            axes = _reshaped(axes, shape)
    return axes


def row_major(shape: Sequence[int]) -> list[Axis]:
    """The axes of a tensor itself."""
    found: list[Axis] = []
    stride = 1
    for extent in reversed(shape):
        found.insert(0, ((extent, stride),))
        stride *= extent
    return found


def merged(*axes: Axis) -> Axis:
    """The fewest loops that run over axes, one inside of the other."""
    found: list[tuple[int, int]] = []
    for extent, stride in (loop for axis in axes for loop in axis if loop[0] > 1):
        if found and found[-1][1] == extent * stride:
            extent *= found.pop()[0]
        found.append((extent, stride))
    return tuple(found)


def _broadcast(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    before = [((1, 0),)] * (len(shape) - len(axes))
    pairs = zip((*before, *axes), shape, strict=True)
    return [axis if merged(axis) else ((extent, 0),) for axis, extent in pairs]


def _reshaped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis] | None:
    loops = list(merged(*axes))
    found: list[Axis] = []
    for extent in shape:
        axis: list[tuple[int, int]] = []
        left = extent
        while left > 1:
            if not loops:
                return None
            count, stride = loops.pop(0)
            taken = min(count, left)
            if max(count, left) % taken:
                return None
            if count > taken:
                loops.insert(0, (count // taken, stride))
            axis.append((taken, stride * (count // taken)))
            left //= taken
        found.append(tuple(axis))
    return found if not loops else None
