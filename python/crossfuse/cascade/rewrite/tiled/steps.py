"""Lists the statements of one step of the stream; pure algebra.

Symbols in statements are those of `crossfuse.cascade.spec`, with a fixed meaning: `new` is
the state once its slot has taken the tile in, `value` the state before, `old` the state before
where it has changed already.

Exponentials are to the base of two, with the factor folded into other constants: the hardware has
``exp2`` alone, and ``exp(scale*x - m)`` is ``2**(scale*log2(e)*x - m2)`` if the maximum ``m2`` is
of ``scale*log2(e)*x``, so that no multiplication is left over. Where one is left over anyway, as
of a mask that is added, it stands behind the difference, ``2**(log2(e)*(scale*x + mask - m))``: a
mask that is the least number of its type would be infinite, and rows of it alone rows of nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import sympy
from sympy.core.relational import Relational

from crossfuse.cascade.expressions.functions import Fence, unopened, with_parts
from crossfuse.cascade.rewrite.phases import hoisted
from crossfuse.cascade.rewrite.tiles import tiles_refused
from crossfuse.cascade.spec import Derivation, Slot, guarded, left, new, old, right, value

#: As a fraction: sympy would turn ``2**(x/log(2))`` back into ``exp(x)``.
LOG2E = sympy.Rational(1 / math.log(2))


def base_two(derivation: Derivation) -> Derivation:
    """Write a derivation with exponentials to the base of two.

    The slots of maxima and minima that stand in exponents hold them times ``log2(e)``, where other
    factors take that in; results are the same.
    """
    extremes = [each for each in derivation.slots if _is_exponent(each, derivation)]
    names = [each.name for each in extremes if _folds(each.contribution)]
    change = _Change(_forms(names), _forms(each.name for each in extremes) - _forms(names))
    return replace(
        derivation,
        slots=tuple(_slot(each, each.name in names, change) for each in derivation.slots),
        stages=_mapped(derivation.stages, change.run),
        results=_mapped(derivation.results, change.run),
        rows=_mapped(derivation.rows, change.run),
    )


def times(expression: sympy.Expr, factor: sympy.Rational) -> sympy.Expr:
    """Multiply an expression by a positive number, inside of sums, choices and constants."""
    if expression.is_infinite:
        return expression
    if isinstance(expression, sympy.Piecewise | sympy.Add | Fence | sympy.Max | sympy.Min):
        return with_parts(expression, lambda each: times(each, factor))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        if number > 0 and number != 1:
            return times(rest, number * factor)
    return factor * expression


def rebuilt(
    expression: sympy.Basic, change: Callable[[sympy.Basic], sympy.Basic | None]
) -> sympy.Basic:
    """Replace parts of an expression; where `change` returns None, their parts in turn.

    Conditions are left as they are written: sympy takes a real ``m == -oo`` to be false.
    """
    found = change(expression)
    if found is not None:
        return found
    if not expression.args:
        return expression
    args = [rebuilt(each, change) for each in expression.args]
    if isinstance(expression, sympy.Piecewise | Relational):
        return expression.func(*args, evaluate=False)
    return expression.func(*args)


def _forms(names: Iterable[str]) -> set[sympy.Symbol]:
    return {form(name) for name in names for form in (value, new, guarded, left, right)}


def _folds(expression: sympy.Expr) -> bool:
    """Whether factors of all addends take another factor in.

    What is chosen beside others may be a tensor's element that stands for the least number.
    """
    if isinstance(expression, sympy.Piecewise):
        values = [each for each, _ in expression.args]
        finite = not any(each.is_infinite for each in values)
        return all(_folds(each) and not (finite and each.is_Symbol) for each in values)
    if isinstance(expression, Fence | sympy.Max | sympy.Min):
        return all(map(_folds, expression.args))
    return not expression.is_Add or all(
        each.is_number or each.as_coeff_Mul()[0] not in (1, -1) for each in expression.args
    )


def _is_exponent(slot: Slot, derivation: Derivation) -> bool:
    """Whether a slot is a maximum or minimum of its own that stands in an exponent."""
    own = {form(slot.name) for form in (value, new, guarded, left, right)}
    alone = slot.monoid.name in ("max", "min") and not slot.corrected
    states = {form(each.name) for each in derivation.slots for form in (value, new, guarded)}
    if not alone or slot.contribution.free_symbols & states:
        return False
    if slot.merge != slot.monoid.combine(left(slot.name), right(slot.name)):
        return False
    others = [each for each in derivation.slots if each is not slot]
    used = [part for each in others for part in (each.contribution, each.carry)]
    powers = [power for each in used for power in each.atoms(sympy.exp)]
    return any(power.free_symbols & own for power in powers)


def _mapped(
    expressions: Mapping[str, sympy.Expr], change: Callable[[sympy.Expr], sympy.Expr]
) -> dict[str, sympy.Expr]:
    return {name: change(each) for name, each in expressions.items()}


def _slot(slot: Slot, scaled: bool, change: _Change) -> Slot:
    if not scaled:
        return replace(
            slot,
            contribution=change.run(slot.contribution),
            carry=change.run(slot.carry),
            merge=None if slot.merge is None else change.run(slot.merge),
            guard=None if slot.guard is None else change.run(slot.guard),
        )
    return replace(
        slot,
        contribution=times(change.run(slot.contribution), LOG2E),
        init=times(slot.init, LOG2E),
        guard=None if slot.guard is None else times(change.run(slot.guard), LOG2E),
    )


class _Change:
    """Substitutes scaled symbols, and powers of two for exponentials."""

    def __init__(self, scaled: set[sympy.Symbol], plain: set[sympy.Symbol]) -> None:
        self.scaled = scaled
        #: Others in exponents, which are multiplied as a whole.
        self.plain = plain

    def run(self, expression: sympy.Expr) -> sympy.Expr:
        return rebuilt(expression, self.part)

    def part(self, expression: sympy.Basic) -> sympy.Basic | None:
        if expression in self.scaled:
            return expression / LOG2E
        if isinstance(expression, sympy.exp) and expression.free_symbols & self.plain:
            return sympy.Pow(2, unopened(LOG2E, self.run(expression.args[0])))
        if isinstance(expression, sympy.exp):
            return sympy.Pow(2, times(self.run(expression.args[0]), LOG2E))
        infinite = isinstance(expression, Relational) and any(
            each.is_infinite for each in expression.args
        )
        # An infinity is the same whatever it is scaled by.
        return expression if infinite else None


@dataclass(frozen=True)
class Keep:
    """Save a slot's value: ``m_old = m``."""

    slot: Slot


@dataclass(frozen=True)
class Guard:
    """Compute what stands in for a slot's new value: ``m_safe = select(m == -inf, 0, m)``."""

    slot: Slot


@dataclass(frozen=True)
class Factor:
    """Compute a number of each row: ``c = exp2(m_old - m_safe)``."""

    symbol: sympy.Symbol
    expression: sympy.Expr


@dataclass(frozen=True)
class Tile:
    """Compute a number of each row and element: ``P = exp2(x - m_safe)``."""

    symbol: sympy.Symbol
    expression: sympy.Expr


@dataclass(frozen=True)
class Carry:
    """Correct a slot by the new values: ``s = s * c``."""

    slot: Slot
    expression: sympy.Expr


@dataclass(frozen=True)
class Reduce:
    """Reduce the tile into a slot: ``s += P``."""

    slot: Slot
    expression: sympy.Expr


@dataclass(frozen=True)
class Multiply:
    """Multiply a tile by columns of elements into a slot: ``O += P V``."""

    slot: Slot
    left: sympy.Expr
    right: sympy.Symbol


@dataclass(frozen=True)
class Combine:
    """Merge a slot of two states; no expression for one that takes in elements one by one."""

    slot: Slot
    expression: sympy.Expr | None


Statement = Keep | Guard | Factor | Tile | Carry | Reduce | Multiply | Combine


def steps(slots: Sequence[Slot], columns: frozenset[sympy.Symbol]) -> tuple[Statement, ...]:
    """List the statements that update the state with a tile, in order.

    `columns` are elements that change from column to column of a result. A contribution to a slot
    with columns that is no product of a number of the row and one of the column is refused.
    """
    return _Steps(tuple(slots), columns).run()


def merge_steps(slots: Sequence[Slot]) -> tuple[Statement, ...]:
    """The statements that merge two states, in order.

    `left` is the state that is merged into, `right` the other one; `new` and `guarded` are of the
    merged state, `old` is what a slot was before where it has changed already. Numbers that do not
    depend on a slot itself are computed before it, so that slots and columns share them.
    """
    return _MergeSteps(tuple(slots)).run()


def operands(slot: Slot, columns: frozenset[sympy.Symbol]) -> tuple[sympy.Expr, sympy.Symbol]:
    """The operands of a slot with columns: a number of the row, and an element of the column.

    Other contributions are refused; see `steps`.
    """
    own = sorted(slot.contribution.free_symbols & columns, key=lambda each: each.name)
    if len(own) != 1 or not is_linear(slot.contribution, own[0]):
        raise tiles_refused(
            f"slot {slot.name}",
            f"a contribution {slot.contribution}",
            f"a product with one of {', '.join(sorted(each.name for each in columns))}",
            "multiply by one matrix, and apply scales of columns to the result",
        )
    if slot.monoid.name != "sum":
        raise tiles_refused(
            f"slot {slot.name}",
            f"a {slot.monoid.name} for each column",
            "sums for each column",
            "take other reductions of columns as a cascade of their own",
        )

    def put(each: sympy.Basic) -> sympy.Basic | None:
        return sympy.S.One if each == own[0] else None

    return rebuilt(slot.contribution, put), own[0]


def is_linear(expression: sympy.Expr, symbol: sympy.Symbol) -> bool:
    """Whether an expression is written as a number times the symbol."""
    if expression == symbol or expression == 0:
        return True
    if isinstance(expression, sympy.Piecewise):
        plain = not any(test.free_symbols & {symbol} for _, test in expression.args)
        return plain and all(is_linear(each, symbol) for each, _ in expression.args)
    if isinstance(expression, sympy.Add | Fence):
        return all(is_linear(each, symbol) for each in expression.args)
    if isinstance(expression, sympy.Mul):
        having = [each for each in expression.args if symbol in each.free_symbols]
        return len(having) == 1 and is_linear(having[0], symbol)
    return False


class _Updates(ABC):
    """Lists statements that change the state slot by slot, each in terms of those before it."""

    #: Prefix of the symbols of numbers of a row, and the symbol of a slot before it changes.
    factor_name = "factor"
    before = staticmethod(value)

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.found: list[Statement] = []
        self.updated: dict[sympy.Symbol, sympy.Symbol] = {}
        self.factors: dict[sympy.Expr, sympy.Symbol] = {}
        self.plain = {guarded(e.name): new(e.name) for e in slots if e.guard is None}

    def run(self) -> tuple[Statement, ...]:
        for place, slot in enumerate(self.slots):
            after = [part for each in self.slots[place + 1 :] for part in self.parts(each)]
            own = self.before(slot.name)
            if self.is_kept(slot, after):
                self.found.append(Keep(slot))
            self.update(slot)
            self.updated[own] = old(slot.name)
            if slot.guard is not None and _uses(guarded(slot.name), after):
                self.found.append(Guard(slot))
        return tuple(self.found)

    @abstractmethod
    def parts(self, slot: Slot) -> list[sympy.Expr]:
        """What the new value of a slot is made of."""

    @abstractmethod
    def update(self, slot: Slot) -> None:
        """Add the statements that change a slot."""

    def is_kept(self, slot: Slot, after: Sequence[sympy.Expr]) -> bool:
        """Whether the slot's value is used when it has changed."""
        return _uses(self.before(slot.name), after)

    def factor(self, expression: sympy.Expr) -> sympy.Symbol:
        """The symbol of a number of each row, which is computed once."""
        if expression not in self.factors:
            symbol = sympy.Symbol(f"{self.factor_name}{len(self.factors)}", real=True)
            self.factors[expression] = symbol
            self.found.append(Factor(symbol, expression))
        return self.factors[expression]

    def once(self, expression: sympy.Expr, changing: Collection[sympy.Symbol]) -> sympy.Expr:
        """An expression whose parts without what changes from column to column are factors."""
        fixed, expression = hoisted(expression, changing, self.slots)
        named: dict[sympy.Symbol, sympy.Symbol] = {}
        for symbol, each in fixed:
            named[symbol] = self.factor(each.xreplace(named))
            expression = expression.xreplace({symbol: named[symbol]})
        return expression

    def meant(
        self,
        expression: sympy.Expr,
        more: Mapping[sympy.Symbol, sympy.Symbol] = MappingProxyType({}),
    ) -> sympy.Expr:
        """Rename values so far of slots that have changed to their saved ones."""
        put = {**self.updated, **more, **self.plain}
        return rebuilt(expression, lambda each: put.get(each) if each.is_Symbol else None)


def _uses(symbol: sympy.Symbol, expressions: Sequence[sympy.Expr]) -> bool:
    return any(symbol in each.free_symbols for each in expressions)


class _Steps(_Updates):
    def __init__(self, slots: tuple[Slot, ...], columns: frozenset[sympy.Symbol]) -> None:
        super().__init__(slots)
        self.columns = columns
        self.tiles: dict[sympy.Expr, sympy.Symbol] = {}
        self.multiplied = {operands(each, columns)[0] for each in slots if self.is_columned(each)}

    def parts(self, slot: Slot) -> list[sympy.Expr]:
        return [slot.contribution, slot.carry]

    def is_kept(self, slot: Slot, after: Sequence[sympy.Expr]) -> bool:
        return super().is_kept(slot, [*after, slot.contribution])

    def is_columned(self, slot: Slot) -> bool:
        return bool(slot.contribution.free_symbols & self.columns)

    def update(self, slot: Slot) -> None:
        carry = self.carry(slot) if slot.corrected else None
        brought = self.brought(slot)
        self.found += [each for each in (carry, brought) if each is not None]

    def brought(self, slot: Slot) -> Statement:
        own = {value(slot.name): old(slot.name)}
        if self.is_columned(slot):
            left, right = operands(slot, self.columns)
            return Multiply(slot, self.tile(self.meant(left, own)), right)
        contribution = self.meant(slot.contribution, own)
        if slot.contribution in self.multiplied:
            contribution = self.tile(contribution)
        return Reduce(slot, contribution)

    def tile(self, expression: sympy.Expr) -> sympy.Expr:
        if expression.is_Symbol:
            return expression
        if expression not in self.tiles:
            symbol = sympy.Symbol(f"tile{len(self.tiles)}", real=True)
            self.tiles[expression] = symbol
            self.found.append(Tile(symbol, expression))
        return self.tiles[expression]

    def carry(self, slot: Slot) -> Carry:
        """The carry, if possible by one number a row, computed before."""
        own = slot.symbol
        expression = self.meant(slot.carry)
        for node, base in ((sympy.Mul, own), (sympy.Add, own)):
            if isinstance(expression, node) and base in expression.args:
                rest = node(*(each for each in expression.args if each != base))
                if own not in rest.free_symbols and self.is_of_row(rest):
                    return Carry(slot, node(own, self.factor(rest)))
        return Carry(slot, self.once(expression, {own, *self.columned()}))

    def is_of_row(self, expression: sympy.Expr) -> bool:
        """Whether an expression, and no symbol alone, is one number a row."""
        return not expression.is_Symbol and not expression.free_symbols & self.columned()

    def columned(self) -> frozenset[sympy.Symbol]:
        """What changes from column to column."""
        names = [each.name for each in self.slots if self.is_columned(each)]
        return self.columns.union(form(name) for name in names for form in (value, new, old))


class _MergeSteps(_Updates):
    factor_name = "merge"
    before = staticmethod(left)

    def parts(self, slot: Slot) -> list[sympy.Expr]:
        return [] if slot.merge is None else [slot.merge]

    def update(self, slot: Slot) -> None:
        expression = None
        if slot.merge is not None:
            expression = self.once(self.meant(slot.merge), {left(slot.name), right(slot.name)})
        self.found.append(Combine(slot, expression))
