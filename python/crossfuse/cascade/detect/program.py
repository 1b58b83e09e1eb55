"""Reads a function as reductions of its inputs; element-wise blocks between them are inlined."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from crossfuse import _tvm as ir
from crossfuse.blocks.read import Block, read_blocks, read_flow
from crossfuse.cascade.detect.loads import Load, loads_of, refused, same, simplified
from crossfuse.cascade.detect.selection import read_several, with_selections

#: Attribute of a function: names of parameters that hold no negative number, such as weights of a
#: mean. Derivations then need fewer corrections.
NONNEGATIVE = "crossfuse.nonnegative"


@dataclass(eq=False)
class Program:
    """A function as its blocks, by the buffers that they write."""

    function: Any
    #: The block that writes each buffer; both buffers of an argmax have the same one.
    made: Mapping[Any, Block]
    #: Parameters that nothing writes.
    inputs: tuple[Any, ...]
    #: Parameters that something writes, in order.
    outputs: tuple[Any, ...]
    #: Inputs that are promised to hold no negative number.
    nonnegative: frozenset[Any] = frozenset()
    _values: dict[Any, Any] = field(default_factory=dict)
    _loads: dict[Block, list[Load]] = field(default_factory=dict)

    @property
    def types(self) -> frozenset[str]:
        """Types of its parameters, which are what the model stores."""
        return frozenset(str(each.ty.dtype) for each in (*self.inputs, *self.outputs))

    @property
    def reductions(self) -> list[Block]:
        """Blocks that reduce, in program order."""
        found = {id(each): each for each in self.made.values() if each.combine}
        return list(found.values())

    def value(self, block: Block) -> Any:
        """The value that a block stores or reduces, over loads of inputs and reductions."""
        if block.buffer not in self._values:
            self._values[block.buffer] = self._inlined(block.value, block)
        return self._values[block.buffer]

    def loads(self, block: Block) -> list[Load]:
        """All loads of a block, those inside indices too."""
        if block not in self._loads:
            self._loads[block] = loads_of(self.value(block))
        return self._loads[block]

    def reduction(self, buffer: Any) -> Block | None:
        """The reduction that writes a buffer; None for an input."""
        return self.made.get(buffer)

    def _inlined(self, value: Any, block: Block) -> Any:
        known: dict[Hashable, Any] = {}

        def visit(load: Any, mutator: Any) -> Any:
            load = mutator.default_mutate(load)
            key = Load(load.source, tuple(load.indices)).key
            if key not in known:
                known[key] = image(load)
            return known[key]

        def image(load: Any) -> Any:
            source = self.made.get(load.source)
            if source is None or source.combine:
                indices = simplified(load.indices, block.domain)
                return ir.tirx.BufferLoad(load.source, list(indices))
            places = dict(zip(source.coordinates, load.indices, strict=True))
            inner = ir.substitute(self.value(source), lambda var: places.get(var, var))
            return _simplified(inner, block)

        return ir.mutate(value, (ir.TensorLoad, visit))


def _simplified(value: Any, block: Block) -> Any:
    """An expression whose loads have indices in their simplest form, as reshapes need it."""

    def visit(load: Any, mutator: Any) -> Any:
        load = mutator.default_mutate(load)
        before = tuple(load.indices)
        after = simplified(before, block.domain)
        unchanged = all(a is b for a, b in zip(before, after, strict=True))
        return load if unchanged else ir.tirx.BufferLoad(load.source, list(after))

    return ir.mutate(value, (ir.TensorLoad, visit))


def read_program(func: Any) -> Program:
    """Read a function in s_tir form.

    Refused are scans, statements that are no blocks, and buffers that several blocks write or that
    are read before they are written; see `crossfuse.blocks.read.read_flow`.
    """
    if not isinstance(func, ir.PrimFunc):
        found = f"a {type(func).__name__}"
        raise refused("function", found, "a PrimFunc in s_tir form", "pass one function of it")
    return _read(func)


@lru_cache(maxsize=8)  # who writes a cascade reads its function again, and inlines the same blocks
def _read(func: Any) -> Program:
    _check_scans(func)
    flow = read_flow(func, refused, lambda each: with_selections(read_blocks(each, read_several)))
    return Program(func, flow.made, flow.inputs, flow.outputs, _nonnegative(func, flow.inputs))


def _nonnegative(func: Any, inputs: tuple[Any, ...]) -> frozenset[Any]:
    names = [str(each) for each in (func.attrs or {}).get(NONNEGATIVE, ())]
    known = {str(each.name): each for each in inputs}
    for name in names:
        if name not in known:
            limit = "names of inputs: " + ", ".join(known)
            raise refused(f"attribute {NONNEGATIVE}", repr(name), limit, "name one of these")
    return frozenset(known[name] for name in names)


def _check_scans(func: Any) -> None:
    """Refuse blocks that read their own results for other elements, as scans."""
    blocks: list[Any] = []
    ir.walk(func.body, (ir.SBlock, blocks.append))
    for block in blocks:
        store = block.body
        for load in loads_of(store.value) if isinstance(store, ir.BufferStore) else []:
            own = load.buffer.same_as(store.buffer)
            if own and not same(load.indices, store.indices):
                where = f"block '{block.name_hint}', buffer '{store.buffer.name}'"
                place = Load(store.buffer, tuple(store.indices)).text
                found = f"a scan: {place} from {load.text}"
                limit = "reductions, whose elements may come in any order"
                raise refused(where, found, limit, "leave it to a kernel that scans")
