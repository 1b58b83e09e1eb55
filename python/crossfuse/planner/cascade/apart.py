"""Rows and a chain of products behind them in several kernels of ours: what one kernel replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from crossfuse.hardware import Device
from crossfuse.planner.cascade.rows_product import RowsProduct
from crossfuse.planner.cascade.shape import CascadeShape
from crossfuse.planner.chain.build import matrix_chain
from crossfuse.planner.cost.estimate import corrected
from crossfuse.planner.cost.rates import Rates
from crossfuse.planner.cost.terms import Estimate
from crossfuse.planner.families.registry import cascade_families, families
from crossfuse.planner.kernels.arrays import count, select
from crossfuse.planner.kernels.shape import Shape


def apart(shape: CascadeShape, device: Device, rates: Rates) -> Iterator[tuple[str, Estimate]]:
    """Estimate rows and a chain of products in two kernels, each way with its name.

    The rows by themselves, then the chain; and of one first product rows with it, then the second.
    Ways without kernels are left out, and a cascade without a chain has none.
    """
    product = shape.product
    if product is None or not product.is_chain:
        return
    whole = product.shape
    rows = _of_cascade(CascadeShape(shape.name, product.rows), device, rates)
    chain = _of_chain(whole, device, rates)
    if rows is not None and chain is not None:
        yield f"rows ({rows[0]}), then their chain ({chain[0]})", _sum(rows[1], chain[1])
    if whole.products > 1:
        return  # no kernel makes rows for two products
    first = matrix_chain(whole.m, [whole.k, whole.n], item=whole.item)
    made = RowsProduct(first, product.k_major, product.rows, product.chunk)
    before = _of_cascade(CascadeShape(shape.name, product.rows, (), made), device, rates)
    single = replace(whole, n=whole.l, k=whole.n, l=0)
    after = _of_chain(single, device, rates)
    if before is not None and after is not None:
        yield f"rows with their product ({before[0]}), then the next one", _sum(before[1], after[1])


def _of_cascade(shape: CascadeShape, device: Device, rates: Rates) -> tuple[str, Estimate] | None:
    """Family and estimate of the best kernel of a cascade."""
    for family in cascade_families(shape):
        _, found = family.in_order(device, rates)
        if found:
            return family.name, family.estimate(found[0], device, rates)
    return None


def _of_chain(shape: Shape, device: Device, rates: Rates) -> tuple[str, Estimate] | None:
    """Family and estimate of the best kernel of a chain."""
    best: list[tuple[float, str, Estimate]] = []
    for family in families(shape):
        kernels = family.every(shape, device)
        if not count(kernels):
            continue
        times = np.asarray(corrected(kernels, shape, device, rates).microseconds)
        kernel = select(kernels, int(np.argmin(np.broadcast_to(times, count(kernels)))))
        found = corrected(kernel, shape, device, rates)
        best.append((float(found.microseconds), family.name, found))
    if not best:
        return None
    _, name, found = min(best, key=lambda each: each[0])
    return name, found


def _sum(one: Estimate, other: Estimate) -> Estimate:
    """The estimate of two kernels, one after the other."""
    terms = {name: one.terms.get(name, 0.0) for name in {**one.terms, **other.terms}}
    busy = {name: one.busy.get(name, 0.0) for name in {**one.busy, **other.busy}}
    return Estimate(
        {name: time + other.terms.get(name, 0.0) for name, time in terms.items()},
        {name: time + other.busy.get(name, 0.0) for name, time in busy.items()},
    )
