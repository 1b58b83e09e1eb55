"""Products in and around a cascade: what makes its elements, and what its columns multiply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.rewrite.tiled.refusal import refused
from crossfuse.cascade.site import Site


@dataclass(frozen=True, eq=False)
class Product:
    """A product over another axis that makes an element.

    Attributes
    ----------
    symbol : sympy.Symbol
        The element.
    result : tvm.ir.TensorLoad
        Where the cascade reads it, over variables of the site.
    left, right : tvm.ir.TensorLoad
        What is multiplied, over variables of the site and `depth`: of the row, and of the axis.
    depth : tuple[tvm.tirx.Var, ...]
        What is summed.
    extents : tuple[int, ...]
        Of `depth`.
    """

    symbol: sympy.Symbol
    result: Any
    left: Any
    right: Any
    depth: tuple[Any, ...]
    extents: tuple[int, ...]


def mentions(expressions: Iterable[Any], var: Any) -> bool:
    """Whether expressions use a variable."""
    return any(each.same_as(var) for one in expressions for each in ir.variables(one))


@lru_cache(maxsize=64)  # sites are told apart as objects, and asked for with one size after another
def products(site: Site) -> tuple[Product, ...]:
    """The products that make elements of a cascade.

    Raises
    ------
    CascadeRefused
        For a block that is no sum of products of two inputs, one of the row and one of the axis.
    """
    if not site.producers:
        return ()
    program = read_program(site.function)
    return tuple(_product(site, program, symbol) for symbol in site.producers)


def _product(site: Site, program: Program, symbol: sympy.Symbol) -> Product:
    made = [(each, program.reduction(each.source)) for each in ir.buffer_loads(site.reads[symbol])]
    result, block = next((each, block) for each, block in made if block is not None)
    bound = dict(zip(block.coordinates, result.indices, strict=True))
    value = ir.substitute(program.value(block), lambda var: bound.get(var, var))
    factors = [_stripped(each) for each in _factors(value)]
    inputs = set(site.function.params)
    plain = all(isinstance(each, ir.TensorLoad) and each.source in inputs for each in factors)
    right = [e for e in factors if mentions(getattr(e, "indices", ()), site.axis)]
    left = [each for each in factors if not any(each is other for other in right)]
    if block.combine != "sum" or not plain or len(left) != 1 or len(right) != 1:
        raise refused(
            f"block '{block.name}'",
            f"a {block.combine} of {value}",
            "a sum of products of two inputs: one of the row, one of the axis",
            "compute what is multiplied before, and scales of the result after",
        )
    extents = tuple(block.domain[each] for each in block.summed)
    return Product(symbol, result, left[0], right[0], block.summed, extents)


def _factors(value: Any) -> list[Any]:
    value = _stripped(value)
    if isinstance(value, ir.tirx.Mul):
        return _factors(value.a) + _factors(value.b)
    return [value]


def _stripped(value: Any) -> Any:
    """What is converted."""
    return _stripped(value.value) if isinstance(value, ir.tirx.Cast) else value


def has_products(site: Site) -> bool:
    """Whether a cascade has elements that a product makes, or results with columns."""
    return bool(site.producers) or any(each.columns for each in site.stages.values())


def column_variables(site: Site) -> tuple[Any, ...]:
    """Columns of stages."""
    found: list[Any] = []
    for stage in site.stages.values():
        found += [each for each in stage.columns if not any(each.same_as(o) for o in found)]
    return tuple(found)


def columned(site: Site) -> frozenset[sympy.Symbol]:
    """Elements and invariants that change from column to column of a stage."""
    columns = column_variables(site)
    return frozenset(
        symbol
        for symbol, read in site.reads.items()
        if any(mentions([read], each) for each in columns)
    )
