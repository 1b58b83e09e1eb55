"""Where a tile lies: which rows share the right operands, and how loops are cut into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.cascade.rewrite.tiled.operands import mentions
from crossfuse.cascade.site import Site


@dataclass(frozen=True, eq=False)
class Rows:
    """The loop whose iterations are the rows of a tile: they share all right operands.

    Attributes
    ----------
    var : tvm.tirx.Var
        A row loop of the site.
    extent : int
        Rows that share right operands, which tiles divide.
    group : tvm.tirx.Var | None
        Counts groups where only groups of rows share: the heads of queries of one head of keys.
        None where all do.
    groups : int
        How many there are.
    """

    var: Any
    extent: int
    group: Any
    groups: int

    def shared(self, expression: Any) -> Any:
        """What right operands read, which is the same for all rows of a group."""
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
    """How blocks iterate over a loop of the site.

    Attributes
    ----------
    name : str
        Of the loop over a tile.
    domain : int
        Values that the loop may have, those beyond the valid ones included.
    tile : int
        Iterations of a tile; 0 for one value.
    base : tvm.ir.PrimExpr
        The tile's first value.
    limit : tvm.ir.PrimExpr | None
        Values from here on are not valid; None if all of a tile's are.
    """

    name: str
    domain: int
    tile: int
    base: Any
    limit: Any = None


def find_rows(site: Site, right: Sequence[Any]) -> Rows:
    """Choose the loop whose iterations are the rows of a tile.

    Parameters
    ----------
    site : Site
        The cascade.
    right : Sequence[tvm.ir.TensorLoad]
        Right operands, over the site's variables.

    Returns
    -------
    Rows
        Of those loops whose rows share all right operands that with most rows, of equals the
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
