"""Analyses products in and around a cascade, and the loops that tiles of their operands cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.detect.program import Program, read_program
from crossfuse.cascade.rewrite.tiles import tiles_refused
from crossfuse.cascade.site import Site


@dataclass(frozen=True, eq=False)
class Product:
    """A product over another axis that makes an element."""

    #: The element.
    symbol: sympy.Symbol
    #: Where the cascade reads it, over variables of the site.
    result: Any
    #: Operand of the row, over variables of the site and `depth`.
    left: Any
    #: Operand of the axis, over the same.
    right: Any
    #: Loops that are summed.
    depth: tuple[Any, ...]
    #: Of `depth`.
    extents: tuple[int, ...]


def mentions(expressions: Iterable[Any], var: Any) -> bool:
    """Whether expressions use a variable."""
    return any(each.same_as(var) for one in expressions for each in ir.variables(one))


@lru_cache(maxsize=64)  # sites are told apart as objects, and asked for with one size after another
def products(site: Site) -> tuple[Product, ...]:
    """The products that make elements of a cascade.

    Refused is a block that is no sum of products of two inputs, one of the row and one of the axis.
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
        raise tiles_refused(
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
    """An expression without conversions around it."""
    return _stripped(value.value) if isinstance(value, ir.tirx.Cast) else value


def has_products(site: Site) -> bool:
    """Whether a cascade has elements that a product makes, or results with columns."""
    return bool(site.producers) or any(each.columns for each in site.stages.values())


def column_variables(site: Site) -> tuple[Any, ...]:
    """Loops over columns of stages, each once."""
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


# Geometry of tiles: rows that share the right operands, and loops cut into tiles.


@dataclass(frozen=True, eq=False)
class Rows:
    """The loop whose iterations are the rows of a tile: they share all right operands."""

    #: A row loop of the site.
    var: Any
    #: Rows that share right operands, which tiles divide.
    extent: int
    #: Counts groups where only groups of rows share: the heads of queries of one head of keys. None
    #: where all do.
    group: Any
    #: Number of groups.
    groups: int

    def shared(self, expression: Any) -> Any:
        """An index of a right operand, rewritten so that it is the same for all rows of a group."""
        if self.group is None:
            return expression
        first = self.group * self.extent

        def put(var: Any) -> Any:
            return first if var.same_as(self.var) else var

        known = ir.sym.Analyzer()
        known.bind(self.group, ir.tvm.ir.Range(0, self.groups))
        return known.simplify(ir.substitute(expression, put))


@dataclass(frozen=True, eq=False)
class Extent:
    """How blocks iterate over a loop of the site."""

    #: Of the loop over a tile.
    name: str
    #: Number of values that the loop may have, those beyond the valid ones included.
    domain: int
    #: Iterations of a tile; 0 for one value.
    tile: int
    #: The tile's first value.
    base: Any
    #: Values from here on are not valid; None if all of a tile's are.
    limit: Any = None


def find_rows(site: Site, right: Sequence[Any]) -> Rows:
    """Choose the loop whose iterations are the rows of a tile.

    Of the loops whose rows share all right operands it is the one with most rows, of equals the
    innermost.
    """
    found = [_rows(var, site, right) for var in reversed(site.rows)]
    return max(found, key=lambda each: each.extent)


def _rows(var: Any, site: Site, right: Sequence[Any]) -> Rows:
    extent = int(site.extents[var])
    indices = [index for load in right for index in load.indices]
    if not mentions(indices, var):
        return Rows(var, extent, None, 1)
    divisors: set[int] = set()

    def visit(node: Any, mutator: Any) -> Any:
        by = ir.constant(node.b)
        if node.a.same_as(var) and by is not None:
            divisors.add(by)
            return ir.tirx.const(0, str(node.ty))
        return mutator.default_mutate(node)

    without = [ir.mutate(each, (ir.tirx.FloorDiv, visit)) for each in indices]
    share = divisors.pop() if len(divisors) == 1 and not mentions(without, var) else 1
    share = share if extent % share == 0 else 1
    return Rows(var, share, ir.Var(f"{var.name}_group", str(var.ty)), extent // share)
