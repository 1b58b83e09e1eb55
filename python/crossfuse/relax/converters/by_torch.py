"""Operators that a Relax model leaves to torch: a call of `crossfuse.runtime.torch_operator`."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx
from tvm import relax
from tvm.ir import StringImm

from crossfuse.relax.converters.operands import name_of
from crossfuse.runtime.torch_operator import NAME


def by_torch(node: fx.Node, importer: Any) -> Any:
    """Leave an operator to torch, where a model runs in a process that has it.

    Parameters
    ----------
    node : torch.fx.Node
        A call of an operator of torch.
    importer : Any
        TVM's importer, which has the tensors that were made so far.

    Returns
    -------
    Any
        What it makes.

    Raises
    ------
    NotImplementedError
        If an argument cannot be written down, or a result's shape is not known.
    """
    tensors: list[Any] = []
    call = {
        "operator": str(node.target),
        "args": _written(node.args, tensors, importer),
        "kwargs": _written(dict(node.kwargs), tensors, importer),
    }
    results = node.meta["val"]
    several = isinstance(results, (tuple, list))
    types = [_type(each, node) for each in (results if several else (results,))]
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
