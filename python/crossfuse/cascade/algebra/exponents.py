"""Rewrites products so that no intermediate value overflows or underflows; proves signs.

``exp(x - m)``, never ``exp(x) * exp(-m)``; ``(x / a)**2``, never ``x**2 / a**2``. All rewrites give
an equal expression.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import sympy
from sympy.core.relational import Relational

from crossfuse.cascade.expressions.functions import (
    Fence,
    Unevaluated,
    fenced_sum,
    settled,
    with_parts,
)

#: Least multiple that is taken for a denominator, which sympy made of an epsilon.
_LARGE = 100


def joined(expression: sympy.Basic) -> sympy.Basic:
    """Join the exponentials of every product in an expression.

    Differences of which nothing cancels are added up first, each as it stands: of ``exp(x - m) *
    exp(y - n)`` the sum of m and n is rounded as large numbers are, and the distances are not.
    """
    if not expression.has(sympy.exp):
        return expression
    expression = with_parts(expression, joined)
    if not isinstance(expression, sympy.Mul):
        return expression
    powers = [each for each in expression.args if isinstance(each, sympy.exp)]
    if len(powers) < 2:
        return expression
    rest = [each for each in expression.args if each not in powers]
    exponents: list[sympy.Expr] = []
    for each in powers:
        whole = each.args[0]
        for other in [one for one in exponents if _cancel(one, whole)]:
            exponents.remove(other)
            whole += other
        exponents.append(whole)
    apart = all(map(_is_difference, exponents))
    whole = settled(fenced_sum(*exponents)) if apart else sympy.Add(*exponents)
    return sympy.Mul(sympy.exp(whole), *rest)


def _is_difference(total: sympy.Expr) -> bool:
    """Whether addends have different signs, as far as they can be seen."""
    signs = {each.could_extract_minus_sign() for each in sympy.Add.make_args(total)}
    return len(signs) == 2


def _cancel(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether a sum of two sums has less addends than they have."""
    return _addends(one + other) < _addends(one) + _addends(other)


def _addends(total: sympy.Expr) -> int:
    return len(sympy.Add.make_args(total)) if total != 0 else 0


def natural(expression: sympy.Basic) -> sympy.Basic:
    """Write powers of positive numbers, such as ``2**x``, as exponentials."""

    def is_power(each: sympy.Basic) -> bool:
        if not isinstance(each, sympy.Pow):
            return False
        base, power = each.args
        return bool(base.is_number and base.is_positive and not power.is_number)

    return expression.replace(
        is_power, lambda each: sympy.exp(each.args[1] * sympy.log(each.args[0]))
    )


def unlogged(expression: sympy.Basic) -> sympy.Basic:
    """Write logarithms of products as exponents and logarithms of the other factors.

    Taken apart otherwise, ``log(exp(x - m) / s)`` is a sum of ``x`` and ``log(exp(-m) / s)``, which
    leaves the range of numbers.
    """

    def of_product(each: sympy.Basic) -> bool:
        return isinstance(each, sympy.log) and bool(_powers(each.args[0]))

    def apart(each: sympy.log) -> sympy.Expr:
        powers = _powers(each.args[0])
        rest = [one for one in sympy.Mul.make_args(each.args[0]) if one not in powers]
        return sympy.Add(*(power.args[0] for power in powers), sympy.log(sympy.Mul(*rest)))

    return expression.replace(of_product, apart)


def within_choices(total: sympy.Expr) -> sympy.Expr:
    """Add the addends of a sum inside of a choice among them, where something cancels there.

    ``logsumexp(x - mean)`` subtracts ``max(x) - mean`` where that is finite: added to ``-mean``
    before, that is ``-max(x)``, which needs no mean that moves while exponentials are summed.
    """
    parts = sympy.Add.make_args(total)
    for each in parts:
        number, choice = each.as_coeff_Mul()
        others = [part for part in parts if part != each]
        if not isinstance(choice, sympy.Piecewise) or not others:
            continue
        sides = [
            (sympy.Add(*others, *sympy.Add.make_args(sympy.expand_mul(number * value))), test)
            for value, test in choice.args
        ]
        if any(
            _count(side) < len(others) + _count(value)
            for (side, _), (value, _) in zip(sides, choice.args, strict=True)
            if value != 0
        ):
            return sympy.Piecewise(*sides, evaluate=False)
    return total


def _count(total: sympy.Expr) -> int:
    return 0 if total == 0 else len(sympy.Add.make_args(total))


def _powers(product: sympy.Expr) -> list[sympy.Expr]:
    return [each for each in sympy.Mul.make_args(product) if isinstance(each, sympy.exp)]


def rescaled(expression: sympy.Basic) -> sympy.Basic:
    """Write powers of ``1e12 x + 1`` as those of ``x + 1e-12``, so that no large x overflows.

    Sympy brings sums over a common denominator where it takes magnitudes of quotients.
    """
    if not expression.has(sympy.Pow):
        return expression
    if isinstance(expression, sympy.Abs):
        # Evaluated, sympy's own would be brought over a common denominator again.
        return expression.func(rescaled(expression.args[0]), evaluate=False)
    if not isinstance(expression, sympy.Pow):
        return with_parts(expression, rescaled)
    base, power = map(rescaled, expression.args)
    scale = _scale(base)
    if scale == 1 or not power.is_number:
        return sympy.Pow(base, power)
    return sympy.Pow(scale, power) * sympy.Pow(
        sympy.Add(*(each / scale for each in base.args)), power
    )


def _scale(base: sympy.Basic) -> sympy.Expr:
    """The large number that the terms of a sum with a constant are multiples of; else 1."""
    if not isinstance(base, sympy.Add) or not any(each.is_Number for each in base.args):
        return sympy.S.One
    found = [each.as_coeff_Mul()[0] for each in base.args if not each.is_Number]
    large = all(each.is_Integer and abs(each) >= _LARGE for each in found)
    return sympy.Min(*map(abs, found)) if large else sympy.S.One


def ratios(expression: sympy.Basic) -> sympy.Basic:
    """Join powers in numerator and denominator of every product in an expression.

    A ratio is `Unevaluated`, which sympy does not take apart again. Roots stay apart: what they are
    of has twice their range, and so has its quotient.
    """
    if isinstance(expression, Unevaluated) or not expression.has(sympy.Pow):
        return expression
    expression = with_parts(expression, ratios)
    if not isinstance(expression, sympy.Mul):
        return expression
    parts = list(expression.args)
    for below in expression.args:
        base, power = below.as_base_exp()
        if base.is_number or not _divides(below) or (power.is_number and -power <= 1):
            continue
        above = [each for each in parts if _is_paired(each, -power)]
        if above and below in parts:
            largest = max(above, key=lambda each: each.as_base_exp()[1])
            inner, times = largest.as_base_exp()
            parts.remove(below)
            parts.remove(largest)
            ratio = Unevaluated(inner / base)
            parts += [sympy.Pow(ratio, times), sympy.Pow(base, power + times)]
    return sympy.Mul(*parts)


def _is_paired(part: sympy.Expr, power: sympy.Expr) -> bool:
    """Whether a factor is a power of no number that is this one, or of whole ones a smaller one."""
    base, own = part.as_base_exp()
    smaller = own.is_Integer and power.is_Integer and 1 < own < power
    return not base.is_number and bool(own == power or smaller)


def powers_of_products(expression: sympy.Basic) -> sympy.Basic:
    """Write products of equal powers as powers of products: ``(x*w)**2``, which sympy takes apart.

    Of ``x**2 * w**2`` a factor may be infinite, or 0, where the product is neither: of numbers of
    1e19 that a mask multiplies the square is no number. It is one multiplication less, too.
    """
    if isinstance(expression, Unevaluated) or not expression.has(sympy.Pow):
        return expression
    expression = _with_tests(expression, powers_of_products)
    if not isinstance(expression, sympy.Mul):
        return expression
    alike: dict[sympy.Expr, list[sympy.Expr]] = {}
    rest: list[sympy.Expr] = []
    for each in expression.args:
        base, power = each.as_base_exp()
        whole = power.is_Integer and abs(power) > 1 and not base.is_number
        (alike.setdefault(abs(power), []) if whole else rest).append(each)
    for power, parts in alike.items():
        # Divisors alone divide in turns.
        if len(parts) > 1 and not all(map(_divides, parts)):
            bases = (base ** (own / power) for base, own in (e.as_base_exp() for e in parts))
            parts = [Unevaluated(sympy.Mul(*bases)) ** power]
        rest += parts
    return sympy.Mul(*rest)


def squares_of_quotients(expression: sympy.Basic) -> sympy.Basic:
    """Write squares over a divisor as squares of quotients by its root.

    Of ``(x * rsqrt(s))**2`` sympy makes ``x**2/s``, whose square is out of range first.
    """
    if isinstance(expression, Unevaluated) or not expression.has(sympy.Pow):
        return expression
    expression = with_parts(expression, squares_of_quotients)
    if not isinstance(expression, sympy.Mul):
        return expression
    powers = {each: each.as_base_exp() for each in expression.args if not each.is_number}
    above = [base for base, power in powers.values() if power == 2]
    below = [base for base, power in powers.values() if power == -1 and not base.is_integer]
    if not above or not below:
        return expression
    ratio = Unevaluated(sympy.Mul(*above) / sympy.Mul(*map(sympy.sqrt, below)))
    taken = {base**2 for base in above} | {1 / base for base in below}
    return sympy.Mul(*(each for each in expression.args if each not in taken), ratio**2)


def averages(
    expression: sympy.Basic, sums: Collection[sympy.Symbol], length: sympy.Symbol | None
) -> sympy.Basic:
    """Divide sums by the number of elements before powers and quotients of them are computed.

    Sympy makes ``s**2/N**2`` of the square of a mean: infinite where the mean is 1e19. A mean is
    `Unevaluated`, which sympy does not take apart again.
    """
    if length not in expression.free_symbols or isinstance(expression, Unevaluated):
        return expression
    expression = _with_tests(expression, lambda each: averages(each, sums, length))
    if not isinstance(expression, sympy.Mul):
        return expression
    powers = dict(each.as_base_exp() for each in expression.args)
    times = -powers.get(length, sympy.S.Zero)
    known = {base: power for base, power in powers.items() if base in sums}
    if list(known.values()) == [1] or not known:
        return expression
    found = known
    if sympy.Add(*known.values()) != times:
        found = {base: power for base, power in known.items() if power == times != 1}
    if not found or times == 0:
        return expression
    rest = [each for each in expression.args if each.as_base_exp()[0] not in {length, *found}]
    means = (Unevaluated(base / length) ** power for base, power in found.items())
    return sympy.Mul(*rest, *means)


def _with_tests(
    expression: sympy.Basic, change: Callable[[sympy.Basic], sympy.Basic]
) -> sympy.Basic:
    """Change all parts of an expression, and both sides of comparisons that choose among them."""

    def changed(test: sympy.Basic) -> sympy.Basic:
        if isinstance(test, Relational):
            return test.func(*map(change, test.args), evaluate=False)
        if isinstance(test, sympy.And | sympy.Or | sympy.Not):
            return test.func(*map(changed, test.args), evaluate=False)
        return test

    if not isinstance(expression, sympy.Piecewise):
        return with_parts(expression, change)
    sides = [(change(value), changed(test)) for value, test in expression.args]
    return sympy.Piecewise(*sides, evaluate=False)


def _divides(factor: sympy.Expr) -> bool:
    return bool(factor.as_base_exp()[1].could_extract_minus_sign())


def nonnegative(expression: sympy.Expr) -> bool:
    """Whether the assumptions on its symbols prove that an expression is not negative."""
    if isinstance(expression, Fence):
        return nonnegative(expression.args[0])
    if isinstance(expression, sympy.Piecewise):
        return all(nonnegative(value) for value, _ in expression.args)
    if isinstance(expression, sympy.Max):
        return any(nonnegative(each) for each in expression.args)
    if isinstance(expression, sympy.Min):
        return all(nonnegative(each) for each in expression.args)
    # Exponents may be masked by -oo, of which sympy does not say that they are real.
    if expression.is_nonnegative or isinstance(expression, sympy.exp):
        return True
    if isinstance(expression, sympy.Add | sympy.Mul):
        return all(nonnegative(each) for each in expression.args)
    if isinstance(expression, sympy.Pow):
        base, power = expression.args
        return bool(power.is_even) or nonnegative(base)
    return False


def positive(expression: sympy.Expr) -> bool:
    """Whether an expression is proved to be above 0; see `nonnegative`."""
    if expression.is_positive:
        return True
    if isinstance(expression, Fence):
        return positive(expression.args[0])
    if isinstance(expression, sympy.Add):
        parts = expression.args
        return all(nonnegative(each) for each in parts) and any(positive(each) for each in parts)
    if isinstance(expression, sympy.Max):
        return any(positive(each) for each in expression.args)
    if isinstance(expression, sympy.Mul | sympy.Min):
        return all(positive(each) for each in expression.args)
    if isinstance(expression, sympy.Pow):
        return positive(expression.args[0])
    return False


def has_one_sign(parts: Iterable[sympy.Expr]) -> bool:
    """Whether all parts of a sum are proved to be of one sign, so that they cannot cancel."""
    found = list(parts)
    return all(map(nonnegative, found)) or all(nonnegative(-each) for each in found)
