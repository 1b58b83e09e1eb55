"""Converters that give what torch says an operator makes, or refuse it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx

from crossfuse.relax.converters.operands import name_of, tvm_own


def checked(
    known: Mapping[str, Any], own: Mapping[str, Any], refused: dict[Any, Exception]
) -> dict[str, Callable[..., Any]]:
    """All converters, ours in the place of TVM's, whose results have torch's type and shape.

    TVM's importer looks at neither. An operator with an argument that it drops, such as the
    ``dtype`` of a softmax, would go on in another type.

    Parameters
    ----------
    known : Mapping[str, Callable]
        The names of TVM's, as its importer has them.
    own : Mapping[str, Callable]
        Ours.
    refused : dict[Any, Exception]
        Gets the operators that a converter raises an error for.

    Returns
    -------
    dict[str, Callable]
        Of a node and the importer. They raise ``NotImplementedError`` where the two differ.
    """
    return {name: _checked(own.get(name, tvm_own), refused) for name in (*known, *own)}


def _checked(converter: Callable[..., Any], refused: dict[Any, Exception]) -> Callable[..., Any]:
    def convert(node: fx.Node, importer: Any) -> Any:
        try:
            return checked_value(node, importer)
        except Exception as error:  # converters raise whatever they like
            refused[node.target] = error
            raise

    def checked_value(node: fx.Node, importer: Any) -> Any:
        value = converter(node, importer)
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor) and not _is(value, expected):
            text = f"{node.target} as {value.ty}"
            shape = ", ".join(map(str, expected.shape))
            raise NotImplementedError(f"{text}, where torch makes [{shape}] of {expected.dtype}")
        return value

    return convert


def _is(value: Any, expected: torch.Tensor) -> bool:
    """Whether a value has a type and a shape, as far as both are known."""
    kind = getattr(value, "ty", None)
    if not isinstance(kind, relax.TensorType):
        return True  # several results, or a tensor that stands for a number
    extents = getattr(kind.shape, "values", None)
    if str(kind.dtype) != name_of(expected.dtype) or kind.ndim != expected.dim():
        return False
    return extents is None or all(
        int(one) == other
        for one, other in zip(extents, expected.shape, strict=True)
        if isinstance(one, tirx.IntImm) and isinstance(other, int)
    )
