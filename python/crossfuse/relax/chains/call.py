"""Calls of the kernel of a chain: values of the model by what the kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.ir import GlobalVar

from crossfuse.relax.chains.planned import PlannedChain
from crossfuse.relax.chains.replace import Replacement
from crossfuse.relax.chains.symbols import is_symbolic
from crossfuse.relax.outline import Argument


def call_of(
    kind: type[Replacement],
    function: GlobalVar,
    chain: PlannedChain,
    given: Sequence[Any],
    rows: Any = None,
) -> Replacement:
    """The call of a kernel of a chain, with values for what it reads; of symbolic rows if given."""
    outlined = chain.outlined
    values, shapes = [], []
    for each in outlined.arguments:
        value = value_of(each, given)
        values.append(value)
        shapes.append(_shape(value, each.shape, rows))
    output = (outlined.M if rows is None else rows, outlined.L)
    return kind(function, tuple(values), tuple(shapes), output, outlined.output_dtype)


def _shape(value: Any, shape: tuple[int, ...], rows: Any) -> tuple[Any, ...]:
    """The shape that a kernel knows a value by."""
    return shape if rows is None or not is_symbolic(value) else (rows, *shape[1:])


def value_of(argument: Argument, given: Sequence[Any]) -> Any:
    """The value of a model that is an input of a chain."""
    if argument.value is not None:
        return relax.const(argument.value, argument.dtype)
    return given[argument.position]
