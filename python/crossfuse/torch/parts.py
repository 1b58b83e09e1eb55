"""Parts of a tensor that operators of torch give all at once, such as those of ``chunk``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import fx
from tvm import relax


@dataclass(frozen=True)
class Part:
    """A slice of a tensor along one axis, which a node takes out of an operator's results."""

    #: The operator.
    source: fx.Node
    whole: fx.Node
    axis: int
    begin: int
    end: int

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """Tensors that it reads."""
        return (self.whole,)

    def emit(self, importer: Any) -> Any:
        """Emit the slice; the importer has the whole."""
        value = importer.env[self.whole]
        sliced = relax.op.strided_slice(value, [self.axis], [self.begin], [self.end])
        return importer.block_builder.emit(sliced)


def part_of(node: fx.Node) -> Part | None:
    """The part of a tensor that a node takes; None where it is something else.

    Of symbolic extents nothing is taken.
    """
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source, place = node.args
    if getattr(source.target, "__name__", "") not in _OPERATORS or not isinstance(place, int):
        return None
    whole = source.args[0]
    told: Any = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else 0)
    parts = source.meta["val"]
    axis = told % parts[0].dim()
    ends = [*accumulate(each.shape[axis] for each in parts)]
    if not isinstance(whole, fx.Node) or not all(isinstance(each, int) for each in ends):
        return None
    return Part(source, whole, axis, ends[place] - parts[place].shape[axis], ends[place])


#: Operators whose results are slices one behind the other.
_OPERATORS = frozenset({"split.Tensor", "split_with_sizes.default"})
