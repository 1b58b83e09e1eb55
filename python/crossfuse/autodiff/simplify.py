"""Simplifies gradients across blocks.

What reaches the maximum of a softmax is two sums that cancel, and what reaches a mean is a sum of
distances from it. Neither shows in any block by itself. So sums are compared as mathematics: each
is what does not change along its loops, times a sum of what does, and if that sum is known
already, so is this one. ``sum(d_s * exp(x - m))`` is ``d_s * s``. A sum is also taken apart, if its
parts are known and leave one number of them: ``sum(x - mean)`` is ``total - n * mean``, which is 0.
Nothing else is: a sum of squares that is put together of known moments would cancel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from crossfuse import _tvm as ir
from crossfuse.autodiff.derivative import is_choice, is_number, zero_like
from crossfuse.autodiff.program import starts_neutral
from crossfuse.blocks import access
from crossfuse.blocks.read import Block
from crossfuse.errors import CascadeRefused

if TYPE_CHECKING:
    import sympy

#: Loads of an expression, at most, that other blocks are written into to compare it.
_MOST_LOADS = 64


def simplified(
    forward: Sequence[Block], backward: Sequence[Block], results: Iterable[Any]
) -> list[Block]:
    """Blocks of a gradient, of which those that are 0 or known are no sums any more.

    `forward` are blocks of the function itself, which stay as they are; `results` are buffers that
    are written whatever they hold. The order stays.
    """
    sums = Counter(_shape(each) for each in (*forward, *backward) if each.combine == "sum")
    if all(count < 2 for count in sums.values()) and not any(map(_is_of_one, forward)):
        return list(backward)
    return _Simplifier(set(results)).run(forward, backward)


#: Extents of the coordinates, and of the loops that are summed.
_Shape = tuple[tuple[int, ...], tuple[int, ...]]


def _shape(block: Block) -> _Shape:
    of = block.domain
    return tuple(of[each] for each in block.coordinates), tuple(of[each] for each in block.summed)


def _is_of_one(block: Block) -> bool:
    """Whether a block reduces one value from a start that changes nothing, and so is that value."""
    return bool(block.summed) and prod(_shape(block)[1]) == 1 and starts_neutral(block)


@dataclass(frozen=True)
class _Sum:
    """A sum that a block makes: its result is a factor times this."""

    result: sympy.Symbol
    factor: sympy.Expr


class _Simplifier:
    def __init__(self, results: set[Any]) -> None:
        self._results = results
        self._terms = _Terms()
        self._sums: dict[tuple[_Shape, sympy.Expr], _Sum] = {}
        self._zeros: set[Any] = set()
        #: Buffers whose blocks say less than they did, or read such.
        self._changed: set[Any] = set()

    def run(self, forward: Sequence[Block], backward: Sequence[Block]) -> list[Block]:
        """Learn the function's blocks, and simplify those of its gradient."""
        self._changed |= {each.buffer for each in forward if _is_of_one(each)}
        for each in forward:
            self._learn(each)
        return [self._simplified(each) for each in backward]

    def _simplified(self, block: Block) -> Block:
        value = _without_zeros(block.value, self._zeros)
        made = block if value is block.value else replace(block, value=value)
        known = None
        if made.combine == "sum":
            known = self._known(made)
        elif made.buffer not in self._results and self._is_zero(made):
            known = zero_like(made.value)
        if known is not None:
            domain = {each: made.domain[each] for each in made.coordinates}
            made = replace(made, summed=(), domain=domain, value=known, combine="", initial=None)
        if made is not block or self._reads_changed(made):
            self._changed.add(made.buffer)
        if not made.combine and is_number(made.value, 0):
            self._zeros.add(made.buffer)
        self._learn(made)
        return made

    def _reads_changed(self, block: Block) -> bool:
        return bool(block.sources & self._changed)

    def _learn(self, block: Block) -> None:
        self._terms.add(block)
        if block.combine == "sum" and starts_neutral(block):
            found = self._terms.of(block)
            if found is not None:
                factor, term = found.split(found.term)
                made = _Sum(self._terms.result(block), factor)
                self._sums.setdefault((_shape(block), term), made)

    def _is_zero(self, block: Block) -> bool:
        if block.combine or not self._reads_changed(block):
            return False
        found = self._terms.of(block)
        return found is not None and found.term.expand() == 0

    def _known(self, block: Block) -> Any:
        """The value of a sum over results of other blocks; None if it is a sum of its own."""
        found = self._terms.of(block) if starts_neutral(block) else None
        if found is None:
            return None
        values = (self._of_parts(block, found, each) for each in found.sums())
        value = next((each for each in values if each is not None), None)
        if value is None or not value.is_Add:
            return value if value is None else self._terms.written(value, block)
        # Said of it, as others may turn out to be 0; computed as it is, lest numbers cancel.
        self._terms.say(block, value)
        return None

    def _of_parts(
        self, block: Block, found: _Term, parts: Sequence[sympy.Expr]
    ) -> sympy.Expr | None:
        """A sum of parts each of which is a known one; None if one is not."""
        import sympy

        shape, total = _shape(block), sympy.S.Zero
        for part in parts:
            factor, term = found.split(part)
            if term == 1:
                total += factor * prod(shape[1])
                continue
            known = self._sums.get((shape, term))
            if known is None or not _divides(factor, known.factor):
                return None
            total += factor / known.factor * known.result
        return total.expand() if len(parts) > 1 else total


def _divides(factor: sympy.Expr, by: sympy.Expr) -> bool:
    """Whether a quotient divides by nothing but what its dividend is divided by already."""
    below = (factor / by).as_numer_denom()[1].free_symbols
    return bool(below <= factor.as_numer_denom()[1].free_symbols)


# Values as mathematics, over variables that only depend on where they stand in a block.


@dataclass(frozen=True)
class _Term:
    """The value of a block over symbols."""

    term: sympy.Expr
    #: Symbols that change along what is summed.
    elements: frozenset[Any]

    def split(self, part: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """What does not change along the loops, and what does."""
        import sympy

        part = sympy.factor_terms(part)
        factor, term = part.as_independent(*self.elements, as_Add=False)
        return factor, term

    def sums(self) -> Iterator[tuple[sympy.Expr, ...]]:
        """Products that the term is a sum of, in several ways: the whole, and ever smaller ones."""
        import sympy

        yield (self.term,)
        if self.term.is_Add:
            yield self.term.args
        factors = sympy.Mul.make_args(self.term)
        for one in (each for each in factors if each.is_Add):
            rest = sympy.Mul(*(each for each in factors if each is not one))
            yield tuple(rest * each for each in one.args)
        yield sympy.Add.make_args(sympy.expand_mul(self.term))


class _Terms:
    """Reads the values of blocks; those of element-wise blocks are written into their readers."""

    def __init__(self) -> None:
        self._blocks: dict[Any, Block] = {}
        self._variables: dict[tuple[Any, ...], Any] = {}
        self._symbols: dict[tuple[Any, ...], Any] = {}
        #: What each symbol reads.
        self._nodes: dict[Any, Any] = {}
        #: What results of sums are, over other symbols.
        self._said: dict[Any, Any] = {}

    def add(self, block: Block) -> None:
        """Know a block, whose buffer later ones read."""
        self._blocks[block.buffer] = block

    def result(self, block: Block) -> sympy.Symbol:
        """The symbol of a block's result at its own coordinates."""
        places = self._places(block)
        load = ir.tirx.BufferLoad(block.buffer, [places[each] for each in block.coordinates])
        return self._symbol(load)

    def say(self, block: Block, value: sympy.Expr) -> None:
        """Know what a block's result is, over symbols; others' values are told over these."""
        self._said[self.result(block)] = value

    def of(self, block: Block) -> _Term | None:
        """The value of a block; None if it has an operator that the algebra does not know."""
        from crossfuse.cascade.expressions.functions import opened
        from crossfuse.cascade.expressions.tir import to_sympy

        places = self._places(block)
        domain = {place: block.domain[var] for var, place in places.items()}
        value = ir.substitute(block.value, lambda var: places.get(var, var))
        value = self._inlined(value, domain)
        try:
            term = opened(to_sympy(value, self._symbol, _rounded, self._whole)).xreplace(self._said)
        except CascadeRefused:
            return None
        summed = {places[each] for each in block.summed}
        elements = {e for e in term.free_symbols if summed & set(ir.variables(self._nodes[e]))}
        return _Term(term, frozenset(elements))

    def written(self, value: sympy.Expr, block: Block) -> Any:
        """An expression over symbols in a block's own variables, and of its type."""
        from crossfuse.cascade.expressions.tir import to_tir

        own = {place: var for var, place in self._places(block).items()}
        reads = {
            each: ir.substitute(self._nodes[each], lambda var: own.get(var, var))
            for each in value.free_symbols
        }
        return to_tir(value, reads, str(block.buffer.ty.dtype))

    def _places(self, block: Block) -> dict[Any, Any]:
        """The variable that stands for each of a block: equal ones for equal places and extents."""
        found = {}
        for kind, variables in (("c", block.coordinates), ("r", block.summed)):
            for at, var in enumerate(variables):
                key = (kind, at, block.domain[var], str(var.ty))
                if key not in self._variables:
                    self._variables[key] = ir.Var(f"{kind}{at}", str(var.ty))
                found[var] = self._variables[key]
        return found

    def _whole(self, node: Any) -> sympy.Symbol | None:
        """Choices are not taken apart."""
        chooses = is_choice(node) or isinstance(node, ir.tirx.Select)
        return self._symbol(node) if chooses else None

    def _symbol(self, node: Any) -> sympy.Symbol:
        import sympy

        if isinstance(node, ir.TensorLoad):
            key = (node.source, *map(ir.tvm_ffi.StructuralKey, node.indices))
        else:
            key = (ir.tvm_ffi.StructuralKey(node),)
        if key not in self._symbols:
            name = str(node.source.name) if isinstance(node, ir.TensorLoad) else "part"
            whole = "int" in str(node.ty)
            known = {"integer": True} if whole else {"real": True}
            made = sympy.Symbol(f"{name}_{len(self._symbols)}", **known)
            self._symbols[key], self._nodes[made] = made, node
        return self._symbols[key]

    def _inlined(self, value: Any, domain: Mapping[Any, int]) -> Any:
        """A value with those of element-wise blocks in it, as long as it is short."""

        def visit(load: Any, mutator: Any) -> Any:
            load = mutator.default_mutate(load)
            block = self._blocks.get(load.source)
            indices = list(access.simplified(load.indices, domain))
            if block is None or (block.combine and not _is_of_one(block)):
                return ir.tirx.BufferLoad(load.source, indices)
            images = dict(zip(block.coordinates, indices, strict=True))
            images |= {each: ir.tirx.IntImm(str(each.ty), 0) for each in block.summed}
            inner = ir.substitute(block.value, lambda var: images.get(var, var))
            if len(ir.buffer_loads(inner)) > _MOST_LOADS:
                return ir.tirx.BufferLoad(load.source, indices)
            return self._inlined(inner, domain)

        return ir.mutate(value, (ir.TensorLoad, visit))


def _rounded(dtype: str, value: sympy.Expr) -> sympy.Expr:
    """A value that is rounded is another one than before."""
    import sympy

    return sympy.Function(f"rounded_{dtype}", real=True)(value)


# Zeros in expressions of TVM.


def _without_zeros(value: Any, zeros: set[Any]) -> Any:
    """A value with 0 for loads of buffers that are 0, and without what that leaves nothing of."""
    if not any(each.source in zeros for each in ir.buffer_loads(value)):
        return value

    def load(node: Any, mutator: Any) -> Any:
        return zero_like(node) if node.source in zeros else mutator.default_mutate(node)

    def folded(node: Any, mutator: Any) -> Any:
        return _folded(mutator.default_mutate(node))

    return ir.mutate(value, (ir.TensorLoad, load), *((each, folded) for each in _FOLDED))


_FOLDED = (
    *(ir.tirx.Add, ir.tirx.Sub, ir.tirx.Mul, ir.tirx.Div),
    *(ir.tirx.Cast, ir.tirx.Select, ir.Call),
)


def _folded(node: Any) -> Any:
    if isinstance(node, ir.tirx.Add) and is_number(node.a, 0):
        return node.b
    if isinstance(node, ir.tirx.Add | ir.tirx.Sub) and is_number(node.b, 0):
        return node.a
    none = isinstance(node, ir.tirx.Mul) and (is_number(node.a, 0) or is_number(node.b, 0))
    none |= isinstance(node, ir.tirx.Div) and is_number(node.a, 0)
    none |= isinstance(node, ir.tirx.Cast) and is_number(node.value, 0)
    sides = list(_sides(node))
    none |= bool(sides) and all(is_number(each, 0) for each in sides)
    return zero_like(node) if none and "float" in str(node.ty) else node


def _sides(node: Any) -> Iterator[Any]:
    if isinstance(node, ir.tirx.Select):
        yield from (node.true_value, node.false_value)
    elif is_choice(node):
        yield from node.args[1:]
