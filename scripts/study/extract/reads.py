"""What values are made of: inputs and reductions, seen through element-wise blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks import access, read
from crossfuse.blocks.read import Block, shape_of
from crossfuse.errors import RefusedError

# Loops that stand for several: where indices take a quotient and a remainder of one.
#
# A loop over ``i`` whose indices have ``i // 4`` and ``i % 4`` is two loops: one of them may be a
# batch, and the other the rows of its matrices.


def radices(indices: Iterable[Any], domain: access.Domain) -> dict[Any, tuple[int, ...]]:
    """Strides of the parts that each loop of a domain falls into, from the largest to 1.

    Indices are all that a block reads at, in their simplest form. Loops that are whole, and those
    whose parts overlap, are left out.
    """
    cuts: dict[Any, set[int]] = {}
    for index in indices:
        ir.walk(index, (ir.tirx.FloorDiv, lambda node: _note(cuts, node)))
        ir.walk(index, (ir.tirx.FloorMod, lambda node: _note(cuts, node)))
    found = {}
    for var, present in cuts.items():
        extent = domain[var]
        strides = sorted((each for each in present if 1 < each < extent), reverse=True)
        nested = all(a % b == 0 for a, b in zip([extent, *strides], strides, strict=False))
        if strides and nested:
            found[var] = (*strides, 1)
    return found


def _note(cuts: dict[Any, set[int]], node: Any) -> None:
    """Note the stride at which a quotient or remainder cuts its variable."""
    inner, size = node.a, ir.constant(node.b)
    if size is None:
        return
    if isinstance(inner, ir.Var):
        cuts.setdefault(inner, set()).add(size)
    elif isinstance(inner, ir.tirx.FloorDiv) and isinstance(inner.a, ir.Var):
        cuts.setdefault(inner.a, set()).add(size * (ir.constant(inner.b) or 1))
    elif isinstance(inner, ir.tirx.FloorMod) and isinstance(inner.a, ir.Var):
        cuts.setdefault(inner.a, set()).add(size)


@dataclass(frozen=True, eq=False)
class Apart(Block):
    """A block with a coordinate for each part of its loops."""

    #: For each dimension of the buffer, the strides of the coordinates that make it up.
    strides: tuple[tuple[int, ...], ...] = ()


def taken_apart(block: Block, strides: Mapping[Any, Sequence[int]]) -> Apart:
    """Rewrite a block over the parts of its loops, given the strides of `radices`."""
    values: dict[Any, Any] = {}
    domain: dict[Any, int] = {}
    parts: dict[Any, list[Any]] = {}
    for var, extent in block.domain.items():
        parts[var], rest = [], extent
        for stride in strides.get(var, (1,)):
            part = ir.Var(f"{var.name}_{stride}", str(var.ty)) if var in strides else var
            parts[var].append(part)
            domain[part] = rest // stride
            values[var] = part * stride + values[var] if var in values else part * stride
            rest = stride
    (value,) = access.replaced([block.value], values, {})
    return Apart(
        block.name,
        block.buffer,
        tuple(part for each in block.coordinates for part in parts[each]),
        tuple(part for each in block.summed for part in parts[each]),
        domain,
        value,
        block.combine,
        block.initial,
        strides=tuple(tuple(strides.get(each, (1,))) for each in block.coordinates),
    )


def apart(block: Block, indices: Sequence[Any]) -> list[Any]:
    """Convert indices of a block's buffer to indices of its coordinates."""
    if not isinstance(block, Apart):
        return list(indices)
    found = []
    extents = iter(block.domain[each] for each in block.coordinates)
    for index, strides in zip(indices, block.strides, strict=True):
        for place, stride in enumerate(strides):
            extent = next(extents)
            part = index // stride if stride > 1 else index
            found.append(part % extent if place else part)
    return found


def reached(indices: Sequence[Any], shape: Sequence[int], domain: access.Domain) -> int:
    """The most elements of a buffer that an access can reach.

    That is its box, from the least to the largest index of each dimension within the buffer, or one
    for each iteration where these are fewer. Windows that overlap fill their box.
    """
    known, box = access.analyzer(domain), 1
    for index, extent in zip(indices, shape, strict=True):
        bound = known.const_int_bound(index)
        least, most = max(int(bound.min_value), 0), min(int(bound.max_value), extent - 1)
        box *= max(most - least + 1, 1)
    return min(box, access.extent_of(access.variables(indices), domain))


#: What to do with a function that has more, or something else, in it.
OUTLINE = "outline such a chain first (crossfuse.relax.outline), or leave the function unfused"


def refused(where: str, found: object, limit: str, instead: str = OUTLINE) -> RefusedError:
    """Build the refusal of a function that is no chain; see `crossfuse.errors.Refusal`."""
    return read.refused(where, found, limit, instead)


#: Operators that hide which elements they touch.
_POINTERS = ("tirx.address_of", "tirx.tvm_access_ptr", "tirx.buffer_data")


@dataclass(frozen=True, eq=False)
class Read:
    """A read of an input, or of what a reduction makes."""

    buffer: Any
    #: In variables of the reader.
    indices: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for reads of the same elements of the same buffer."""
        return (self.buffer, *map(ir.tvm_ffi.structural_hash, self.indices))

    @property
    def variables(self) -> frozenset[Any]:
        """Variables that its indices follow."""
        return access.variables(self.indices)

    def moved(self, values: Mapping[Any, Any], domain: access.Domain) -> Read:
        """Express the read in the variables of another reader."""
        return replace(self, indices=access.replaced(self.indices, values, domain))


@dataclass(frozen=True, eq=False)
class Factor:
    """One of the values that a term is the product of."""

    reads: tuple[Read, ...]
    #: Bytes of the narrowest type that it has on the way to the term.
    item: int

    @property
    def variables(self) -> frozenset[Any]:
        """Variables that its reads follow."""
        return variables_of(self.reads)


@dataclass(eq=False)
class Program:
    """Blocks by the buffer that they write, with what each reads."""

    #: In program order.
    blocks: dict[Any, Block]
    #: Place of each input among the parameters.
    inputs: dict[Any, int]
    #: The buffer of the result.
    output: Any
    _reads: dict[Any, tuple[Read, ...]] = field(default_factory=dict)
    _factors: dict[Any, tuple[Factor, ...]] = field(default_factory=dict)

    def reads(self, block: Block) -> tuple[Read, ...]:
        """Reads that a block is made of, in its own variables, each once."""
        if block.buffer not in self._reads:
            self._reads[block.buffer] = self._read(block.value, block)
        return self._reads[block.buffer]

    def factors(self, block: Block) -> tuple[Factor, ...]:
        """Factors of the value of a block, in its own variables."""
        if block.buffer not in self._factors:
            self._factors[block.buffer] = self._split(block.value, block)
        return self._factors[block.buffer]

    def shape(self, read: Read, where: str) -> tuple[int, ...]:
        """Extents of what a read indexes."""
        made = self.blocks.get(read.buffer)
        if made is None:
            return shape_of(read.buffer, where)
        return tuple(made.domain[each] for each in made.coordinates)

    def take_apart(self) -> None:
        """Split the loops of reductions into those that their indices are made of."""
        for buffer, block in self.blocks.items():
            if block.combine:
                indices = [index for each in self.reads(block) for index in each.indices]
                strides = radices(indices, block.domain)
                if strides:
                    self.blocks[buffer] = taken_apart(block, strides)
                    self._reads.pop(buffer)

    def is_made(self, read: Read) -> bool:
        """Whether a read is of what a reduction makes."""
        return read.buffer in self.blocks

    def _split(self, value: Any, block: Block) -> tuple[Factor, ...]:
        if isinstance(value, ir.tirx.Cast):
            found = self._split(value.value, block)
            return tuple(replace(each, item=min(each.item, item_of(value))) for each in found)
        if isinstance(value, ir.tirx.Mul | ir.tirx.Div):
            sides = [self._split(each, block) for each in (value.a, value.b)]
            if all(any(self._made(each) for each in side) for side in sides):
                # Both come down the chain, so that what is stored is what they make together.
                sides = [
                    tuple(replace(each, item=item_of(value)) for each in side) for side in sides
                ]
            return _distinct_factors([each for side in sides for each in side])
        source = self._elementwise(value)
        if source is None:
            return (Factor(self._read(value, block), item_of(value)),)
        values = dict(zip(source.coordinates, value.indices, strict=True))
        return tuple(
            Factor(
                tuple(read.moved(values, block.domain) for read in each.reads),
                min(each.item, item_of(value)),
            )
            for each in self.factors(source)
        )

    def _made(self, factor: Factor) -> bool:
        return any(self.is_made(read) for read in factor.reads)

    def _elementwise(self, value: Any) -> Block | None:
        if not isinstance(value, ir.TensorLoad):
            return None
        block = self.blocks.get(value.source)
        return None if block is None or block.combine else block

    def _read(self, value: Any, block: Block) -> tuple[Read, ...]:
        loads = ir.buffer_loads(value)
        calls: list[Any] = []
        ir.walk(value, (ir.Call, calls.append))
        for call in calls:
            if str(getattr(call.op, "name", "")) in _POINTERS:
                limit, instead = "reads of elements", "read the elements by their indices"
                raise refused(block.where, f"a pointer {call}", limit, instead)
        found: list[Read] = []
        for load in loads:
            found += self._through(load, block)
        return distinct(found)

    def _through(self, load: Any, block: Block) -> list[Read]:
        where = f"{block.where}, buffer '{load.source.name}'"
        for index in load.indices:
            if not access.is_affine(index):
                kind = "a data-dependent" if _has_load(index) else "an"
                limit = "sums of loops times constants, and their quotients by constants"
                instead = "compute that part outside, as a function of its own"
                raise refused(where, f"{kind} index {index}", limit, instead)
        shape_of(load.source, block.where)
        source = self._elementwise(load)
        if source is None:
            made = self.blocks.get(load.source)
            indices = load.indices if made is None else apart(made, load.indices)
            return [Read(load.source, access.simplified(indices, block.domain))]
        values = dict(zip(source.coordinates, load.indices, strict=True))
        return [each.moved(values, block.domain) for each in self.reads(source)]


def variables_of(reads: Iterable[Read]) -> frozenset[Any]:
    """Variables that reads follow."""
    return frozenset(var for each in reads for var in each.variables)


def distinct(reads: Iterable[Read]) -> tuple[Read, ...]:
    """Reads without repetitions."""
    return tuple({each.key: each for each in reads}.values())


def item_of(value: Any) -> int:
    """Bytes of an element of a value's type; refused where these are no whole number."""
    return _bytes(str(value.ty))


def item_of_buffer(buffer: Any) -> int:
    """Bytes of an element of a buffer; refuses as `item_of`."""
    return _bytes(str(buffer.ty.dtype))


def _bytes(dtype: str) -> int:
    bits = int(ir.tvm.DataType(dtype).bits)
    if dtype == "bool":
        return 1
    if bits % 8:
        limit, instead = "whole bytes", "pack the elements into bytes"
        raise refused(f"type {dtype}", f"elements of {bits} bits", limit, instead)
    return bits // 8


def _distinct_factors(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    found: dict[Any, Factor] = {}
    for each in factors:
        key = (each.item, frozenset(read.key for read in each.reads))
        found.setdefault(key, each)
    return tuple(found.values())


def _has_load(expression: Any) -> bool:
    return bool(ir.buffer_loads(expression))
