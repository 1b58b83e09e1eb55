"""Finds the two products of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crossfuse.lower.hopper.recover.contraction import is_zero
from crossfuse.lower.hopper.stream.program.parts import Axis
from crossfuse.lower.hopper.stream.recover.statements import Roles, Statement, refuse_stream


@dataclass(frozen=True)
class Products:
    """The products of a stream.

    Attributes
    ----------
    first, second : Statement
        Queries by keys, and what is made of that by values.
    queries, keys, weights, values : Any
        Their operands.
    """

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
        """In their order."""
        return self.first, self.second


def find_products(
    before: tuple[Statement, ...], within: tuple[Statement, ...], roles: Roles
) -> Products:
    """Find both products, and say what their loops go through.

    Raises
    ------
    LoweringRefused
        If there are others, or they have other operands.
    """
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
        roles.multiply_twice(products.keys)
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
    types = {str(each.ty.dtype) for each in _operands(products)}
    if len(types) != 1 or not types <= {"bfloat16", "float16"}:
        raise refuse_stream(
            products.first.where,
            f"operands of {', '.join(sorted(types))}",
            "one type of 16 bits: bfloat16 or float16",
        )


def _operands(products: Products) -> tuple[Any, ...]:
    return (products.queries, products.keys, products.weights, products.values)


def _name(products: Products, roles: Roles) -> None:
    """Loops of both products, by the operands that follow them."""
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
        roles.name(lefts[0], down)
        roles.name(rights[0], across)
        roles.name(summed[0], reduced)


def _followed(product: Statement, buffer: Any, summed: tuple[Any, ...]) -> list[Any]:
    """Loops that an operand follows, but for the reduction."""
    factor = product.factor(buffer)
    assert factor is not None
    return [
        each
        for each in factor.loops
        if each is not None and not any(each.same_as(other) for other in summed)
    ]
