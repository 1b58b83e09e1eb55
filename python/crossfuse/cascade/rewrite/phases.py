"""Orders the computations of one step of a stream; pure algebra.

Contributions that need a new value of an earlier slot wait until a sweep over the tile has made it:
the maximum first, then the sum of exponentials. So slots are divided into phases. Each phase is one
sweep over the elements of a tile, which stay in registers, and then new values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from crossfuse import _tvm as ir
from crossfuse.cascade.expressions.functions import (
    Abs,
    Unevaluated,
    factored,
    opened,
    shared,
    unopened,
    with_parts,
)
from crossfuse.cascade.expressions.tir import to_tir
from crossfuse.cascade.rewrite.scripting import (
    PLACE,
    Pair,
    Scratch,
    best_of,
    flat,
    named,
    nothing,
    numbers,
    pairs,
    stands_before,
    worst_of,
)
from crossfuse.cascade.rewrite.tiles import refused
from crossfuse.cascade.spec import Monoid, Slot, guarded, left, new, right, value

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
    return not _is_moderate(divisors(factor)[0], symbols)


def divisors(reciprocal: sympy.Pow) -> list[sympy.Expr]:
    """What a reciprocal divides by, one after another: of a power 3/2 a number and its root."""
    base, power = reciprocal.args
    whole = int(-power) if power.is_Rational and power.q <= 2 else 0
    rest = -power - whole
    return [base] * whole + ([base**rest] if rest != 0 else [])


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

        Factors follow in turns: a product of them may be out of range where the whole is not. What
        is divided already is multiplied by the next before it is scaled: it may be small.
        """
        above = unopened(*(each for each in still if each not in risky))
        found = [below for each in risky for below in divisors(each)]
        # As many as divisors, so that one divides one.
        parts = [*moving[: len(found) - 1], sympy.Mul(*moving[len(found) - 1 :])]
        made = sympy.S.One
        for number, below in enumerate(found):
            factor = sympy.S.One
            if not _is_moderate(below, self.moderate):
                factor = self.symbol(scale(below))
            reciprocal = self.symbol(above / Unevaluated(factor * below))
            part = parts[number] if number < len(parts) else sympy.S.One
            made = Unevaluated(made * part) if number else part
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


# Merges the states of segments to one, by blocks that reduce tuples.

# Sorted lists of the best elements of a row: insertion, and the merge of two lists.

#: Binds a value to a name.
Bind = Callable[[str, Any], Any]


def insert(monoid: Monoid, kept: list[tuple[Scratch, Scratch]], new: Pair, dtype: str) -> None:
    """Statements: insert an element into a sorted list, whose last one falls off.

    The list is values and places, the best first.
    """
    if len(kept) == 1:
        ((value, place),) = kept
        before = stands_before(monoid, new, (value.value, place.value))
        with ir.script.If(before), ir.script.Then():
            value.set(new[0])
            place.set(new[1])
        return
    last = (kept[-1][0].value, kept[-1][1].value)
    # Most elements of a long row are not among the best.
    with ir.script.If(stands_before(monoid, new, last)), ir.script.Then():
        kept[-1][0].set(new[0])
        kept[-1][1].set(new[1])
        for upper, lower in zip(reversed(kept[:-1]), reversed(kept[1:]), strict=True):
            _exchange(monoid, upper, lower, dtype)


def _exchange(
    monoid: Monoid, upper: tuple[Scratch, Scratch], lower: tuple[Scratch, Scratch], dtype: str
) -> None:
    """Statements: swap two neighbours of a list if the lower one is better."""
    low = (lower[0].value, lower[1].value)
    before = stands_before(monoid, low, (upper[0].value, upper[1].value))
    with ir.script.If(before), ir.script.Then():
        value, place = Scratch("value_", dtype, low[0]), Scratch("place_", PLACE, low[1])
        for mine, other in zip(lower, upper, strict=True):
            mine.set(other.value)
        upper[0].set(value.value)
        upper[1].set(place.value)


def merged(
    monoid: Monoid, left: list[Pair], right: list[Pair], name: str, bind: Bind
) -> list[Pair]:
    """The best of two sorted lists of equal length, sorted, by bitonic merging (Batcher, 1968).

    The better of the i-th best of one and the i-th from the end of the other are the best of both;
    they fall and then rise, so that they are sorted in logarithmically many steps. Lists have the
    best first; `bind` names intermediate values.
    """
    count = len(left)
    size = 1 << (count - 1).bit_length()
    found: list[Pair | None] = []
    for i in range(size):
        one = left[i] if i < count else None
        other = right[size - 1 - i] if size - 1 - i < count else None
        both = best_of(monoid, one, other) if one and other else one or other
        found.append(_named(both, f"{name}_{i}", bind))
    step = size // 2
    while step:
        for i in range(size):
            upper, lower = found[i], found[i ^ step]
            if i & step or (upper is None and lower is None):
                continue
            label = f"{name}_{step}_{i}"
            if upper is None or lower is None:
                found[i], found[i + step] = upper or lower, None
            else:
                found[i] = _named(best_of(monoid, upper, lower), label, bind)
                found[i + step] = _named(worst_of(monoid, upper, lower), f"{label}_low", bind)
        step //= 2
    return [each for each in found[:count] if each is not None]


def _named(pair: Pair | None, name: str, bind: Bind) -> Pair | None:
    return None if pair is None else (bind(name, pair[0]), bind(f"{name}_place", pair[1]))


#: Most numbers of a slot; each pair of threads exchanges all of them.
MOST = 32


def check_merges(slots: Sequence[Slot]) -> None:
    """Refuse slots that keep too many numbers, or correct the numbers that they chose."""
    for slot in slots:
        if slot.monoid.k > MOST:
            limit, instead = f"{MOST} numbers", "leave it out of the cascade"
            found = f"the {slot.monoid.k} largest"
            raise refused(f"slot {slot.name}", found, limit, instead)
        if slot.monoid.keeps_places and slot.corrected:
            limit, instead = "values that stay as they are", "leave it out of the cascade"
            raise refused(f"slot {slot.name}", f"a carry {slot.carry}", limit, instead)


def merge(
    slots: Sequence[Slot],
    into: Mapping[str, Any],
    into_place: Sequence[Any],
    of: Mapping[str, Any],
    of_place: Sequence[Any],
    invariants: Mapping[sympy.Symbol, Any],
    dtype: str,
) -> None:
    """Statements of a block that reduces states; the block's iterators are written already.

    The form is one that `crossfuse.lower.lower_merges` reads: first the right state is bound,
    number by number, then what merging computes, and the stores come last. Buffers of the merged
    state (`into`) and of segments (`of`) are by the names of numbers.
    """
    kept = [(slot, each) for slot in slots for each in numbers(slot, dtype)]
    with ir.script.init():
        for slot, number in kept:
            start = nothing(number, slot, written(slot.init, invariants, dtype))
            ir.script.buffer_store(into[number.name], start, list(into_place))
    ours = {each.name: into[each.name][tuple(into_place)] for _, each in kept}
    theirs = {
        each.name: _bound(f"{each.name}_b", of[each.name][tuple(of_place)]) for _, each in kept
    }
    values = dict(invariants)
    for slot in slots:
        # Of all slots before any is merged: a mean moves by what a later slot has kept.
        first = numbers(slot, dtype)[0].name
        values[left(slot.name)], values[right(slot.name)] = ours[first], theirs[first]
    results: list[Any] = []
    for slot in slots:
        found = _merged(slot, values, ours, theirs, dtype)
        results += found
        values[new(slot.name)] = values[guarded(slot.name)] = found[0]
        if slot.guard is not None and _is_used(guarded(slot.name), slots):
            values[guarded(slot.name)] = _bound(
                f"{slot.name}_guard", written(slot.guard, values, dtype)
            )
    for (_, number), result in zip(kept, results, strict=True):
        ir.script.buffer_store(into[number.name], result, list(into_place))


def _merged(
    slot: Slot,
    values: Mapping[sympy.Symbol, Any],
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    dtype: str,
) -> list[Any]:
    """Merge a slot's numbers of two sides, and bind them, over the values of the expressions."""
    if slot.monoid.keeps_places:
        one, other = pairs(slot, ours, dtype), pairs(slot, theirs, dtype)
        return flat(merged(slot.monoid, one, other, f"{slot.name}_new", _stored))
    return [_bound(f"{slot.name}_new", written(slot.merge, values, dtype))]


def _is_used(symbol: sympy.Symbol, slots: Sequence[Slot]) -> bool:
    return any(each.merge is not None and symbol in each.merge.free_symbols for each in slots)


def _stored(name: str, what: Any) -> Any:
    """Store a number: TVM substitutes bound values for their names, and choices would nest."""
    return Scratch(name, str(what.ty), what).value


def _bound(name: str, value: Any) -> Any:
    return named(name, ir.script.bind(value))
