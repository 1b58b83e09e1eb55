"""Top-k as topi writes it: a call of TVM's sort, which computes it on the CPU only."""

from __future__ import annotations

from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.placement import shape_of
from crossfuse.cascade.detect.refusal import refused
from crossfuse.cascade.detect.selected import Selection

_CALLED = "tvm.contrib.sort.topk"
_LIMIT = f"calls of {_CALLED} along the last axis, in descending order"
_INSTEAD = "write it as crossfuse.workload.top_k.top_of does"


def read_call(node: Any) -> Selection:
    """Read a block that calls TVM's top-k.

    Parameters
    ----------
    node : tvm.s_tir.SBlock
        A block of one call, as `topi.topk` makes it.

    Returns
    -------
    Selection
        The reduction.

    Raises
    ------
    CascadeRefused
        For other calls, another axis, the smallest elements, and k of 0, which stands for all.
    """
    where = f"block '{node.name_hint}'"
    called = [str(getattr(each, "value", "")) for each in getattr(node.body.value, "args", ())[:1]]
    if called != [_CALLED]:
        found = f"a call {node.body.value}"
        raise refused(where, found, "blocks that store reductions", "write it by stores")
    _, *arrays, k, axis, kind, ascending = node.body.value.args
    source, *made = (_buffer(each) for each in arrays)
    shape = shape_of(source, where)
    count, last = ir.constant(k), len(shape) - 1
    if ir.constant(ascending) or ir.constant(axis) not in (-1, last) or not count:
        found = f"k {k}, axis {axis}" + (", ascending" if ir.constant(ascending) else "")
        raise refused(where, found, _LIMIT, _INSTEAD)
    names = dict(zip({"both": "vi", "values": "v", "indices": "i"}[kind.value], made, strict=True))
    coordinates = tuple(ir.Var(f"i{place}", "int32") for place in range(len(shape)))
    at = ir.Var("at", "int32")
    domain = dict(zip((*coordinates, at), (*shape[:-1], count, shape[-1]), strict=True))
    value = ir.tirx.BufferLoad(source, [*coordinates[:-1], at])
    if "v" not in names:
        # Values that none needs are kept nowhere.
        names["v"] = ir.tirx.decl_buffer((*shape[:-1], count), str(value.ty), "top")
    return Selection(
        node.name_hint,
        names["v"],
        coordinates,
        (at,),
        domain,
        value,
        "topk",
        places=names.get("i"),
        place=at,
        k=count,
    )


def _buffer(array: Any) -> Any:
    """The buffer whose data an argument of the call passes on."""
    return next(each for each in ir.variables(array) if ir.is_buffer_var(each))
