"""Reverse accumulation over blocks: the gradient of each buffer, gathered from its readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.derivative import (
    Partial,
    choose,
    is_float,
    linear,
    partials,
    simplest,
    times,
    under,
)
from crossfuse.autodiff.inverse import Inverse, NotAffineError, Writer, affine, invert
from crossfuse.autodiff.program import Program, is_selecting, refused, starts_neutral
from crossfuse.autodiff.quasi_affine import Symbol
from crossfuse.blocks import access
from crossfuse.blocks.read import Block, substituted

#: Types that sums of gradients are not made in.
_NARROW = ("float16", "bfloat16", "float8")


@dataclass(eq=False)
class Reverse:
    """Gradients of a program's buffers by reverse accumulation.

    After `run`, `blocks` write in order what `results` names: for each wanted input the buffer of
    its gradient. `given` holds the gradients of outputs, which are parameters.
    """

    program: Program
    wanted: tuple[Any, ...]
    given: dict[Any, Any] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    results: dict[Any, Any] = field(default_factory=dict)
    _readers: dict[Any, list[_Read]] = field(default_factory=dict)
    _adjoints: dict[Any, Any] = field(default_factory=dict)
    _shares: dict[Block, _Share] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def run(self) -> Reverse:
        """Work out all gradients; refuses what has none."""
        program = self.program
        self._names = {str(each.name) for each in program.inputs}
        self._names |= {str(each.buffer.name) for each in program.blocks}
        for each in program.outputs:
            if is_float(each.ty.dtype):
                self.given[each] = self._buffer(f"d_{each.name}", shape(each), dtype_of(each))
        self._find_readers()
        for block in reversed(program.blocks):
            if self._readers.get(block.buffer) or block.buffer in self.given:
                self._adjoints[block.buffer] = self._adjoint(block.buffer)
        for each in self.wanted:
            self.results[each] = self._adjoint(each, result=True)
        return self

    def _buffer(self, name: str, extents: tuple[int, ...], dtype: str) -> Any:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return ir.tirx.decl_buffer(list(extents), dtype, name)

    def _find_readers(self) -> None:
        """Note for each active buffer who reads it: those that depend on what is wanted."""
        active = set(self.wanted)
        for block in self.program.blocks:
            found = partials(block.value, active.__contains__, block.where)
            for each in found:
                self._readers.setdefault(each.load.source, []).append(_Read(block, each))
            if found:
                active.add(block.buffer)

    def _adjoint(self, buffer: Any, result: bool = False) -> Any:
        """The buffer of a gradient; None where nothing that has one reads the buffer."""
        reads = self._readers.get(buffer, ())
        reads = [each for each in reads if self._adjoints.get(each.block.buffer) is not None]
        given = self.given.get(buffer)
        if not reads and not result:
            return given
        return _Gathering(self, buffer, given).over(reads)

    def new_block(
        self, name: str, like: Any, variables: _Variables, value: Any, combine: str = ""
    ) -> Any:
        """Add a block that stores, or sums, a value over variables; the buffer that it writes."""
        extents = tuple(variables.domain[each] for each in variables.coordinates)
        buffer = self._buffer(name, extents, like)
        initial = ir.tirx.const(1.0 if combine == "product" else 0.0, like) if combine else None
        self.blocks.append(
            Block(
                str(buffer.name),
                buffer,
                variables.coordinates,
                variables.summed,
                variables.domain,
                value,
                combine,
                initial=initial,
            )
        )
        return buffer

    def seed(self, block: Block) -> Any:
        """What reaches each value of a block: its result's gradient, or the value's share of it."""
        adjoint = self._adjoints[block.buffer]
        load = ir.tirx.BufferLoad(adjoint, list(block.coordinates))
        if not is_selecting(block):
            return load
        if block not in self._shares:
            self._shares[block] = _Share.of(self, block)
        return self._shares[block].of_value(load)


@dataclass(frozen=True, eq=False)
class _Read:
    block: Block
    partial: Partial


@dataclass(frozen=True, eq=False)
class _Variables:
    coordinates: tuple[Any, ...]
    summed: tuple[Any, ...]
    domain: dict[Any, int]


def shape(buffer: Any) -> tuple[int, ...]:
    """Extents of a buffer."""
    return tuple(int(each) for each in buffer.ty.shape)


def dtype_of(buffer: Any) -> str:
    """Type of a buffer's elements."""
    return str(buffer.ty.dtype)


def _accumulator(dtype: str) -> str:
    return "float32" if dtype.startswith(_NARROW) else dtype


@dataclass(frozen=True, eq=False)
class _Share:
    """What a maximum, minimum or product hands on to each of its values."""

    block: Block
    #: Of a maximum or minimum how many values equal it; of a product how many are 0.
    count: Any
    #: Of a product the product of those that are not 0.
    rest: Any = None

    @classmethod
    def of(cls, reverse: Reverse, block: Block) -> _Share:
        _check_initial(block)
        variables = _Variables(block.coordinates, block.summed, dict(block.domain))
        dtype = dtype_of(block.buffer)
        one, zero = ir.tirx.const(1.0, dtype), ir.tirx.const(0.0, dtype)
        name, value = block.buffer.name, block.value
        if block.combine != "product":
            result = ir.tirx.BufferLoad(block.buffer, list(block.coordinates))
            ties = choose(ir.tirx.EQ(value, result), one, zero)
            return cls(block, reverse.new_block(f"{name}_ties", dtype, variables, ties, "sum"))
        is_zero = ir.tirx.EQ(value, zero)
        zeros = choose(is_zero, one, zero)
        count = reverse.new_block(f"{name}_zeros", dtype, variables, zeros, "sum")
        others = choose(is_zero, one, value)
        rest = reverse.new_block(f"{name}_others", dtype, variables, others, "product")
        return cls(block, count, rest)

    def of_value(self, gradient: Any) -> Any:
        """The share of one value in a gradient of the result."""
        dtype, value = dtype_of(self.block.buffer), self.block.value
        zero, one = ir.tirx.const(0.0, dtype), ir.tirx.const(1.0, dtype)
        count = ir.tirx.BufferLoad(self.count, list(self.block.coordinates))
        if self.rest is None:
            result = ir.tirx.BufferLoad(self.block.buffer, list(self.block.coordinates))
            return choose(ir.tirx.EQ(value, result), gradient / count, zero)
        rest = ir.tirx.BufferLoad(self.rest, list(self.block.coordinates))
        alone = choose(ir.tirx.EQ(value, zero), gradient * rest, zero)
        alone = choose(ir.tirx.EQ(count, one), alone, zero)
        return choose(ir.tirx.EQ(count, zero), gradient * rest / value, alone)


def _check_initial(block: Block) -> None:
    """Refuse a start that takes part: a maximum from 0 has the gradient of two maxima."""
    if not starts_neutral(block):
        start = float(block.initial.value)
        what = {"max": "the least number", "min": "the largest number", "product": "1"}
        found = f"a {block.combine} from {start:g}"
        instead = f"start from {what[block.combine]}, and combine the result with {start:g} after"
        raise refused(block.where, found, f"a start from {what[block.combine]}", instead)


class _Gathering:
    """The gradient of one buffer: what is given of it, and what each read of it hands back."""

    def __init__(self, reverse: Reverse, buffer: Any, given: Any) -> None:
        self._reverse = reverse
        self._buffer = buffer
        self._dtype = dtype_of(buffer)
        self._index = reverse.program.dtype
        self._extents = shape(buffer)
        self._given = given
        names = range(len(self._extents))
        self._places = tuple(ir.Var(f"i{each}", self._index) for each in names)
        self._symbols = tuple(Symbol(f"y{at}", extent) for at, extent in enumerate(self._extents))

    def over(self, reads: list[_Read]) -> Any:
        """Write the blocks; the buffer of the gradient."""
        inside = sorted(map(self._gathered, reads), key=self._is_handed_on)
        alone = self._given is None and len(inside) == 1
        name = f"d_{self._buffer.name}"
        if alone and inside[0].axes and _accumulator(self._dtype) == self._dtype:
            return self._sum(name, inside[0])
        parts = list(self._parts(name, inside))
        value = parts[0] if parts else ir.tirx.const(0.0, self._dtype)
        for each in parts[1:]:
            value = value + each
        variables = self._variables(())
        return self._reverse.new_block(name, self._dtype, variables, value.astype(self._dtype))

    def _is_handed_on(self, gathered: _Gathered) -> bool:
        """Whether an addend is a gradient that was given; it is added last.

        What sums of a row are in may nearly cancel, and goes together.
        """
        given = self._reverse.given.values()
        return not gathered.axes and all(
            any(load.source.same_as(each) for each in given)
            for load in ir.buffer_loads(gathered.value)
        )

    def _parts(self, name: str, inside: list[_Gathered]) -> Iterator[Any]:
        """Addends of a gradient; a sum over axes is a block of its own."""
        wide = _accumulator(self._dtype)
        for each in inside:
            if each.axes:
                buffer = self._sum(f"{name}_from_{each.block.buffer.name}", each)
                yield ir.tirx.BufferLoad(buffer, list(self._places)).astype(wide)
            else:
                yield each.value.astype(wide)
        if self._given is not None:
            yield ir.tirx.BufferLoad(self._given, list(self._places)).astype(wide)

    def _sum(self, name: str, gathered: _Gathered) -> Any:
        wide = _accumulator(self._dtype)
        value = gathered.value.astype(wide)
        return self._reverse.new_block(name, wide, self._variables(gathered.axes), value, "sum")

    def _variables(self, axes: tuple[tuple[Any, int], ...]) -> _Variables:
        domain = dict(zip(self._places, self._extents, strict=True)) | dict(axes)
        return _Variables(self._places, tuple(each for each, _ in axes), domain)

    def _gathered(self, read: _Read) -> _Gathered:
        """The read's iterations turned round: over elements of the buffer, and axes left free."""
        block, partial = read.block, read.partial
        inverse, names = self._inverse(read)
        axes = {each: ir.Var(f"r{at}", self._index) for at, each in enumerate(inverse.axes)}
        writer = Writer(dict(zip(self._symbols, self._places, strict=True)) | axes, self._index)
        domain = dict(zip(self._places, self._extents, strict=True))
        domain |= {var: each.extent for each, var in axes.items()}
        images = {var: writer.number(inverse.values[each.name]) for var, each in names.items()}
        images = {var: access.simplified([each], domain)[0] for var, each in images.items()}
        wide = _accumulator(dtype_of(block.buffer))
        seed = self._reverse.seed(block).astype(wide)
        term = linear(lambda each: times(seed, each), partial.value)
        (term,) = substituted([term], images)
        term = simplest(term, domain)
        conditions = access.simplified(map(writer.condition, inverse.conditions), domain)
        term = under(conditions, term)
        return _Gathered(block, tuple((var, each.extent) for each, var in axes.items()), term)

    def _inverse(self, read: _Read) -> tuple[Inverse, dict[Any, Symbol]]:
        block, load = read.block, read.partial.load
        variables = (*block.coordinates, *block.summed)
        names = {var: Symbol(f"x{at}", block.domain[var]) for at, var in enumerate(variables)}
        try:
            indices = [affine(each, names) for each in load.indices]
        except NotAffineError as error:
            raise refused(
                f"{block.where}, buffer '{self._buffer.name}'",
                f"{load}, where {error}",
                "indices of sums, multiples, quotients and remainders of loop variables",
                f"leave '{self._buffer.name}' out of wrt, or multiply by a matrix of 0 and 1 that "
                "says which element is read",
            ) from None
        return invert(indices, list(names.values()), self._symbols), names


@dataclass(frozen=True, eq=False)
class _Gathered:
    block: Block
    axes: tuple[tuple[Any, int], ...]
    value: Any
