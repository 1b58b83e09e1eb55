"""Orders the computations of one step of a stream; pure algebra.

Contributions that need a new value of an earlier slot wait until a sweep over the tile has made it:
the maximum first, then the sum of exponentials. So slots are divided into phases. Each phase is one
sweep over the elements of a tile, which stay in registers, and then new values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.derivation import Slot, guarded, new, value
from crossfuse.cascade.expressions.functions import (
    Abs,
    Unevaluated,
    factored,
    opened,
    shared,
    unopened,
    with_parts,
)
from crossfuse.cascade.expressions.to_tir import to_tir
from crossfuse.cascade.rewrite.scripting import Scratch
from crossfuse.cascade.spec import Monoid

# Divisions by a number of the row as products: one division a row, whatever the divisor.
#
# ``x / s`` of many x is ``x * (1/s)``. But 1/s of s = 1e-41 is infinite where x/s is 0.5, and of s
# = 2e38 it has lost bits. A power of two makes both factors moderate: ``(a x) * (1 / (a s))`` with
# ``a s`` near enough to 1, exact but for what is rounded once more. Divisors that are known to be
# moderate, as the sum of a softmax, need no such factor.

#: Powers of two: reciprocals of what lies between have all bits, and squares of them do.
_LARGE = sympy.Integer(2) ** 62
_FACTOR = sympy.Integer(2) ** 64


def moderate(slots: Sequence[Slot]) -> frozenset[sympy.Symbol]:
    """Slots whose finished values lie between 1 and the number of elements, in all their forms.

    These are counts, and sums of exponentials below a maximum.
    """
    names = [each.name for each in slots if _is_count(each) or _is_mass(each, slots)]
    return frozenset(form(name) for name in names for form in (value, new, guarded))


def _is_count(slot: Slot) -> bool:
    return slot.monoid.name == "sum" and slot.contribution == 1


def _is_mass(slot: Slot, slots: Sequence[Slot]) -> bool:
    """Whether a slot sums exponentials below a maximum of an earlier slot, so one term is 1."""
    if slot.monoid.name != "sum":
        return False
    shown = _unmasked(slot.contribution, sympy.S.Zero)
    base, power = shown.as_base_exp()
    if base not in (sympy.E, 2):
        return False
    tops = [each for each in slots if each.monoid.name == "max"]
    below = {
        opened(element) - form(each.name)
        for each in tops
        for element in (each.contribution, _unmasked(each.contribution, each.monoid.identity))
        for form in (new, guarded)
    }
    # The largest term is 1 whatever positive number multiplies the difference.
    number, difference = power.as_coeff_Mul()
    return opened(power) in below or (number > 0 and opened(difference) in below)


def _unmasked(contribution: sympy.Expr, identity: sympy.Expr) -> sympy.Expr:
    if isinstance(contribution, sympy.Piecewise) and contribution.args[-1][0] == identity:
        return contribution.args[0][0]
    return contribution


def is_risky(factor: sympy.Expr, symbols: frozenset[sympy.Symbol]) -> bool:
    """Whether a factor is a reciprocal that may be out of range where the quotient is not.

    True where nothing is known of the divisor; `symbols` are moderate numbers.
    """
    if not isinstance(factor, sympy.Pow) or not factor.args[1].could_extract_minus_sign():
        return False
    return not _is_moderate(divisor(factor)[0], symbols)


def divisor(reciprocal: sympy.Pow) -> tuple[sympy.Expr, int]:
    """The divisor of a reciprocal, and how often it divides."""
    base, power = reciprocal.args
    return (base, -int(power)) if power.is_Integer else (base**-power, 1)


def _is_moderate(below: sympy.Expr, symbols: frozenset[sympy.Symbol]) -> bool:
    """Whether a divisor needs no factor; a root is near enough to 1, of whatever number."""
    if below in symbols or (below.is_Symbol and below.is_integer):
        return True
    if below.is_number:
        return bool(1 / _LARGE < abs(below) < _LARGE)
    if isinstance(below, sympy.Pow):
        return bool(below.args[1] == sympy.S.Half)
    return isinstance(below, sympy.Mul) and all(_is_moderate(e, symbols) for e in below.args)


def scale(below: sympy.Expr) -> sympy.Expr:
    """The power of two that a divisor and its dividend are multiplied by."""
    size = Abs(below)
    return sympy.Piecewise((_FACTOR, size < 1 / _LARGE), (1 / _FACTOR, size > _LARGE), (1, True))


Definition = tuple[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True)
class Shared:
    """Expressions with common parts computed once, and invariant parts hoisted."""

    #: The same for all elements.
    fixed: tuple[Definition, ...]
    #: Common subexpressions, for each element.
    definitions: tuple[Definition, ...]
    #: The rest of each expression.
    expressions: tuple[sympy.Expr, ...]


#: Slots of one sweep over a tile, whose new values follow it in the order of updates.
Phase = tuple[Slot, ...]


def phases(slots: Sequence[Slot]) -> tuple[Phase, ...]:
    """Divide slots into as few sweeps as possible.

    Contributions of a phase need new values of earlier phases only.
    """
    level: dict[str, int] = {}
    for slot in slots:
        needed = [0]
        for name, each in level.items():
            fresh = {new(name), guarded(name)}
            if slot.contribution.free_symbols & fresh:
                needed.append(each + 1)
            if slot.carry.free_symbols & fresh:
                needed.append(each)
        level[slot.name] = max(needed)
    count = 1 + max(level.values(), default=-1)
    return tuple(tuple(s for s in slots if level[s.name] == i) for i in range(count))


def share(
    expressions: Sequence[sympy.Expr],
    changing: Iterable[sympy.Symbol],
    slots: Sequence[Slot] = (),
) -> Shared:
    """Compute common parts of expressions once, and invariant ones once for all elements.

    Factors and addends that no element changes are gathered, so that a division by a sum becomes
    one reciprocal and products with it (see `moderate`, which gets `slots`). Addends of a row are
    added to a difference, not to what is subtracted: of ``x - m - log(s)`` the first two are close
    together, and large.
    """
    hoist = _Hoist(frozenset(changing), moderate(slots))
    inside = [hoist.run(each) for each in expressions]
    fixed = tuple((symbol, each) for each, symbol in hoist.found.items())
    definitions, left = shared(inside)
    return Shared(fixed, tuple(definitions), tuple(left))


def hoisted(
    expression: sympy.Expr, changing: Iterable[sympy.Symbol], slots: Sequence[Slot]
) -> tuple[tuple[Definition, ...], sympy.Expr]:
    """Compute the invariant parts of an expression once: their definitions, and the rest.

    As `share`, but nothing else is taken out.
    """
    hoist = _Hoist(frozenset(changing), moderate(slots))
    rest = hoist.run(expression)
    return tuple((symbol, each) for each, symbol in hoist.found.items()), rest


class _Hoist:
    """Replaces invariant parts of expressions by symbols."""

    def __init__(
        self, changing: frozenset[sympy.Symbol], moderate: frozenset[sympy.Symbol]
    ) -> None:
        self.changing = changing
        self.moderate = moderate
        self.found: dict[sympy.Expr, sympy.Symbol] = {}

    def run(self, expression: sympy.Expr) -> sympy.Expr:
        if expression.is_number or expression.is_Atom:
            return expression
        if not self.changes(expression):
            return self.symbol(expression)
        if isinstance(expression, sympy.exp):
            factor, difference = factored(expression.args[0])
            if factor != 1:
                return sympy.exp(factor * Unevaluated(self.run(difference)))
        if isinstance(expression, sympy.Add):
            return self.added(expression)
        if isinstance(expression, sympy.Mul):
            return self.gathered(expression)
        return with_parts(expression, self.run)

    def gathered(self, expression: sympy.Expr) -> sympy.Expr:
        still = [each for each in expression.args if not self.changes(each)]
        moving = [self.run(each) for each in expression.args if self.changes(each)]
        if not still:
            return expression.func(*moving)
        risky = [each for each in still if is_risky(each, self.moderate)]
        if isinstance(expression, sympy.Mul) and risky:
            return self.divided(moving, still, risky)
        fixed = unopened(*still) if expression.is_Mul else expression.func(*still)
        return expression.func(self.run(fixed), *moving)

    def divided(
        self, moving: list[sympy.Expr], still: list[sympy.Expr], risky: list[sympy.Expr]
    ) -> sympy.Expr:
        """A product with reciprocals that may be out of range, one after another.

        Factors follow in turns: a product of them may be out of range where the whole is not.
        """
        above = unopened(*(each for each in still if each not in risky))
        divisors = [below for each in risky for below in [divisor(each)[0]] * divisor(each)[1]]
        # As many as divisors, so that one divides one.
        parts = [*moving[: len(divisors) - 1], sympy.Mul(*moving[len(divisors) - 1 :])]
        made = sympy.S.One
        for number, below in enumerate(divisors):
            factor = self.symbol(scale(below))
            reciprocal = self.symbol(above / Unevaluated(factor * below))
            made *= parts[number] if number < len(parts) else 1
            made = Unevaluated(factor * made) * reciprocal
            above = sympy.S.One
        return made

    def added(self, expression: sympy.Add) -> sympy.Expr:
        """A sum, the differences of elements and slots first."""
        still = [each for each in expression.args if not self.changes(each)]
        slots = [each for each in still if each.as_coeff_Mul()[1].is_Symbol]
        others = [each for each in still if each not in slots and not each.is_number]
        if not slots or not others:
            return self.gathered(expression)
        near = self.gathered(sympy.Add(*(each for each in expression.args if each not in others)))
        return Unevaluated(near) + self.run(sympy.Add(*others))

    def changes(self, expression: sympy.Expr) -> bool:
        return bool(expression.free_symbols & self.changing)

    def symbol(self, expression: sympy.Expr) -> sympy.Symbol:
        fresh = sympy.Dummy(f"h{len(self.found)}", real=True)
        return self.found.setdefault(expression, fresh)


# Conversion to TVM, with exponentials to the base of two.

_LOG2E = 1 / math.log(2)


def written(expression: sympy.Expr, values: Mapping[sympy.Symbol, Any], dtype: str) -> Any:
    """Convert an expression to TVM; ``exp(x)`` becomes ``exp2(x * log2(e))``.

    The hardware has no other exponential. The factor comes behind the difference in the exponent,
    not before it: of large numbers that lie close together the difference is exact.
    """

    def change(call: Any, mutator: Any) -> Any:
        call = mutator.default_mutate(call)
        if not isinstance(call.op, ir.Op) or call.op.name != "tirx.exp":
            return call
        (power,) = call.args
        return ir.tirx.exp2(power * ir.tirx.const(_LOG2E, str(power.ty)))

    return ir.mutate(to_tir(expression, values, dtype), (ir.Call, change))


def combined(monoid: Monoid, left: Any, right: Any, dtype: str) -> Any:
    """Two numbers combined under a monoid."""
    a, b = sympy.symbols("a b", real=True)
    return written(monoid.combine(a, b), {a: left, b: right}, dtype)


class Definitions:
    """Values of symbols, to which intermediate values are added."""

    def __init__(self, values: Mapping[sympy.Symbol, Any], dtype: str) -> None:
        self.values = dict(values)
        self.dtype = dtype
        #: Numbers of the slots that have several.
        self.chosen: dict[str, list[Any]] = {}

    def write(self, expression: sympy.Expr, dtype: str = "") -> Any:
        """An expression over the values so far, in the type of the arithmetic or another."""
        return written(expression, self.values, dtype or self.dtype)

    def define(self, definitions: Sequence[Definition]) -> None:
        """Statements: compute definitions, and name them."""
        for symbol, each in definitions:
            self.values[symbol] = Scratch(f"{symbol.name}_", self.dtype, self.write(each)).value

    def all(self, parts: Shared) -> list[Any]:
        """The expressions of parts whose fixed part is defined already."""
        self.define(parts.definitions)
        return [self.write(each) for each in parts.expressions]
