"""Finds stores of one thread over what another thread stored before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.stored_elements import Bounds, StoredElements, stored_elements
from crossfuse.lower.tree import Site, bounds, sites


def meeting_stores(body: Any, threads: Mapping[Any, int]) -> list[Any]:
    """Stores to an element of shared memory that another store gets from another thread.

    Parameters
    ----------
    body : tvm.tirx.Stmt
        A kernel with flat buffers.
    threads : Mapping
        Thread variables and their extents.

    Returns
    -------
    list[tvm.tirx.BufferStore]
        In program order; with those of which it is not known.
    """
    values: dict[Any, Any] = {}
    ir.walk(body, (ir.Bind, lambda node: values.update({node.var: node.value})))
    by_buffer: dict[Any, list[Site]] = {}
    for site in sites(body):
        if isinstance(site.node, ir.BufferStore) and is_shared(site.node.buffer):
            by_buffer.setdefault(site.node.buffer, []).append(site)
    places = {var: (0, extent) for var, extent in threads.items()}
    return [
        site.node
        for stores in by_buffer.values()
        if len(stores) > 1
        for site in _meeting([(each, _elements(each, places, values)) for each in stores])
    ]


def is_shared(buffer: Any) -> bool:
    """Whether a variable is a buffer in shared memory of the CTA."""
    return ir.is_buffer_var(buffer) and str(buffer.scope()) in ("shared", "shared.dyn")


def _meeting(stores: list[tuple[Site, StoredElements | None]]) -> list[Site]:
    import numpy as np

    known = [stored for _, stored in stores if stored is not None]
    if len(known) < len(stores):
        return [site for site, _ in stores]
    contested = StoredElements.joined(known).of_several_actors()
    return [site for site, each in stores if each and np.isin(each.elements, contested).any()]


def _elements(site: Site, threads: Bounds, values: dict[Any, Any]) -> StoredElements | None:
    (index,) = site.node.indices
    serial: dict[Any, tuple[int | None, int | None]] = {}
    if isinstance(index, ir.tirx.Ramp):
        lane = ir.Var("lane", "int32")
        serial[lane] = (0, int(index.lanes))
        index = index.base + index.stride * lane
    index = _expanded(index, values)
    conditions = [_expanded(each, values) for each in site.conditions]
    used = {var for each in (index, *conditions) for var in ir.variables(each)}
    serial |= bounds(each for each in site.loops if each.loop_var in used)
    return stored_elements([index], threads, serial, conditions)


def _expanded(expression: Any, values: dict[Any, Any]) -> Any:
    """An expression with the values of variables that were bound to parts of it."""
    while any(var in values for var in ir.variables(expression)):
        expression = ir.substitute(expression, lambda var: values.get(var, var))
    return expression
