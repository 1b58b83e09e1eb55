"""Operators that a Relax model leaves to torch: a call of `crossfuse.runtime.tensors`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx
from tvm import relax, tirx
from tvm.ir import StringImm

from crossfuse.relax.converters.operands import name_of, tvm_own
from crossfuse.runtime.tensors import NAME


def by_torch(node: fx.Node, importer: Any) -> Any:
    """Leave an operator to torch, if the model runs in a process that has it.

    ``NotImplementedError`` if an argument cannot be written as JSON, or a result's shape is not
    known.
    """
    tensors: list[Any] = []
    results = node.meta["val"]
    several = isinstance(results, (tuple, list))
    types = [_type(each, node) for each in (results if several else (results,))]
    call = {
        "operator": str(node.target),
        "args": _written(node.args, tensors, importer),
        "kwargs": _written(dict(node.kwargs), tensors, importer),
        # What torch foretells is not always what it makes: of a sign bit floats, and makes flags.
        "types": [str(each.dtype) for each in types],
    }
    made = relax.op.call_pure_packed(
        NAME,
        StringImm(json.dumps(call)),
        *tensors,
        ty_args=[relax.TupleType(types) if several else types[0]],
    )
    return importer.block_builder.emit(made)


def _written(value: Any, tensors: list[Any], importer: Any) -> Any:
    """An argument as JSON; a tensor by its number."""
    if isinstance(value, fx.Node):
        tensors.append(importer.env[value])
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_written(each, tensors, importer) for each in value]
    if isinstance(value, dict):
        return {"named": {key: _written(each, tensors, importer) for key, each in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    raise NotImplementedError(f"an argument that is a {type(value).__name__}")


def _type(value: Any, node: fx.Node) -> Any:
    if not isinstance(value, torch.Tensor) or not all(isinstance(e, int) for e in value.shape):
        raise NotImplementedError(f"{node.target}, which makes a result of no known shape")
    if value.is_complex():
        raise NotImplementedError(f"{node.target}, which makes {name_of(value.dtype)}")
    return relax.TensorType(tuple(value.shape), name_of(value.dtype))


# Converters whose results are checked against the types and shapes that torch recorded.


def checked(
    known: Mapping[str, Any], own: Mapping[str, Any], refused: dict[Any, Exception]
) -> dict[str, Callable[..., Any]]:
    """All converters, ours over TVM's, that raise unless results have torch's type and shape.

    TVM's importer checks neither. An operator with an argument that it drops, such as the ``dtype``
    of a softmax, would go on in another type. They raise ``NotImplementedError`` where the two
    differ; `refused` collects the operators that a converter raises any error for.
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
        made = getattr(value, "ty", None)
        if isinstance(made, relax.TensorType) and (later := _later_results(node)):
            raise NotImplementedError(f"{node.target}, of which result {later[0]} is not made")
        for kind, expected in _pairs(made, node.meta.get("val")):
            if isinstance(expected, torch.Tensor) and not _is(kind, expected):
                text = f"{node.target} as {kind}"
                shape = ", ".join(map(str, expected.shape))
                due = f"[{shape}] of {expected.dtype}"
                raise NotImplementedError(f"{text}, where torch makes {due}")
        return value

    return convert


def _later_results(node: fx.Node) -> list[int]:
    """The results behind the first one that others read."""
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return []
    places = (each.args[1] for each in node.users if each.target is getitem)
    return sorted(int(each) for each in places if each != 0)


def _pairs(kind: Any, expected: Any) -> list[tuple[Any, Any]]:
    """The type of each result beside what torch recorded."""
    if isinstance(kind, relax.TupleType) and isinstance(expected, (tuple, list)):
        return list(zip(kind.fields, expected, strict=False))
    return [(kind, expected)]


def _is(kind: Any, expected: torch.Tensor) -> bool:
    """Whether a type is the expected one, as far as both are known."""
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
