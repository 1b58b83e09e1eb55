"""Converts expressions between TVM and sympy."""
