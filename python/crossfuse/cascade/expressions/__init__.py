"""Expressions of TVM as expressions of sympy, and back."""
