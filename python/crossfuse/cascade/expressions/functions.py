"""Functions of numbers that sympy lacks or names otherwise than TVM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import sympy
from sympy.printing.precedence import PRECEDENCE

from crossfuse.errors import CascadeRefused, Rule

refused = Rule(CascadeRefused, "cascade-expression")


class _Whole(sympy.Function):
    """A function whose value is a whole number near its argument."""

    nargs = 1
    is_integer = True
    is_extended_real = True

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """Whole numbers stay as they are."""
        return x if x.is_integer else None


class rint(_Whole):  # named as in numpy, so that sympy's printer for numpy prints a call of it
    """The nearest whole number; of two that are equally near the even one."""


class trunc(_Whole):
    """The nearest whole number towards zero."""


class round_away(_Whole):
    """The nearest whole number; of two that are equally near the one farther from zero."""

    def _numpycode(self, printer: Any) -> str:
        x = printer._print(self.args[0])
        return f"(numpy.sign({x})*numpy.floor(numpy.abs({x}) + 0.5))"


class magnitude(sympy.Function):
    """An absolute value that is left as it is: sympy's own takes signs out of sums without end."""

    nargs = 1
    is_extended_nonnegative = True

    def _numpycode(self, printer: Any) -> str:
        return f"numpy.abs({printer._print(self.args[0])})"


class Abs(sympy.Abs):
    """An absolute value of what is written, in front of which stand factors of known sign.

    Sympy's own takes signs out of sums below fences, which opens these, and writes sums over a
    common denominator, which makes a large factor of an epsilon.
    """

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """Numbers are computed; what is known not to be negative is its own magnitude."""
        x = sympy.sympify(x)
        if x.is_number:
            return sympy.Abs(x)
        if x.is_extended_nonnegative or isinstance(x, sympy.exp):
            return x
        if x.is_extended_nonpositive:
            return -x
        if isinstance(x, sympy.Pow) and x.exp.is_integer:
            return cls(x.base) ** x.exp
        if isinstance(x, sympy.Mul):
            return cls._of_product(x)
        return cls(-x) if x.is_Add and x.could_extract_minus_sign() else None

    @classmethod
    def _of_product(cls, x: sympy.Mul) -> sympy.Expr:
        known, unknown = [], []
        for each in x.args:
            below = each.is_Pow and each.exp.is_integer and each.exp.is_negative
            base, power = (each.base, each.exp) if below else (each, 1)
            if isinstance(cls(base), sympy.Abs):
                unknown.append(-each if each.is_Add and each.could_extract_minus_sign() else each)
            else:
                known.append(cls(base) ** power)
        inner = cls(sympy.Mul(*unknown), evaluate=False) if unknown else sympy.S.One
        return sympy.Mul(*known, inner)


class Unevaluated(sympy.UnevaluatedExpr):
    """A number that sympy leaves as it is, and knows to be one.

    Nothing is assumed of sympy's own: a sum or product with it does not commute, so is not real,
    and its absolute value is the root of a square that is multiplied out over real and imaginary
    parts, of which no comparison is allowed.
    """

    is_commutative = True
    is_extended_real = True


class Flag(Unevaluated):
    """A condition as a factor, 1 or 0: what it multiplies is multiplied, and NaN by 0 if infinite.

    Its argument is ``Piecewise((1, condition), (0, True))``. As a plain factor that is a mask,
    which hides what it multiplies: ``where(seen, x, 0)``.
    """

    is_real = True
    is_finite = True
    is_nonnegative = True
    is_extended_nonnegative = True

    def _eval_power(self, power: sympy.Expr) -> sympy.Expr | None:
        return self if power.is_integer and power.is_positive else None

    def _numpycode(self, printer: Any) -> str:
        if not isinstance(self.args[0], sympy.Piecewise):
            return str(printer._print(self.args[0]))
        # Single precision, so that no product takes more digits from it.
        return f"({printer._print(self.args[0].args[0][1])}).astype(numpy.float32)"


def is_mask(term: sympy.Basic) -> bool:
    """Whether a term is 1 where a condition holds, and 0 elsewhere."""
    return (
        isinstance(term, sympy.Piecewise)
        and len(term.args) == 2
        and (term.args[0][0], term.args[1][0]) == (1, 0)
    )


def with_flags(product: sympy.Expr) -> sympy.Expr:
    """A product in which masks are factors that multiply, not choices."""
    return sympy.Mul(*(Flag(e) if is_mask(e) else e for e in sympy.Mul.make_args(product)))


class Compared(sympy.Function):
    """A side of a comparison, of whose sign sympy knows nothing.

    An exponential is positive to sympy, and 0 in floating point where it underflows.
    """

    nargs = 1
    is_extended_real = True

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """Numbers, whole numbers and symbols stay as they are."""
        return x if x.is_number or x.is_Symbol or x.is_integer else None

    def _numpycode(self, printer: Any) -> str:
        return f"({printer._print(self.args[0])})"

    def _sympystr(self, printer: Any) -> str:
        return str(printer._print(self.args[0]))


class Unbounded(sympy.NumberSymbol):
    """Infinity as elements and results are compared with it, which sympy does not decide.

    A symbol is a real number to sympy, of which ``x == oo`` is false; an element may be infinite.
    """

    is_real = True
    is_extended_real = True
    is_positive = True
    is_negative = False
    is_zero = False

    def _as_mpf_val(self, prec: int) -> Any:
        return sympy.Float("1e400")._mpf_

    def _numpycode(self, _printer: Any) -> str:
        return "numpy.inf"

    def _sympystr(self, _printer: Any) -> str:
        return "oo"


UNBOUNDED = Unbounded()


class log1p(sympy.Function):  # named as in numpy and TVM
    """The logarithm of 1 + x, with all digits where x is near 0."""

    nargs = 1

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        """The logarithm of 1 is 0."""
        return sympy.S.Zero if x.is_zero else None

    def _eval_is_real(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None


def sigmoid(x: sympy.Expr) -> sympy.Expr:
    """The logistic function, spelt out so that the algebra sees its parts."""
    return 1 / (1 + sympy.exp(-x))


#: Functions by the names of TVM's operators after the last dot.
OF_OPERATOR: dict[str, Callable[..., sympy.Expr]] = {
    "exp": sympy.exp,
    "exp2": lambda x: sympy.Pow(2, x),
    "exp10": lambda x: sympy.Pow(10, x),
    "log": sympy.log,
    "log2": lambda x: sympy.log(x) / sympy.log(2),
    "log10": lambda x: sympy.log(x) / sympy.log(10),
    "log1p": log1p,
    "sqrt": sympy.sqrt,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "pow": sympy.Pow,
    "fabs": Abs,
    "abs": Abs,
    "tanh": sympy.tanh,
    "sinh": sympy.sinh,
    "cosh": sympy.cosh,
    "asinh": sympy.asinh,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "erf": sympy.erf,
    "sigmoid": sigmoid,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "trunc": trunc,
    "round": round_away,
    "nearbyint": rint,
}

#: Names of TVM's functions of one number, by the sympy function that each computes.
OF_FUNCTION: dict[type, str] = {
    sympy.exp: "exp",
    sympy.log: "log",
    log1p: "log1p",
    sympy.tanh: "tanh",
    sympy.sinh: "sinh",
    sympy.cosh: "cosh",
    sympy.asinh: "asinh",
    sympy.sin: "sin",
    sympy.cos: "cos",
    sympy.erf: "erf",
    sympy.floor: "floor",
    sympy.ceiling: "ceil",
    trunc: "trunc",
    round_away: "round",
    rint: "nearbyint",
}


def with_parts(
    expression: sympy.Basic, change: Callable[[sympy.Basic], sympy.Basic]
) -> sympy.Basic:
    """Change all parts of an expression.

    Conditions stay as they are: sympy takes a real ``m == -oo`` to be false.
    """
    if isinstance(expression, sympy.Piecewise):
        sides = [(change(value), test) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    return expression.func(*map(change, expression.args)) if expression.args else expression


def factored(expression: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Split a sum, such as an exponent, into a positive factor of all addends and the rest.

    Multiplied in, as sympy has it, the factor would be rounded with each of them: of ``3*x - 3*m``
    as three times the difference, large numbers that lie close together give an exact one. The
    factor is 1 for what is no sum, and where addends have several.
    """
    addends = sympy.Add.make_args(expression)
    factors = {abs(each.as_coeff_Mul()[0]) for each in addends}
    if len(addends) == 1 or len(factors) != 1:
        return sympy.S.One, expression
    (factor,) = factors
    return factor, sympy.Add(*(each / factor for each in addends))


#: Largest power of a divisor that divides one time after another, and the denominator of roots.
_DIVIDES_AGAIN, _HALVES = 4, 2


def fraction(product: sympy.Expr) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    """Factors and divisors of a product in their order, as they are to be computed: in turns.

    A product of factors or of divisors may be out of range where the whole is not. So a power of a
    divisor is several divisors: of ``s/m**2`` with s and m about 1e30 the square is infinite.
    """
    above, below = [], []
    for each in product.as_ordered_factors():
        base, exponent = each.as_base_exp()
        if exponent.is_Rational and exponent.q == _HALVES and exponent < -1:
            # A root, and whole powers of what it is of.
            above.append(base**-sympy.S.Half)
            exponent += sympy.S.Half
        if not (isinstance(each, sympy.Pow) and exponent.is_Integer and exponent < 0):
            above.append(each)
        elif base.is_number or exponent < -_DIVIDES_AGAIN:
            below.append(base**-exponent)
        else:
            below += [base] * -int(exponent)
    # Lengths last: what an infinity divides is 0, but for what was infinite by then.
    return above, sorted(below, key=lambda each: bool(each.is_integer))


# Arithmetic fences: they preserve the source's order of additions inside sympy.
#
# sympy joins ``(a - b) + c`` into one sum of three addends, in an order of its own. In floating
# point that is another number: ``(max - min) + 1e-6`` of a constant row is 1e-6, ``(max + 1e-6) -
# min`` may be 0. An arithmetic fence keeps the inner sum one addend (compare ``__arithmetic_fence``
# of clang); so it does with a sum that a number multiplies, which sympy would multiply out.


#: From here on float32 has no longer all whole numbers.
_WHOLE = 2**24


class Fence(sympy.Expr):
    """A sum inside of a sum, or behind a number, that sympy leaves where it is.

    Only sums need a fence: anything else, and any number, is returned without one.
    """

    is_commutative = True
    precedence = PRECEDENCE["Add"]

    def __new__(cls, inner: Any) -> Any:
        """Fence an expression, or return it if it needs no fence."""
        inner = sympy.sympify(inner)
        needed = inner.is_Add and not inner.is_number
        return sympy.Expr.__new__(cls, inner) if needed else inner

    def _numpycode(self, printer: Any) -> str:
        return f"({printer._print(self.args[0])})"

    def _sympystr(self, printer: Any) -> str:
        return str(printer._print(self.args[0]))


def _same_as_inner(assumption: str) -> Any:
    return lambda fence: getattr(fence.args[0], f"is_{assumption}")


_SIGNS = ("zero", "nonnegative", "nonpositive", "positive", "negative")
for _assumption in (
    *("real", "extended_real", "finite", "infinite", "integer", *_SIGNS),
    *(f"extended_{sign}" for sign in _SIGNS[1:]),
):
    setattr(Fence, f"_eval_is_{_assumption}", _same_as_inner(_assumption))


def fenced_sum(*addends: sympy.Expr) -> sympy.Expr:
    """A sum of addends each of which is added up first.

    Sums among them get a fence, unless all is whole numbers, which are exact in any order.
    """
    whole = all(map(_is_exact, addends))
    return sympy.Add(*(each if whole else Fence(each) for each in addends))


def fenced_product(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """A product in which no number is multiplied into a sum, unless all is whole numbers."""
    if right.is_number:
        left, right = right, left
    if left.is_number and not (_is_exact(left) and _is_exact(right)):
        return left * Fence(right)
    return left * right


def _is_exact(expression: sympy.Expr) -> bool:
    """Whether it is a whole number that float32 holds: `(1 - seen) * -1e9` is none."""
    if not expression.is_integer:
        return False
    return all(abs(each) < _WHOLE for each in expression.atoms(sympy.Integer))


def unopened(*factors: sympy.Expr) -> sympy.Expr:
    """A product of factors, of which sympy multiplies no number into a sum."""
    parts = [sympy.sympify(each).as_coeff_Mul() for each in factors]
    number = sympy.Mul(*(each for each, _ in parts))
    return fenced_product(number, sympy.Mul(*(each for _, each in parts)))


def opened(expression: sympy.Basic, symbols: Iterable[sympy.Symbol] | None = None) -> sympy.Basic:
    """Remove the fences from an expression, or those around any of some symbols."""
    if not expression.has(Fence):
        return expression
    wanted = None if symbols is None else frozenset(symbols)
    if isinstance(expression, Fence) and (wanted is None or expression.free_symbols & wanted):
        return opened(expression.args[0], wanted)
    return with_parts(expression, lambda each: opened(each, wanted))


def settled(expression: sympy.Basic) -> sympy.Basic:
    """Remove the fences that change nothing.

    Left are those around an addend of a sum, and behind a number: as a factor among others, or
    inside of a function, a sum is added up first anyway.
    """
    if not expression.has(Fence):
        return expression
    if isinstance(expression, Fence):
        return settled(expression.args[0])
    if isinstance(expression, sympy.Add):
        return fenced_sum(*(settled(each) for each in expression.args))
    if isinstance(expression, sympy.Mul):
        number, rest = expression.as_coeff_Mul()
        inside = [settled(each) for each in sympy.Mul.make_args(rest)]
        if number != 1 and len(inside) == 1:
            return fenced_product(number, inside[0])
        return number * sympy.Mul(*inside)
    return with_parts(expression, settled)


def cancelled(expression: sympy.Basic) -> sympy.Basic:
    """Remove the fences of sums that have an addend which cancels with one beside them.

    Of ``((x - mean) - (max - mean))`` the mean is not subtracted and added again: where it is large
    that would leave of x what rounding spares.
    """
    if not expression.has(Fence):
        return expression
    expression = with_parts(expression, cancelled)
    if not isinstance(expression, sympy.Add):
        return expression
    fenced = [each for each in expression.args if isinstance(each.as_coeff_Mul()[1], Fence)]
    for some in (*((each,) for each in fenced), *combinations(fenced, 2)):
        apart = [(number, fence.args[0]) for number, fence in (e.as_coeff_Mul() for e in some)]
        addends = [number * each for number, inner in apart for each in inner.args]
        flat = sympy.Add(*(each for each in expression.args if each not in some), *addends)
        before = len(expression.args) - len(some) + len(addends)
        # Two that are the same make one of them; two that cancel make none.
        if len(sympy.Add.make_args(flat)) <= before - 2 or flat == 0:
            return cancelled(flat)
    return expression


# Common subexpressions.


def shared(
    expressions: Sequence[sympy.Expr],
) -> tuple[list[tuple[sympy.Symbol, sympy.Expr]], list[sympy.Expr]]:
    """Take common subexpressions out of expressions that are numbers, not conditions.

    Returns their definitions, whose symbols are new and real and use earlier ones only, and the
    rest of each expression.
    """
    held: dict[sympy.Basic, sympy.Dummy] = {}
    inside = [_hold_conditions(each, held) for each in map(sympy.sympify, expressions)]
    names = {each.name for one in expressions for each in sympy.sympify(one).free_symbols}
    symbols = (each for each in sympy.numbered_symbols("t", real=True) if each.name not in names)
    definitions, left = sympy.cse(inside, symbols=symbols)
    back = {symbol: condition for condition, symbol in held.items()}
    return (
        [(symbol, _put_back(each, back)) for symbol, each in definitions],
        [_put_back(each, back) for each in left],
    )


def _hold_conditions(expression: sympy.Basic, held: dict[sympy.Basic, sympy.Dummy]) -> sympy.Basic:
    """Replace conditions by symbols: sympy would share parts of them as if they were numbers."""
    if isinstance(expression, sympy.Piecewise):
        sides = []
        for value, condition in expression.args:
            if condition not in (sympy.true, sympy.false):
                condition = held.setdefault(condition, sympy.Dummy(f"c{len(held)}"))
            sides.append((_hold_conditions(value, held), condition))
        return sympy.Piecewise(*sides, evaluate=False)
    return with_parts(expression, lambda each: _hold_conditions(each, held))


def _put_back(expression: sympy.Basic, held: Mapping[sympy.Dummy, sympy.Basic]) -> sympy.Basic:
    if isinstance(expression, sympy.Piecewise):
        sides = [(_put_back(value, held), held.get(test, test)) for value, test in expression.args]
        return sympy.Piecewise(*sides, evaluate=False)
    return with_parts(expression, lambda each: _put_back(each, held))


# Compiles expressions to functions of numpy arrays, true infinities included.


def function(symbols: Sequence[sympy.Symbol], expression: sympy.Expr) -> Callable[..., Any]:
    """Compile an expression to a function of arrays, which are broadcast against each other.

    The symbols are its arguments, in order. Constants take the arrays' type; all sides of choices
    are computed.
    """
    return _made(tuple(symbols), expression)


@lru_cache(maxsize=4096)
def _made(symbols: tuple[sympy.Symbol, ...], expression: sympy.Expr) -> Callable[..., Any]:
    # Plain names: symbols may be spelt like "m'", or alike with other assumptions. They may be
    # infinite too, so that sympy decides nothing about comparisons with infinities.
    names = [sympy.Symbol(f"argument_{i}", extended_real=True) for i, _ in enumerate(symbols)]
    renamed = expression.xreplace(dict(zip(symbols, names, strict=True)))
    unknown = renamed.free_symbols - set(names)
    if unknown:
        raise ValueError(f"no value for {', '.join(sorted(map(str, unknown)))} in {expression}")
    known = [{"error_function": _erf}, "numpy"]
    made: Callable[..., Any] = sympy.lambdify(names, renamed, modules=known, printer=_printer())
    return made


def _erf(x: Any) -> Any:
    """The error function, which numpy lacks."""
    import math

    import numpy as np

    return np.vectorize(math.erf, otypes=[float])(x)


@lru_cache(maxsize=1)
def _printer() -> Any:
    from sympy.printing.numpy import NumPyPrinter

    class Printer(NumPyPrinter):
        """Prints maxima and conditions of arrays in pairs, and numbers of any size."""

        def _pairs(self, name: str, expr: Any) -> str:
            *rest, last = expr.args
            found = self._print(last)
            for each in rest:
                found = f"numpy.{name}({self._print(each)}, {found})"
            return found

        def _print_Integer(self, expr: Any) -> str:
            # Of integers beyond its own numpy makes arrays of objects; the least float32 is one.
            return repr(float(expr)) if abs(expr) >= 2**63 else str(int(expr))

        def _print_erf(self, expr: Any) -> str:
            return f"error_function({self._print(expr.args[0])})"

        def _print_Mul(self, expr: Any) -> str:
            _, below = fraction(expr)
            again = [each for each in below if below.count(each) > 1]
            if not again:
                return str(super()._print_Mul(expr))
            found = self.parenthesize(expr * sympy.Mul(*again), PRECEDENCE["Mul"])
            return str(found) + "".join(f"/({self._print(each)})" for each in again)

        def _print_Piecewise(self, expr: Any) -> str:
            # Conditions as they are: sympy's own printer simplifies them, as if all were finite.
            found = "numpy.nan"
            for value, test in reversed(expr.args):
                made = self._print(value)
                always = test == sympy.true
                found = made if always else f"numpy.where({self._print(test)}, {made}, {found})"
            return found

        def _print_And(self, expr: Any) -> str:
            return self._pairs("logical_and", expr)

        def _print_Or(self, expr: Any) -> str:
            return self._pairs("logical_or", expr)

        def _print_Max(self, expr: Any) -> str:
            return self._pairs("maximum", expr)

        def _print_Min(self, expr: Any) -> str:
            return self._pairs("minimum", expr)

    return Printer(
        {"fully_qualified_modules": True, "inline": True, "allow_unknown_functions": True}
    )
