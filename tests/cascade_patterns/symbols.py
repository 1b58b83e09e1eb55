"""What the patterns are written over: elements, invariants, results of stages."""

from __future__ import annotations

import sympy

exp, log, sqrt, Abs = sympy.exp, sympy.log, sympy.sqrt, sympy.Abs
x, v, w, g, k, u, a_, b_, y_, dp = sympy.symbols("x v w g k u gate up y dp", real=True)
x2 = sympy.Symbol("x2", real=True)
W_ = sympy.Symbol("weight", positive=True)
mass = sympy.Symbol("mass", positive=True)
px, py, pz = sympy.symbols("px py pz", real=True)
l = sympy.Symbol("l", integer=True, nonnegative=True)  # noqa: E741
N = sympy.Symbol("N", integer=True, positive=True)
i, t = sympy.symbols("i t", integer=True, nonnegative=True)
sink, lam = sympy.symbols("sink lam", real=True)
T, p, gamma = sympy.symbols("T p gamma", positive=True)
a11, a12, a22 = sympy.symbols("a11 a12 a22", real=True)
EPS = sympy.Rational(1, 10**6)


def real(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, real=True)


m, s, o, ss, a, S, M, mu, q = map(real, ["m", "s", "o", "ss", "a", "S", "M", "mu", "q"])
P = exp(x - m) / s
MEAN = S / N
