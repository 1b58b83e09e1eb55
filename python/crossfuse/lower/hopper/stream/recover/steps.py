"""Statements of a stream as steps, in the variables of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.stream.program import Axis, Kind, Step
from crossfuse.lower.hopper.stream.recover.statements import Roles, Statement, refuse_stream

# The two products of a stream.


@dataclass(frozen=True)
class Products:
    """The products of a stream."""

    #: Queries by keys, then what is made of that by values.
    first: Statement
    second: Statement
    queries: Any
    keys: Any
    weights: Any
    values: Any

    @property
    def shares_tile(self) -> bool:
        """Whether keys and values are one tile, as of a cache of latent vectors."""
        return bool(self.keys.same_as(self.values))

    @property
    def both(self) -> tuple[Statement, Statement]:
        """Both products in their order."""
        return self.first, self.second


def find_products(
    before: tuple[Statement, ...], within: tuple[Statement, ...], roles: Roles
) -> Products:
    """Find both products, and set the axes of their loops; refuses other products and operands."""
    found = [each for each in within if each.accumulates]
    loaded = {each.buffer for each in within if str(each.buffer.scope()).startswith("shared")}
    once = {each.buffer for each in before if str(each.buffer.scope()).startswith("shared")}
    first = [each for each in found if any(b in once for b in each.operands)]
    second = [each for each in found if each not in first]
    if len(first) != 1 or len(second) != 1:
        raise refuse_stream(
            "function",
            f"{len(found)} products in a stream, {len(first)} of them of a tile loaded before it",
            "a product of queries, loaded before, and keys; and one of what is made of it and "
            "values",
        )
    queries, keys = _sorted(first[0], once)
    values, weights = _sorted(second[0], loaded)
    if keys not in loaded or str(weights.scope()) != "local":
        raise refuse_stream(
            second[0].where,
            f"operands '{weights.name}' and '{values.name}'",
            "keys and values that the stream loads, and weights in scope local",
        )
    products = Products(first[0], second[0], queries, keys, weights, values)
    _check(products)
    _name(products, roles)
    if products.shares_tile:
        roles.both = products.keys
    return products


def _sorted(product: Statement, firsts: set[Any]) -> tuple[Any, Any]:
    """The operand that is one of `firsts`, and the other one."""
    one, other = product.operands
    return (one, other) if one in firsts else (other, one)


def _check(products: Products) -> None:
    for each in products.both:
        kind = (str(each.buffer.scope()), str(each.buffer.ty.dtype))
        if kind != ("local", "float32"):
            raise refuse_stream(
                each.where, f"sums of {kind[1]} in scope {kind[0]}", "float32 in scope local"
            )
    init = products.first.nest.block.init
    if init is None or not is_zero(init.value) or products.second.nest.block.init is not None:
        raise refuse_stream(
            products.first.where,
            "sums with other first values",
            "scores that start at zero in each tile, and sums that go on from tile to tile",
        )
    operands = (products.queries, products.keys, products.weights, products.values)
    types = {str(each.ty.dtype) for each in operands}
    if len(types) != 1 or not types <= {"bfloat16", "float16"}:
        raise refuse_stream(
            products.first.where,
            f"operands of {', '.join(sorted(types))}",
            "one type of 16 bits: bfloat16 or float16",
        )


def _name(products: Products, roles: Roles) -> None:
    """Set the axes of the loops of both products, by the operands that follow them."""
    layouts = (
        (products.first, products.queries, products.keys, (Axis.ROW, Axis.KEY, Axis.DEPTH)),
        (products.second, products.weights, products.values, (Axis.ROW, Axis.COLUMN, Axis.KEY)),
    )
    for product, left, right, (down, across, reduced) in layouts:
        summed = product.reduced
        lefts, rights = (_followed(product, each, summed) for each in (left, right))
        if len(summed) != 1 or len(lefts) != 1 or len(rights) != 1:
            raise refuse_stream(
                product.where,
                f"a product over {len(summed)} loops of tiles that follow {len(lefts)} and "
                f"{len(rights)} others",
                "C[i, j] += A[i, k] * B[j, k]: two matrices",
            )
        roles.loops |= {lefts[0]: down, rights[0]: across, summed[0]: reduced}


def _followed(product: Statement, buffer: Any, summed: tuple[Any, ...]) -> list[Any]:
    """Loops that an operand follows, but for the reduction."""
    factor = product.factor(buffer)
    assert factor is not None
    return [each for each in factor.loops if each is not None and not ir.among(each, summed)]


#: What a statement does, by the axes of its loops and those of its target.
_ROWS, _TILE, _SUMS = {Axis.ROW}, {Axis.ROW, Axis.KEY}, {Axis.ROW, Axis.COLUMN}


@dataclass(frozen=True)
class Names:
    """Variables that steps are written in."""

    roles: Roles
    row: Any = field(default_factory=lambda: ir.tirx.Var("row", "int32"))
    key: Any = field(default_factory=lambda: ir.tirx.Var("key", "int32"))
    column: Any = field(default_factory=lambda: ir.tirx.Var("column", "int32"))

    @property
    def variables(self) -> dict[str, Any]:
        """They by the names that `RowSteps` has for them."""
        return {"row": self.row, "key": self.key, "column": self.column}

    def placed(self, statement: Statement, expression: Any) -> Any:
        """An expression of a block in these variables."""
        variables = {Axis.ROW: self.row, Axis.KEY: self.key, Axis.COLUMN: self.column}

        def value(var: Any) -> Any:
            axis = self.roles.loops.get(var)
            return var if axis is None else variables[axis].astype(str(var.ty))

        return ir.substitute(statement.nest.placed(expression), value)


def read_steps(
    statements: Iterable[Statement], names: Names, scope: str = "local"
) -> tuple[Step, ...]:
    """Read statements on rows, elements of the tile, and sums; they store to a scope.

    Refuses one that is no store of an element, or leaves keys out.
    """
    return tuple(_read(each, names, scope) for each in statements)


def _read(statement: Statement, names: Names, wanted: str) -> Step:
    roles = names.roles
    loops = {roles.loops.get(each.loop_var) for each in statement.nest.loops}
    stored = {each for each in roles.buffers.get(statement.buffer, ()) if each is not None}
    _check_condition(statement, roles)
    _check_type(statement, wanted)
    value = names.placed(statement, statement.body.value)
    start = statement.nest.block.init
    if start is not None:
        start = names.placed(statement, start.value)
    plain = ((_ROWS, Kind.ROW), (_TILE, Kind.TILE), (_SUMS, Kind.CARRY))
    for axes, kind in plain:
        if loops == stored == axes and start is None:
            return Step(statement.name, kind, statement.buffer, value)
    reduction = statement.reduction()
    if loops != _TILE or stored != _ROWS or reduction is None:
        raise refuse_stream(
            statement.where,
            f"a store to '{statement.buffer.name}' of {statement.body.value}",
            "an element of a row, a tile or the sums, or a maximum or sum over the keys of a row",
        )
    operation, term = reduction
    kind = Kind.TOP if operation is ir.tirx.Max else Kind.SUM
    return Step(statement.name, kind, statement.buffer, names.placed(statement, term), start)


def _check_type(statement: Statement, wanted: str) -> None:
    scope, dtype = str(statement.buffer.scope()), str(statement.buffer.ty.dtype)
    if scope != wanted or dtype not in ("float32", "bfloat16", "float16"):
        raise refuse_stream(
            statement.where,
            f"'{statement.buffer.name}' of {dtype} in scope {scope}",
            f"float32 in scope {wanted}, or 16 bits for an operand of the second product",
        )


def _check_condition(statement: Statement, roles: Roles) -> None:
    """Refuse blocks that run for some keys of a tile: values must decide which keys count."""
    keys = [
        each.loop_var
        for each in statement.nest.loops
        if roles.loops.get(each.loop_var) is not Axis.ROW
    ]
    for term in ir.terms(statement.nest.realize.predicate):
        if any(ir.mentions(term, key) for key in keys):
            raise refuse_stream(
                statement.where,
                f"a block that runs only if {term}",
                "blocks that run for all keys of a tile",
                "choose the value of keys that do not count, such as -inf for a maximum",
            )


def check_order(
    within: tuple[Statement, ...], products: Products, carries: list[Statement]
) -> None:
    """Refuse a function whose order cannot be that of a kernel.

    A kernel does everything on a tile of scores before it touches the sums: what carries are made
    of may not change behind them.
    """
    order = {each: number for number, each in enumerate(within)}
    first, second = (order[each] for each in products.both)
    for each in within:
        reads = [access.buffer for access in each.loads]
        early = products.first.buffer in reads and order[each] < first
        late = products.second.buffer in (each.buffer, *reads) and order[each] > second
        if early or late:
            raise refuse_stream(
                each.where,
                "a statement before the scores that it reads" if early else "one behind the sums",
                "statements between both products, or between the stream's loops",
            )
    for carry in (*carries, *(each for each in within if each.buffer.same_as(products.weights))):
        reads = [access.buffer for access in carry.loads if not access.buffer.same_as(carry.buffer)]
        changed = [each for each in within if order[each] > order[carry] and each.buffer in reads]
        if changed:
            raise refuse_stream(
                carry.where,
                f"'{changed[0].buffer.name}', which {changed[0].where} changes behind it",
                "values that stay until the tile is done",
            )
