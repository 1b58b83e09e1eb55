"""Extents of a chain of products, layout of its weights, and rules on tiles.

Tiles are counts of one candidate, or of many as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import pairwise
from operator import and_
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from crossfuse.errors import PlanRefused, refuse
from crossfuse.hardware import ROW_BYTES
from crossfuse.planner.chain.build import chain_of_blocks
from crossfuse.planner.chain.spec import Chain
from crossfuse.schema import Damaged, Extent, typed

if TYPE_CHECKING:
    from crossfuse.blocks import chain as blocks

# Counts of one candidate, or of many as arrays: arithmetic, and how many are listed and selected.
#
# Python integers stay Python integers, which do not overflow. Arrays become float64, whose division
# is many times faster than that of int64, and which does not wrap around. Counts are exact in it
# below 2**53, and so are rounded quotients: a/b of integers is an integer or at least 1/b away from
# the next one, and the rounding error is less. Of a chain beyond that they are within 1 in 10**15.


Count: TypeAlias = "int | np.ndarray[Any, Any]"
Flag: TypeAlias = "bool | np.ndarray[Any, Any]"
#: From 0 to 1.
Share: TypeAlias = "float | np.ndarray[Any, Any]"
Value = TypeVar("Value", "Flag", "Count", "Share")


def ceil_div(count: Count, size: Count) -> Count:
    """Number of `size` that cover `count`."""
    if _plain(count, size):
        return -(-count // size)
    quotient: np.ndarray = np.divide(count, size)
    return np.ceil(quotient)


def least(a: Count, b: Count) -> Count:
    """The smaller one."""
    return min(a, b) if _plain(a, b) else np.minimum(a, b)


def most(a: Count, b: Count) -> Count:
    """The larger one."""
    return max(a, b) if _plain(a, b) else np.maximum(a, b)


def choose(flag: Flag, yes: Value, no: Value) -> Value:
    """`yes` where the flag is set, `no` elsewhere."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, no)
    return yes if flag else no


def _plain(a: Count, b: Count) -> bool:
    return not (isinstance(a, np.ndarray) or isinstance(b, np.ndarray))


# Many candidates as one dataclass of arrays: how they are listed, counted and selected.

_K = TypeVar("_K")

#: No given tiles: all of them are tried.
NOTHING: Mapping[str, int] = MappingProxyType({})
#: Rows of tiles: 64 for each warpgroup, and 128 for each of two.
ROWS = (64.0, 128.0, 192.0, 256.0)
CLUSTERS = (1.0, 2.0, 4.0, 8.0, 16.0)
PARTS = tuple(map(float, range(1, 33)))


def count(kernel: Any) -> int:
    """Candidates in a struct of arrays; 1 for plain numbers."""
    sizes = [np.size(each) for each in entries(kernel).values()]
    return max(sizes) if min(sizes) else 0


def select(kernel: _K, which: Any) -> _K:
    """Select some candidates by a mask, by indices, or by one index, which gives plain numbers."""

    def chosen(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(chosen, value))
        if not isinstance(value, np.ndarray) or not value.ndim:
            return value
        value = value[which]
        if np.ndim(value):
            return value
        return bool(value) if value.dtype == bool else int(value)

    values = {e.name: chosen(getattr(kernel, e.name)) for e in fields(kernel)}  # type: ignore[arg-type]
    return replace(kernel, **values)  # type: ignore[type-var]


def flags(kernel: Any, flag: Flag) -> np.ndarray:
    """One flag for each candidate."""
    return np.broadcast_to(np.asarray(flag, bool), (count(kernel),))


def stack(kernels: Sequence[_K]) -> _K:
    """Join kernels of one family into one struct of arrays."""

    def joined(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(joined, zip(*values, strict=True)))
        return np.array(values, bool if isinstance(values[0], bool) else np.float64)

    chosen: dict[str, Any] = {
        each.name: joined([getattr(kernel, each.name) for kernel in kernels])
        for each in fields(kernels[0])  # type: ignore[arg-type]
    }
    return replace(kernels[0], **chosen)  # type: ignore[type-var]


def entries(kernel: Any) -> dict[str, Any]:
    """Values of a kernel by name; of a field with one for each phase they are numbered from 1."""
    found: dict[str, Any] = {}
    for each in fields(kernel):
        value = getattr(kernel, each.name)
        if isinstance(value, tuple):
            found |= {f"{each.name} {place}": part for place, part in enumerate(value, 1)}
        else:
            found[each.name] = value
    return found


# Values of the fields that are tried.


def given_or(given: Mapping[str, int], name: str, options: Sequence[float]) -> Sequence[float]:
    """Options of a field of the tiles: only what is given, or each option."""
    return (float(given[name]),) if name in given else options


def row_options(shape: Shape, options: Sequence[float]) -> tuple[float, ...]:
    """Rows of tiles that are not mostly empty."""
    return tuple(each for each in options if each < shape.m + 64 or each == options[0])


def column_options(width: int) -> tuple[float, ...]:
    """Columns of tiles: multiples of 8, the fewest for each number of tiles side by side."""
    options = range(8, min(256, -(-width // 8) * 8) + 1, 8)
    fewest = {-(-width // each): each for each in reversed(options)}
    even = [each for each in options if each % 32 == 0]
    return tuple(float(each) for each in sorted({*fewest.values(), *even}))


def grid(*options: Sequence[float]) -> list[np.ndarray]:
    """Build every combination, as one flat array for each axis."""
    return [each.ravel() for each in np.meshgrid(*map(np.asarray, options), indexing="ij")]


def read_extents(tiles: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    """Read fields of tiles as records and plans hold them; all of them have to be given."""
    if missing := [each for each in names if each not in tiles]:
        raise Damaged(f"no {missing[0]}", "all fields")
    return tuple(typed(Extent, tiles[each]) for each in names)


@dataclass(frozen=True)
class LayerShape:
    """Extents of the products of one operand: one, or gate and up."""

    #: Columns of each product, and the extent that it sums over.
    columns: int
    depth: int
    products: int = 1
    #: Cycles of the functions of a warp's results, see `crossfuse.planner.chain.spec.Product`.
    functions: int = 0


@dataclass(frozen=True)
class Shape:
    """Extents of ``C[m,n] = act(A[m,k] B)`` and ``E[m,l] = C[m,n] D``, or of a longer chain."""

    #: Rows, columns of the first products, their reduction, and columns of the second product; l is
    #: 0 where there is none.
    m: int
    n: int
    k: int
    l: int  # noqa: E741  (the field's name for the width of the second product)
    #: First products: 2 for gate and up; cycles of the functions of their results, and of those of
    #: the second product, see `LayerShape`.
    products: int = 1
    functions: int = 0
    output_functions: int = 0
    #: Bytes of an element of the operands, and of the output.
    item: int = 2
    out: int = 2
    #: Whether weights are stored as [n, k]; else as [k, n].
    k_major: bool = True
    #: Bytes of what is read besides operands: scales, biases, a residual.
    further: int = 0
    #: All layers of a chain of three or more, the first two of which are n, k and l; else none.
    chain: tuple[LayerShape, ...] = ()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """Layers one behind another, each of which multiplies what the one before it makes."""
        if self.chain:
            return self.chain
        first = LayerShape(self.n, self.k, self.products, self.functions)
        # Fits have arrays of many shapes.
        if not np.any(self.l):
            return (first,)
        return first, LayerShape(self.l, self.n, functions=self.output_functions)

    def with_columns(self, columns: Sequence[int]) -> Shape:
        """Make the same chain with other columns of the input and of what follows; as many stay."""
        widths = [*columns, *(each.columns for each in self.layers[len(columns) - 1 :])]
        pairs = zip(self.layers, pairwise(widths), strict=True)
        layers = tuple(replace(e, columns=width, depth=depth) for e, (depth, width) in pairs)
        chain = layers if self.chain else ()
        return replace(self, k=widths[0], n=widths[1], chain=chain)

    @property
    def text(self) -> str:
        """Rows, then the columns of the input and of what each layer makes."""
        widths = (self.k, *(each.columns for each in self.layers))
        return " x ".join(map(str, (self.m, *widths)))

    @property
    def depth(self) -> int:
        """Elements of an operand in a row of a tile: a step of the first products."""
        return ROW_BYTES // self.item

    @property
    def weight_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each layer."""
        return tuple(e.products * e.columns * e.depth * self.item for e in self.layers)

    @property
    def multiplies(self) -> bool:
        """Whether wgmma multiplies operands of this width, as they are stored."""
        return self.item == 2 or (self.item == 1 and self.k_major)

    @property
    def separate(self) -> Count:
        """Kernels of a library that compute it: one for each product and each activation between.

        What follows the last product is not counted, nor what follows gate and up alone.
        """
        # Of gate and up: one product of both weights, an activation and a multiplication.
        if not self.chain:
            return choose(self.l > 0, 2 + self.products, self.products)
        return 1 + sum(1 + each.products for each in self.chain[:-1])


def shape_of(chain: Chain, *, k_major: bool = True) -> Shape:
    """Read the extents of a chain without a batch; one with a batch is refused.

    A chain does not say how its weights lie in memory: `k_major` does.
    """
    if len(chain.rows) != 1:
        raise refuse(
            PlanRefused,
            "kernel-chain",
            f"chain of {len(chain.products)} products",
            found=f"rows {', '.join(chain.rows)}",
            limit="one dim of rows: no rule builds a kernel of others",
            instead="make the batch part of the rows",
        )
    extents = chain.extents
    layers = tuple(
        LayerShape(
            extents[chain.column(index)],
            extents[each.reduction],
            len(each.rights),
            each.functions,
        )
        for index, each in enumerate(chain.products)
    )
    first, last = chain.products[0], chain.products[-1]
    item, out = (chain.tensor(each).item for each in (first.left, last.output))
    one, two = layers[0], layers[1] if len(layers) > 1 else LayerShape(0, 0)
    known = Shape(
        extents[chain.rows[0]],
        one.columns,
        one.depth,
        two.columns,
        one.products,
        one.functions,
        two.functions,
        item,
        out,
        k_major,
        _further_bytes(chain),
    )
    return replace(known, chain=layers) if layers != known.layers else known


def shape_of_blocks(found: blocks.Chain) -> Shape:
    """Read the extents of a chain whose blocks are known."""
    return shape_of(chain_of_blocks(found), k_major=found.k_major)


def _further_bytes(chain: Chain) -> int:
    names = {name for each in chain.products for name in each.further}
    return sum(map(chain.stored_bytes, names))


# Rules on tiles, each with a name, so that what they leave out can be counted.


@dataclass(frozen=True)
class TileRule:
    """One condition that tiles must keep for their kernel to be built."""

    name: str
    #: What the rule asks for, in a few words.
    text: str
    #: Whether a candidate, or each of many, keeps it.
    keeps: Flag


@dataclass(frozen=True)
class Step:
    """Number of candidates after a rule."""

    #: The rule's; ``"all"`` before the first one.
    name: str
    text: str
    candidates: int


def all_kept(rules: Sequence[TileRule]) -> Flag:
    """Whether candidates keep every rule."""
    start: Flag = True
    return reduce(and_, (each.keeps for each in rules), start)


def narrowed(left: np.ndarray, rules: Sequence[TileRule]) -> tuple[tuple[Step, ...], np.ndarray]:
    """How many flagged candidates each rule in turn leaves, and flags of those that keep all."""
    steps = []
    for rule in rules:
        left = left & np.asarray(rule.keeps, bool)
        steps.append(Step(rule.name, rule.text, int(np.count_nonzero(left))))
    return tuple(steps), left


# Division of a reduction, or of a sum of parts, among CTAs.

#: Neighbours that a thread adds at once.
_UNIT = 4


def has_equal_shares(extent: Count, size: Count, depth: Count) -> Flag:
    """Whether each of `size` CTAs has a share of a reduction, of equally many steps of `depth`.

    The last share may reach beyond the reduction, where operands are zero, but begins within.
    """
    share = ceil_div(extent, size * depth) * depth
    return (size - 1) * share < extent


def largest_divisor(number: int, limit: int) -> int:
    """Largest divisor of `number` that is at most `limit` (at least 1).

    Examples
    --------
    >>> largest_divisor(688, 64)
    43
    """
    return max(each for each in range(1, max(1, min(number, limit)) + 1) if number % each == 0)


def divides_equally(extent: int, size: int, depth: int) -> bool:
    """`has_equal_shares` of one reduction."""
    return bool(has_equal_shares(extent, size, depth))


def rows_in_parts(rows: Count, columns: Count, parts: Count) -> Count:
    """Least number of rows, at least `rows`, of which each part adds equally many neighbours."""
    unit = parts * _UNIT
    if isinstance(unit, np.ndarray) or isinstance(columns, np.ndarray):
        common = np.gcd(np.asarray(unit, np.int64), np.asarray(columns, np.int64))
        return ceil_div(np.asarray(rows, np.float64), unit / common) * (unit / common)
    multiple = int(unit // np.gcd(unit, columns))
    return ceil_div(rows, multiple) * multiple
